"""One sample of an operator as a step, and what becomes of it on one wafer and on two.

Of each sample there are up to four variants:
    first    the first tensor whose rows can be cut is the batch; all other tensors are weights or buffers
    all      every tensor with as many rows is part of the batch
    state    no tensor is of the batch: the operator is then MemoryX's
    inplace  as `first`, with the operator's in-place form on a copy

A tensor x of the batch that can have a gradient is used as x + p, with p a weight of zeros for one row: so the gradient
of x comes back cut, and that of p as the sum over the wafers. The loss weighs each element by its value.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from compiled_steps import Traced
from operator_samples import name_of, rows_of, tensors_of
from plan_simulator import Simulation
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from appliance.compiler.core.errors import CompileError
from appliance.compiler.plan_check.roles import PlanError
from cstorch.errors import CstorchError
from waferbox.cirh import CirhError

WAFERS = (1, 2)
# Against eager torch, relative to the largest finite element of a result.
_TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}
_REFUSALS = (CstorchError, CompileError, CirhError)
# What torch says of the operator itself, on every device but the CPU.
_OF_TORCH = "expected tensor_indices_or_sections to be on cpu"
_UNINITIALISED = "empty"

Results = dict[int, tuple[str, str]]
"""By the number of wafers: a verdict, and what it says.

exact    as eager torch, to the tolerance; NaN, infinities and integers exactly
rounded  so in float64 alone: another order of additions, of an operator that is badly conditioned
random   the operator draws numbers; it ran, with shapes and types that are right
refused  by an error that names an operation and the line
vague    by an error that does not
wrong    other numbers, shapes or types
crash    any other exception
skipped  eager torch itself fails
"""


class Case:
    """A sample with a part for each tensor."""

    def __init__(self, operator: Any, sample: Any, variant: str, *, backward: bool, dtype: torch.dtype) -> None:
        self._operator, self._sample, self._variant, self._backward = operator, sample, variant, backward
        self._tolerance = _TOLERANCES[dtype]
        leaves, self._structure = tree_flatten((sample.input, sample.args, sample.kwargs))
        self._leaves = [_converted(leaf, dtype) for leaf in leaves]
        self._is_factory = not tensors_of(sample) and "device" not in sample.kwargs
        self._cut = self._places_of_batch()
        self.batch = [self._leaves[place] for place in self._cut] or [torch.linspace(0, 1, 8).reshape(4, 2).to(dtype)]
        self.model = nn.Module()
        for place, leaf in enumerate(self._leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            floats = leaf.is_floating_point() or leaf.is_complex()
            if place in self._cut and floats:
                self.model.register_parameter(f"p{place}", nn.Parameter(torch.zeros_like(leaf[0])))
            elif place not in self._cut and floats:
                self.model.register_parameter(f"p{place}", nn.Parameter(leaf.clone()))
            elif place not in self._cut:
                self.model.register_buffer(f"b{place}", leaf.clone())

    def _places_of_batch(self) -> list[int]:
        rows = rows_of(self._sample)
        if self._variant == "state" or not rows:
            return []
        fit = [
            place
            for place, leaf in enumerate(self._leaves)
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == rows and leaf.numel()
        ]
        return fit if self._variant == "all" else fit[:1]

    def build(self, model: Any) -> Callable[[Any], list[torch.Tensor]]:
        """The step, for the model on the device or a plain one."""

        def step(batch: list[torch.Tensor]) -> list[torch.Tensor]:
            input, args, kwargs, wanted = self._arguments(model, batch)
            function = self._operator
            if self._variant == "inplace":
                function, input = self._operator.inplace_variant, input.clone()
            result = function(input, *args, **kwargs)
            outputs = _tensors(result)
            plain = [output.detach() for output in outputs]
            if not self._backward:
                return plain if self._cut else [*plain, batch[0].sum()]
            if self._variant != "inplace":
                outputs = _tensors(self._sample.output_process_fn_grad(result))
            loss = _loss(batch[0], outputs)
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
            return [*plain, loss.detach(), *(gradient for gradient in gradients if gradient is not None)]

        return step

    def _arguments(self, model: Any, batch: list[torch.Tensor]) -> tuple[Any, Any, Any, list[torch.Tensor]]:
        device, wanted, leaves = batch[0].device, [], list(self._leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
                leaves[place] = device
            if not isinstance(leaf, torch.Tensor):
                continue
            weight = getattr(model, f"p{place}", None)
            if place in self._cut:
                leaves[place] = batch[self._cut.index(place)]
                if weight is not None:
                    leaves[place] = leaves[place] + weight
                    wanted.append(leaves[place])
            else:
                leaves[place] = weight if weight is not None else getattr(model, f"b{place}")
            if weight is not None:
                wanted.append(weight)
        input, args, kwargs = tree_unflatten(leaves, self._structure)
        return input, args, {**kwargs, "device": device} if self._is_factory else kwargs, wanted

    def run(self) -> Results:
        """Traces, compiles and simulates it."""
        name = name_of(self._operator)
        try:
            torch.manual_seed(1)
            expected = [tensor.detach().clone() for tensor in self.build(copy.deepcopy(self.model))(self.batch)]
            random = _UNINITIALISED in name or self._is_random(expected)
        except Exception as error:  # noqa: BLE001 - whatever torch says
            return dict.fromkeys(WAFERS, ("skipped", _said(error)))
        torch.manual_seed(1)
        try:
            traced = Traced(self.build, self.model, self.batch, double=False)
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            return dict.fromkeys(WAFERS, _verdict(error))
        return {wafers: self._on(traced, wafers, expected, random=random) for wafers in WAFERS}

    def _is_random(self, expected: list[torch.Tensor]) -> bool:
        torch.manual_seed(2)
        again = self.build(copy.deepcopy(self.model))(self.batch)
        return any(difference(one, other, 0) for one, other in zip(again, expected, strict=True))

    def _on(self, traced: Traced, wafers: int, expected: list[torch.Tensor], *, random: bool) -> tuple[str, str]:
        try:
            plan = traced.plan(wafers)
            (found,) = Simulation(plan, traced.initial).run([list(self.batch)], 1)
        except Exception as error:  # noqa: BLE001 - it is what is looked for
            return _verdict(error)
        values = [found[f"output_{number}"] for number in range(len(found))]
        if len(values) != len(expected):
            return "wrong", f"{len(values)} outputs for {len(expected)}"
        tolerance = torch.inf if random else self._tolerance
        for value, wanted in zip(values, expected, strict=True):
            differs = difference(value, wanted, tolerance)
            if differs and not (random and "differ" in differs):
                return "wrong", differs
        return ("random" if random else "exact"), ""


def results_of(operator: Any, sample: Any, variant: str, *, backward: bool) -> Results:
    """What becomes of a sample in float32; where numbers differ, float64 tells rounding from error."""
    results = Case(operator, sample, variant, backward=backward, dtype=torch.float32).run()
    if any("elements differ by" in detail for _, detail in results.values()):
        double = Case(operator, sample, variant, backward=backward, dtype=torch.float64).run()
        rounded = {
            wafers for wafers, (verdict, _) in results.items() if verdict == "wrong" and double[wafers][0] == "exact"
        }
        results |= {wafers: ("rounded", results[wafers][1]) for wafers in rounded}
    return results


def variants_of(operator: Any, sample: Any, *, first: bool) -> list[str]:
    """The variants that a sample is tried in; `first`: it is the operator's first one."""
    rows = rows_of(sample)
    if rows is None:
        return ["state"]
    found = ["first"]
    if sum(t.dim() > 0 and t.shape[0] == rows and t.numel() > 0 for t in tensors_of(sample)) > 1:
        found.append("all")
    if first and operator.inplace_variant is not None and isinstance(sample.input, torch.Tensor):
        found.append("inplace")
    return [*found, "state"] if first else found


