"""Wafers that sleep for as long as a kernel is predicted to take, in place of computing: any number on a few cores.

What they send is zeros. A process hook, as tests inject faults (benchmarks/process_hooks/), or a module in the place of
`wafer`; EMULATED_WAFER has the rates, as JSON.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from appliance.compiler.cost.kernel_profile import operations_time
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import return_of
from waferbox.cirh.text.parser import parse_module
from waferbox.prediction.simulation import Compute

VARIABLE: Final = "EMULATED_WAFER"


def emulate(compute: Compute) -> str:
    """What the variable is to be."""
    return json.dumps(dataclasses.asdict(compute))


class Sleeper:
    """Sleeps on average for just as long as asked: what one sleep took too long, the next ones are shorter."""

    def __init__(self) -> None:
        self._late = 0.0

    def sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        wanted = seconds - self._late
        if wanted > 0:
            time.sleep(wanted)
        self._late = time.perf_counter() - begin - wanted


def install(module: str) -> None:
    """Called once in each process, before anything else. Others than wafers stay as they are."""
    if module != "wafer":
        return
    import wafer.kernels

    model, sleeper = Compute(**json.loads(os.environ[VARIABLE])).model(), Sleeper()

    def make(text: str, library: Any) -> Callable[..., list[torch.Tensor]]:
        parsed = parse_module(text)
        seconds = operations_time(parsed, model)
        made = [torch.zeros(types.shape(v), dtype=types.dtype(v)) for v in return_of(parsed).operands]

        def kernel(inputs: Sequence[torch.Tensor], places: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
            sleeper.sleep(seconds)
            return [own if place is None else place for own, place in zip(made, places, strict=True)]

        return kernel

    wafer.kernels._make = make


def main() -> int:
    """A wafer by hand."""
    install("wafer")
    from wafer.__main__ import main as run_wafer

    return run_wafer(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
