"""The step of an execution as the script makes it: its trace, its outputs, and the closures that are called in it."""

from abc import ABC
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from xdsl.dialects.builtin import ModuleOp

from cstorch._internal import state
from cstorch._internal.execution import Closure
from cstorch._internal.lowering import lower
from cstorch._internal.session.execution.outputs import Outputs, named_tensors, unknown_tensor, weight_in_closure
from cstorch._internal.tracing import Cell, LazyTensor, Source, StepAtHand, StepValue, Trace, is_tracing
from cstorch._internal.tracing.provenance import warn_user
from cstorch.errors import UsageError
from waferbox.cirh.text.printer import print_module


def check_step(trace: Trace, model: nn.Module | None, traceable: Sequence[torch.optim.Optimizer]) -> None:
    """Warns of a step that would run, but would give other numbers than plain PyTorch.

    Args:
        trace: The trace of the step.
        model: The compiled model that the step called, if any.
        traceable: The optimizers of cstorch, whose settings may change in traced steps.

    Raises:
        UsageError: A schedule of torch, or a count of steps in Python, sets the learning rate of an optimizer of the
            step.
    """
    for optimizer in trace.optimizers:
        name = type(optimizer).__name__
        if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
            raise UsageError(
                f"a scheduler of torch.optim.lr_scheduler is attached to {name}: it sets numbers from outside, which a "
                "traced step does not see, so the learning rate would stay the first one of an execution. Use a "
                "scheduler of cstorch.optim.lr_scheduler, which is a function of the step: that of the same name, or a "
                "SequentialLR of others"
            )
        if any(optimizer is known for known in traceable):
            continue
        is_torchs = type(optimizer).__module__.startswith("torch.")
        instead = (
            "Use the optimizer of the same name in cstorch.optim"
            if is_torchs
            else "Make it a subclass of cstorch.optim.Optimizer"
        )
        if is_torchs and any(group.get("lr_decay") for group in optimizer.param_groups):
            raise UsageError(
                f"{name} is an optimizer of torch, whose lr_decay counts steps in Python: in a traced step the "
                f"learning rate would not decay. {instead}"
            )
        warn_user(
            f"{name} is an optimizer of {'torch' if is_torchs else 'the script'}: the settings of its groups are "
            f"frozen as they are in the first step of an execution. {instead}"
        )
    if trace.kept_gradients:
        names = ", ".join(name.removeprefix("state.model.") for name in trace.kept_gradients[:3])
        more = len(trace.kept_gradients) - 3
        warn_user(
            f"the step does not clear the gradients of {names}{f' and {more} more' if more > 0 else ''}: plain PyTorch "
            "would add the next step's gradients to them, but here every step begins without gradients. Call "
            "optimizer.zero_grad() in the step; to add up gradients of several batches, take one larger batch, with "
            "`cstorch.backends.csx.performance.micro_batch_size` if it needs too much memory"
        )
    if model is not None and model.training and not _trains(trace):
        warn_user(
            "the model is in training mode, and the traced step steps no optimizer, which makes it an evaluation. Call "
            "model.eval() for one, or optimizer.step() in the traced function"
        )


def _trains(trace: Trace) -> bool:
    getters = state.named_getters()
    changed = (info.name for info in trace.states if info.changed and info.name in getters)
    return bool(trace.optimizers) or any(isinstance(getters[name](), nn.Parameter) for name in changed)


