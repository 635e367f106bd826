"""The short form of `make fuzz`."""

from pathlib import Path

import pytest
from fuzz_attack import MAX_GROWTH, attack


@pytest.mark.cluster
def test_malformed_messages_harm_nobody(tmp_path: Path) -> None:
    result = attack(tmp_path, 2_000, seed=1)
    assert result.sent >= 2_000
    assert not result.died
    assert result.survived
    assert result.identical
    assert result.growth <= MAX_GROWTH, result.grown
