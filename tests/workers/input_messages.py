"""The messages that tests of one part of an input_fn's process give it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from waferbox.input_process.messages import BatchLayout, InputSettings, Prepare, TensorLayout


def prepare_of(*, worker: int = 0, num_workers: int = 1, wafer: int = 0, num_csx: int = 1, **fields: Any) -> Prepare:
    """A message with defaults for all that it does not name."""
    settings = InputSettings(
        worker=worker, num_workers=num_workers, wafer=wafer, num_csx=num_csx, half_type="", mixed_precision=False
    )
    defaults = Prepare(
        settings=settings,
        python_paths=(),
        last_python_paths=(),
        interpreter_python_paths=(),
        working_directory="",
        redivided=False,
        input_names=(),
        vendor_builder=False,
    )
    return replace(defaults, **fields)


def layout_of(
    members: Sequence[TensorLayout], global_rows: int, local_rows: int, micro_batches: int = 1
) -> BatchLayout:
    """A layout without a ring."""
    return BatchLayout(
        members=tuple(members),
        global_rows=global_rows,
        local_rows=local_rows,
        micro_batches=micro_batches,
        slot_bytes=0,
        num_slots=0,
    )