def difference(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """How two tensors differ; nothing if they do not."""
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} for {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"type {actual.dtype} for {expected.dtype}"
    if not expected.is_floating_point():
        wrong = int((actual != expected).sum())
        return f"{wrong} of {expected.numel()} elements differ" if wrong else ""
    one, other = actual.double(), expected.double()
    finite = other.isfinite()
    if not torch.equal(one[~finite].nan_to_num(7), other[~finite].nan_to_num(7)) or not one[finite].isfinite().all():
        return "NaN or infinities differ"
    if not finite.any():
        return ""
    scale = max(float(other[finite].abs().max()), 1e-3)
    worst = float((one[finite] - other[finite]).abs().max()) / scale
    return f"elements differ by {worst:.1e}" if worst > tolerance else ""


def _converted(leaf: Any, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().clone(memory_format=torch.contiguous_format)
    return leaf.to(dtype) if leaf.dtype is torch.float32 else leaf


def _tensors(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _loss(samples: torch.Tensor, outputs: list[torch.Tensor]) -> torch.Tensor:
    loss = (samples * 0.25).sum()
    for number, made in enumerate(outputs):
        output = torch.view_as_real(made) if made.is_complex() else made
        output = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        if output.requires_grad and output.is_floating_point():
            loss = loss + (output * (1 + number + 0.5 * torch.tanh(output.detach()))).sum()
    return loss


def _verdict(error: Exception) -> tuple[str, str]:
    text = str(error)
    if isinstance(error, PlanError) or not isinstance(error, _REFUSALS):
        return ("skipped" if re.search(_OF_TORCH, text) else "crash"), _said(error)
    named = re.search(r"\w+::\w+|aten\.\w+|cirh\.\w+|`\w+`|output_\d|\w+_loss|embedding_bag|a mask|an index", text)
    return ("refused" if named and re.search(r"operator_\w+\.py:\d+", text) else "vague"), _said(error)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
