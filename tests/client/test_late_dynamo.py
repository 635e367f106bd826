"""Dynamo takes half a second to import. The client does not import it; who does finds torch as it ever was."""

import textwrap
from collections.abc import Mapping

import pytest
from forked_checks import Outcome, run

CHECKS = {
    "meta tensors do not import it": """
        import sys
        import torch
        assert "torch._dynamo" not in sys.modules
        import cstorch
        x = torch.empty(3, 4, device="meta")
        for function in (torch.add, torch.div, torch.sub, torch.pow, torch.maximum):
            assert function(x, x).shape == (3, 4)
        assert (1 - x / 7).shape == (3, 4)
        for function in (torch.sigmoid, torch.nn.functional.gelu, torch.tanh, torch.exp, torch.sqrt):
            assert function(x).shape == (3, 4)
        assert "torch._dynamo" not in sys.modules
    """,
    "from its import on torch has the functions as ever": """
        import torch
        import cstorch
        from torch._decomp import meta_table
        from cstorch._internal.tracing.device.registration import _wrapped, _wrappers
        x = torch.empty(3, 4, device="meta")
        assert torch.div(x, 2).shape == (3, 4)
        marked = [_wrapped(wrapper) for wrapper in _wrappers()]
        assert len(marked) > 100
        import torch._dynamo
        for wrapper in _wrappers():
            try:
                wrapper()  # no arguments: it fails, but is looked at first
            except Exception:
                pass
        used = [function.__dict__["__dynamo_disable"].__code__.co_filename for function in marked]
        assert [file for file in used if "late_dynamo" in file] == []
        assert torch.div(x, 2).shape == (3, 4)
        compiled = torch.compile(lambda a: torch.sigmoid(a / 3), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(2)), torch.sigmoid(torch.ones(2) / 3))
    """,
}


@pytest.fixture(scope="module")
def outcomes() -> Mapping[str, Outcome]:
    return run({name: textwrap.dedent(code) for name, code in CHECKS.items()})


@pytest.mark.parametrize("check", CHECKS)
def test_dynamo(check: str, outcomes: Mapping[str, Outcome]) -> None:
    assert outcomes[check].status == 0, outcomes[check].stderr
