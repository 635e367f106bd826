"""docs/vendor_operations.md says what the table has."""

import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))

import vendor_operations  # noqa: E402  from docs


def test_the_committed_page_is_current() -> None:
    text = vendor_operations.FILE.read_text()
    assert text == vendor_operations.page(), "stale: run `python docs/vendor_operations.py`"


def test_every_operation_of_the_dialect_is_there() -> None:
    found = vendor_operations.statuses()
    assert len(found) == 126
    assert found["cirh.Convolution"] == "executed"
    assert found["cirh.MeshShard"] == "annotation"
    assert found["cirh.SparseMatMul"] == "refused"