class TracedStep(ABC):
    """The step that all steps of an execution repeat. A subclass defines which part of the script is the step.

    another_program: The error message for a step that differs from the first, formatted with the number of the step.
    """

    another_program: str

    def __init__(self) -> None:
        self.calls: list[Closure] = []  # the closures of the current step, in order
        self.outputs = Outputs()
        self.at_hand = StepAtHand()
        self._calls_in_trace: list[Closure] = []  # the closures of the recording, called in every step
        self._model: nn.Module | None = None
        self._trace: Trace | None = None
        self._text = ""  # the CIRH of the first step
        self._is_open = False  # outputs can still be added to the trace

    @property
    def trace(self) -> Trace:
        """The newest trace of the step."""
        assert self._trace is not None
        return self._trace

    @property
    def text(self) -> str:
        """The step as CIRH text; empty before the first step is lowered."""
        return self._text

    @property
    def cells(self) -> dict[str, Cell]:
        """The cells of the step's states, by name."""
        return {info.name: info.cell for info in self.trace.states}

    @property
    def labels(self) -> dict[str, str]:
        """What the script calls the outputs that it gives to closures, by their names in the plan."""
        return self.outputs.labels([*self._calls_in_trace, *self.calls])

    @property
    def model_class(self) -> str:
        """The class of the compiled model that the step calls; empty: it calls none."""
        return "" if self._model is None else type(self._model).__name__

    @property
    def trains(self) -> bool:
        """Whether the step changes parameters: by an optimizer, or by itself."""
        return self._trace is not None and _trains(self._trace)

    def _begin_recording(self) -> None:
        self.outputs, self._calls_in_trace, self._is_open = Outputs(), [], True

    def _end_recording(self, trace: Trace) -> None:
        self._trace = trace
        if not self._text:
            check_step(trace, self._model, state.registered("optimizer"))

    def lower(self) -> ModuleOp:
        """Lowers the step to the module that the cluster runs from now on."""
        module = self._lower()
        self._text = print_module(module)
        return module

    def _lower(self) -> ModuleOp:
        self._is_open = False
        return lower(self.outputs.named(self.trace))

    def check_same_program(self, step: int) -> None:
        """Compares a step that was traced again with the program that runs.

        Args:
            step: The number of the step, from 1.

        Raises:
            UsageError: The two differ.
        """
        if print_module(self._lower()) != self._text:
            raise UsageError(self.another_program.format(step=step))

    def use_model(self, model: nn.Module) -> None:
        """Records the call of a compiled model.

        Raises:
            UsageError: The step has called another compiled model.
        """
        if self._model is not None and self._model is not model:
            raise UsageError(
                "two compiled models are called in one traced step: put them into one torch.nn.Module and compile that"
            )
        self._model = model

    def call_closure(self, closure: Closure) -> None:
        """Records the call of a closure, in the recording or after it.

        Raises:
            UsageError: A tensor of the call is not sent to the script.
        """
        leaves: list[Any] = pytree.tree_leaves((closure.args, closure.kwargs))
        if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            raise weight_in_closure(closure)
        if is_tracing():
            self._calls_in_trace.append(closure)
            return
        self.calls.append(self._with_step_values(closure))

    def _with_step_values(self, closure: Closure) -> Closure:
        """Returns the closure with the present values of its tensors; makes the sources of these outputs if it can."""
        arguments = (closure.args, closure.kwargs)
        args, kwargs = pytree.tree_map_only(LazyTensor, self.at_hand.value_of, arguments)
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, StepValue)]
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, LazyTensor)]
        values = {id(tensor): value for tensor, value in zip(tensors, found, strict=True)}
        for name, tensor in named_tensors(closure.function, closure.args, closure.kwargs):
            source = values[id(tensor)].source
            if self._is_open and source is not None and values[id(tensor)].value is None:
                self._add_output(source, name)
        for part in (part for value in found for part in value.sources()):
            assert part.source is not None
            if self._is_open:
                self._add_output(part.source, self._name_of(part.source))
            elif not self.has_output(part.source):
                raise unknown_tensor(closure)
        return replace(closure, args=args, kwargs=kwargs)

    def _add_output(self, source: Source, name: str) -> None:
        known = self.outputs.find(source)
        if known is None:
            self.outputs.add_late(source, name)
        else:
            self.outputs.rename_by_argument(known, name)

    def has_output(self, source: Source) -> bool:
        """Whether the value of a source is an output of the step."""
        return self._trace is not None and self.outputs.find(source) is not None

    def _name_of(self, source: Source) -> str:
        if isinstance(source, int):
            return f"input_{source}"
        cell = source._handle.cell if isinstance(source, LazyTensor) else None
        return next((name.replace(".", "_") for name, known in self.cells.items() if known is cell), "value")

    def close(self) -> None:
        """Releases the script's objects."""
        self._trace = None
        self.calls, self._calls_in_trace = [], []
