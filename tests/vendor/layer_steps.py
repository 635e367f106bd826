"""The steps that `scripts/trace_layers.py` has traced, compiled here and run beside the vendor's own CPU backend.

What is compared is the step with float32 in the place of the halves that the client writes: so a wrong operation does
not hide behind rounding. The constants in it were rounded to halves by the client.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plan_simulator import Simulation

from appliance.compiler.core.errors import CompileError
from appliance.compiler.pipeline import Target, compile_module
from appliance.compiler.plan_check.check import check_plan
from waferbox.cirh import CirhError
from waferbox.cirh.dialect import types
from waferbox.cirh.dialect.operations import func_of
from waferbox.cirh.modules.graph import signature
from waferbox.cirh.text.parser import parse_module

_HALF = re.compile(r"(?<![a-z0-9])f16(?=[>,}\s])|(?<=x)f16(?=>)")
_BITS = re.compile(r"dense<(0x[0-9A-F]{4})> : tensor<([0-9x]*)f16>")
# Of the largest change of a weight, and of a value: halves have 11 digits.
TOLERANCE = 2e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case: equal, wrong, refused (by the compiler), or untraced (by the client)."""

    kind: str
    why: str = ""


def _infinite(found: "re.Match[str]") -> str:
    """Bits of a half as those of a float32."""
    value = torch.tensor(int(found[1], 16), dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    bits = int(value.view(torch.int32)) & 0xFFFFFFFF
    return f"dense<0x{bits:08X}> : tensor<{found[2]}f32>"


def widened(text: str) -> str:
    """The same step with float32 for its halves."""
    head, mark, rest = text.partition("attributes {")
    return _HALF.sub("f32", _BITS.sub(_infinite, head)) + mark + _HALF.sub("f32", _BITS.sub(_infinite, rest))


def judge(folder: Path, wafers: int) -> Outcome:
    """Runs a case that was traced into `folder`."""
    path = folder / "step.mlir"
    text = path.read_text() if path.exists() else ""
    if not text or not (folder / "record.pt").exists():
        said = [line for kind in ("csx", "cpu") for line in (folder / f"{kind}.txt").read_text().splitlines()]
        return Outcome(kind="untraced", why=next((line for line in said if "Error: " in line), "no text"))
    record = torch.load(folder / "record.pt", weights_only=True)
    try:
        outputs, states = _run(widened(text), record, wafers)
    except (CirhError, CompileError) as error:
        return Outcome(kind="refused", why=str(error))
    differences = list(_differences(record, outputs, states))
    return Outcome(kind="wrong", why="; ".join(differences)) if differences else Outcome(kind="equal")


def _run(text: str, record: dict[str, Any], wafers: int) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
    module = parse_module(text)
    arguments, found = func_of(module).block.args, signature(module)
    plan = compile_module(text, Target(num_csx=wafers, num_shards=1))
    check_plan(plan)
    states = {}
    for state in found.states:
        shape, dtype = types.info(arguments[state.argument])
        value = record["first"].get(state.name.removeprefix("state.model."))
        states[state.name] = torch.zeros(shape, dtype=dtype) if value is None else value.to(dtype).reshape(shape)
    batches = [
        [batch[int(given.name.rpartition("_")[2])].to(types.dtype(arguments[given.argument])) for given in found.inputs]
        for batch in record["batches"]
    ]
    simulation = Simulation(plan, states)
    return simulation.run(batches), simulation.states


def _differences(
    record: dict[str, Any], outputs: list[dict[str, torch.Tensor]], states: dict[str, torch.Tensor]
) -> Iterator[str]:
    for step, (made, values) in enumerate(zip(outputs, record["outputs"], strict=True)):
        for name, expected in zip(("output_loss", "output_made"), values, strict=False):
            if name not in made:
                yield f"no {name} among {sorted(made)}"
            elif not _close(made[name], expected, expected):
                yield f"{name} of step {step} is {made[name].flatten()[:3]}, not {expected.flatten()[:3]}"
    for name, expected in record["last"].items():
        state, first = states.get(f"state.model.{name}"), record["first"][name]
        if state is not None:
            if not _close(state - first, expected - first, expected - first):
                yield f"{name} changed by {(state - first).flatten()[:3]}, not {(expected - first).flatten()[:3]}"
        elif not torch.equal(expected, first):
            yield f"{name} is no state"


def _close(made: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> bool:
    if made.shape != expected.shape:
        return False
    bound = TOLERANCE * float(scale.double().abs().max() if scale.numel() else 0) + 2e-6
    return bool(torch.allclose(made.double(), expected.double(), rtol=0, atol=bound, equal_nan=True))
