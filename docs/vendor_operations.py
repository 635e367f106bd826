"""Writes docs/vendor_operations.md, the vendor's dialect by operation. `python docs/vendor_operations.py`."""

from pathlib import Path
from typing import Final

from waferbox.cirh.table.lookup import ANNOTATIONS, REFUSED, names

FILE: Final = Path(__file__).with_suffix(".md")
# Rows of the table that the vendor's dialect lacks.
_OURS: Final = frozenset(
    f"cirh.{name}" for name in ("Attention", "AttentionGrad", "Neg", "RandomBernoulli", "RandomInteger", "RoundCb16")
)
_REMARKS: Final = {
    "cirh.Convolution": "channels in dimension 1; equal padding on both sides; transposed ones too",
    "cirh.FusedBatchNorm": "statistics of the whole batch, over all wafers; in training they move the running ones",
    "cirh.FusedBatchNormGrad": "where the norm does not train, with the norm of the same tensor in the step",
    "cirh.Gather": "of rows, and of single elements (`torch.gather`)",
    "cirh.GroupNormGrad": "with the norm of the same tensor in the step",
    "cirh.Pool": "maxima and means; means without padding, of which the text does not say whether it counts",
    "cirh.RandomNormal": "other numbers than the vendor's, another for each operation and step",
    "cirh.RandomUniform": "other numbers than the vendor's, another for each operation and step",
    "cirh.StridedSlice": "steps forward; no ellipsis, no new dimensions",
    "cirh.StridedSliceGrad": "as `StridedSlice`",
    "cirh.pad": "with one value",
}
_HEAD: Final = """# The vendor's operations

What becomes of each operation of the dialect that the vendor's client (release 2.10) knows, in the text of a step.
Made by `python docs/vendor_operations.py`.

*executed*: with the numbers that torch gives, on any number of wafers. *annotation*: it says where a tensor lies, or what
it is called, and changes none. *refused*: the compile ends with an error that names the operation and the line of the
script.

| operation | | |
|---|---|---|
"""


def statuses() -> dict[str, str]:
    """Each operation of the vendor's, and what becomes of it."""
    executed = {name for name in names() if name.startswith("cirh.")} - _OURS | {"cirh.Const"}
    found = dict.fromkeys(executed, "executed") | dict.fromkeys(ANNOTATIONS, "annotation")
    return dict(sorted({**found, **dict.fromkeys(REFUSED, "refused")}.items(), key=lambda item: item[0].lower()))


def page() -> str:
    """The page as it is now."""
    rows = (
        f"| `{name.removeprefix('cirh.')}` | {status} | {_REMARKS.get(name, '')} |\n"
        for name, status in statuses().items()
    )
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    FILE.write_text(page())
