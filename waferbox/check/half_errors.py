"""The errors of half precision in a step, by layer, and the first value that is far from float32.

The step's program is run on the CPU twice, with the states and the batch that plain PyTorch had: as it is, in float32,
and with the casts that the compiler inserts for the precision of the script. Casts change no other operation, so the
values of both are matched by their operations.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from appliance.compiler.core.errors import CompileError
from appliance.compiler.core.target import Precision, Target
from appliance.compiler.pipeline import Stages
from waferbox.check.bisection import MOST_BYTES, argument_tensors, run_operation
from waferbox.checked_run.record import StepObserved
from waferbox.cirh.dialect.locations import source_of
from waferbox.cirh.dialect.operations import Const, body_ops
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import nbytes
from waferbox.cirh.text.parser import parse_module

# A value is far from float32 if its error is this part of its largest element. Rounding adds up to some hundredths.
_FAR: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfErrors:
    """The errors of a step in half precision.

    Attributes:
        first: the first operation whose result is far from that of float32; None: none is.
        first_error: its error, as a part of its largest element; infinite: it is not finite.
        layers: the largest error in the forward and the backward pass of each layer, in the order of the step.
    """

    first: Source | None
    first_error: float
    layers: Mapping[str, tuple[float, float]]


def half_errors(text: str, precision: Precision, folder: Path, observed: StepObserved) -> HalfErrors | None:
    """Returns the errors of a step; None: it cannot be run here, or not in this precision.

    Args:
        text: the step as CIRH.
        precision: the precision of the script.
        folder: the folder of the record.
        observed: the step whose states and batch are taken.
    """
    plain, cast = parse_module(text), parse_module(text)
    if sum(nbytes(value) for op in body_ops(plain) for value in op.results) > MOST_BYTES:
        return None
    try:
        _ = Stages(cast, Target(num_csx=1, num_shards=1, precision=precision)).sharding  # inserts the casts
    except CompileError:
        return None
    kept = load_file(folder / observed.path)
    expected = dict(_results_by_operation(plain, kept, observed.counter))
    first: Source | None = None
    first_error = 0.0
    layers: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for key, tensor in _results_by_operation(cast, kept, observed.counter):
        if key not in expected or expected[key].shape != tensor.shape:
            continue
        error = _error(tensor, expected[key])
        source = key[0]
        errors = layers[source.module]
        errors[source.backward] = max(errors[source.backward], error)
        if first is None and error > _FAR:
            first, first_error = source, error
    if not layers:
        return None
    return HalfErrors(
        first=first,
        first_error=first_error,
        layers={name: (forward, backward) for name, (forward, backward) in layers.items() if name},
    )


_Key = tuple[Source, str, int]  # of an operation: its source and name, and its number among those


def _results_by_operation(
    module: ModuleOp, kept: Mapping[str, torch.Tensor], counter: int
) -> Iterator[tuple[_Key, torch.Tensor]]:
    """Runs a program, and yields the floating point results of its operations; none if an argument is missing."""
    values: dict[SSAValue, torch.Tensor] | None = argument_tensors(module, kept, counter)
    counts: dict[tuple[Source, str], int] = defaultdict(int)
    with torch.no_grad():
        for op in body_ops(module) if values is not None else ():
            assert values is not None
            for tensor in run_operation(op, values):
                if not isinstance(op, Const) and op.name != "cirh.Cast" and tensor.is_floating_point():
                    source = source_of(op)
                    counts[source, op.name] += 1
                    yield (source, op.name, counts[source, op.name]), tensor


def _error(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error as a part of the largest element; infinite if a result is not finite that should be."""
    if not tensor.numel():
        return 0.0
    given, right = tensor.double(), expected.double()
    finite = right.isfinite()
    if not bool(given[finite].isfinite().all()):
        return math.inf
    largest = float(right[finite].abs().max()) if bool(finite.any()) else 0.0
    return float((given - right)[finite].abs().max()) / largest if largest else 0.0
