"""The trace of one step of training or evaluation: `trace_step`, and OpenTrace for the body of a loop."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from cstorch._internal.log import SlowWork
from cstorch._internal.tracing import messages
from cstorch._internal.tracing.cell import Cell
from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.device.dispatch import captured, device_modes
from cstorch._internal.tracing.device.registration import warn_of_autocast
from cstorch._internal.tracing.operators import is_whole
from cstorch._internal.tracing.provenance import Scopes, line_of
from cstorch._internal.tracing.recording.functional import functionalize
from cstorch._internal.tracing.recording.known_values import keep_recipes
from cstorch._internal.tracing.recording.lost_state import check_unregistered_state, kept_gradients
from cstorch._internal.tracing.recording.recorder import Recorder
from cstorch._internal.tracing.recording.trace import Argument, InputInfo, OutputInfo, StateInfo, Trace
from cstorch._internal.tracing.rewrites.patches import patched
from cstorch._internal.tracing.tensor import Handle, LazyTensor
from cstorch._internal.tracing.wrong_operands import strings_explained
from cstorch.errors import TraceError

logger = logging.getLogger("cstorch")

Getter = Callable[[], torch.Tensor]


def trace_step(
    function: Callable[[Any], Any],
    batch: Any,
    states: Mapping[str, Getter],
    modules: Mapping[nn.Module, str],
    collect_outputs: Callable[[Any], Sequence[tuple[str, torch.Tensor]]],
    work: SlowWork | None = None,
) -> Trace:
    """Runs `function(batch)` once, without computing anything, and returns it as a graph.

    Args:
        function: One whole step; its argument is the batch with device tensors instead of CPU tensors.
        batch: Any pytree; its tensors are named "input_<i>" in flatten order.
        states: The getter of each state, by name; it returns the tensor that is the state at the time of the call. So a
            tensor that the step replaces is still the state if the getter returns the new one. Other device tensors
            from before the step become "state.tensors.<i>".
        modules: The path of each module, for provenance and layers.
        collect_outputs: Takes the result of the step, and returns name and device tensor of each output.
        work: Takes the progress, for those who wait.

    Raises:
        TraceError: The step cannot be traced; the message has the line of the script.
    """
    recording = OpenTrace(batch, states, modules, work)
    try:
        return recording.finish(function(recording.batch), collect_outputs)
    except RuntimeError as error:
        if "Creating a new Tensor subclass" in str(error):
            raise messages.subclass(line_of(error)) from error
        raise
    except (TypeError, AttributeError, ValueError) as error:
        if (explained := strings_explained(batch, error)) is not None:
            raise explained.with_traceback(error.__traceback__) from None
        raise
    finally:
        recording.close()


@functools.cache
def _warn_of_anomaly_detection() -> None:
    logger.warning(
        "torch.autograd.set_detect_anomaly(True) has no effect in a traced step, whose values are on the cluster. "
        "`waferbox check` names the first value that is wrong"
    )


class OpenTrace:
    """A step that is being recorded: all calls of this thread from the construction to `finish` or `close`.

    Arguments and errors are those of `trace_step`.

    batch: The batch with device tensors instead of CPU tensors.
    """

    def __init__(
        self,
        batch: Any,
        states: Mapping[str, Getter],
        modules: Mapping[nn.Module, str],
        work: SlowWork | None = None,
    ) -> None:
        if context.recorder is not None:
            raise TraceError(
                "a traced step was called within another traced step; call the inner function without @trace"
            )
        # Constants of an earlier trace may be buffers of a module now; they have no value before the step.
        self._states = states = {name: getter for name, getter in states.items() if not _is_remade(getter())}
        self._before = {name: _state_tensor(name, getter) for name, getter in states.items()}
        self._handles = {name: tensor._handle for name, tensor in self._before.items()}  # `p.data = v` replaces them
        self._work = SlowWork("Tracing") if work is None else work
        self._recorder = recorder = Recorder(Scopes(modules, _owners(modules), self._work), states)
        for name, tensor in self._before.items():
            _add_state(recorder, name, tensor)
        self._inputs: list[LazyTensor] = []
        self.batch = pytree.tree_map(self._add_input, batch)
        # This object must not keep tensors of the step alive: those that are alive afterwards are the user's.
        self._optimizers: list[torch.optim.Optimizer] = []
        optimizers = self._optimizers
        stepped, thread = recorder.stepped, threading.get_ident()

        def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if threading.get_ident() != thread:  # which may train another model meanwhile
                return
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if not any(isinstance(parameter, LazyTensor) for parameter in parameters):
                raise messages.optimizer_elsewhere(optimizer)
            optimizers.append(optimizer)
            stepped.update(map(id, parameters))

        self._hook = register_optimizer_step_post_hook(note)
        self._modes = contextlib.ExitStack()
        context.recorder = recorder
        self._modes.enter_context(recorder.scopes)
        self._modes.enter_context(captured())
        self._modes.enter_context(patched())
        self._modes.enter_context(device_modes())
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):  # entered outside of the step
            warn_of_autocast()
        if torch.is_anomaly_enabled():  # it reads the values of gradients
            _warn_of_anomaly_detection()
            self._modes.enter_context(torch.autograd.set_detect_anomaly(False))
        self._is_open = True

    def _add_input(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, LazyTensor):
            return leaf
        self._inputs.append(self._recorder.add_input(f"input_{len(self._inputs)}", leaf))
        return self._inputs[-1]

    def finish(self, result: Any, collect_outputs: Callable[[Any], Sequence[tuple[str, torch.Tensor]]]) -> Trace:
        """Ends the recording and returns it as a graph. Arguments and errors are those of `trace_step`."""
        recorder, states, before = self._recorder, self._states, self._before
        try:
            outputs = list(collect_outputs(result))
            if recorder.counter is not None:
                recorder.counter.add_(1)
            self._modes.close()
            context.recorder = None
            self._work.where = "making a graph of what was traced"
            kept = kept_gradients(recorder, before, self._optimizers)
            ends = _state_ends(recorder, states, self._handles)
            step_end = _StepEnd(recorder, ends, result, self._optimizers, kept)
            infos = [_output_info(name, tensor) for name, tensor in outputs]
            trace = step_end.trace([(info, recorder.value_of(info.tensor)) for info in infos])
            carried = [*before.values(), *(get() for get in states.values())]
            known = [*self._inputs, *(tensor for _, tensor in outputs), *carried]
            check_unregistered_state(recorder, known, before.values(), self._optimizers)
            for state in trace.states:
                if state.changed:
                    if (refusal := recorder.known_values.states_read.get(state.cell)) is not None:
                        raise messages.changed_state_read(state.name, refusal)
                    state.cell.changes_in_steps = True
                    if (error := recorder.assumed_constant.get(id(state.cell))) is not None:
                        raise error
            keep_recipes(recorder.made, recorder.calls, recorder.arguments)
        finally:
            self.close()
        return trace

    def close(self) -> None:
        """Ends the recording without a result, unless it has ended."""
        if not self._is_open:
            return
        self._is_open = False
        self._modes.close()
        context.recorder = None
        context.functions.clear()
        self._hook.remove()
        for name, handle in self._handles.items():
            self._before[name]._handle = handle
        _drop_gradients(self._recorder, self._before.values())
        _settle(self._states, self._handles)


def _output_info(name: str, tensor: torch.Tensor) -> OutputInfo:
    if not isinstance(tensor, LazyTensor):
        raise TraceError(f"the output {name!r} is not a tensor on the device: {tensor!r}")
    return OutputInfo(name=name, tensor=tensor)


def _state_ends(recorder: Recorder, states: Mapping[str, Getter], handles: Mapping[str, Handle]) -> dict[int, int]:
    """Returns the value of each state at the end of the step, by its value at the start."""
    ends: dict[int, tuple[int, str]] = {}  # with the name of the first state that has the storage
    for name, getter in states.items():
        tensor = getter()
        if not isinstance(tensor, LazyTensor):
            raise TraceError(f"the step replaced the state {name!r} by something that is no device tensor: {tensor!r}")
        cell = handles[name].cell
        assert cell is not None
        is_replaced = tensor._handle.cell is not cell
        if is_replaced and not is_whole(handles[name].meta, cell):
            raise TraceError(
                f"the step replaced the state {name!r}, which is a view of another tensor; update it in place instead"
            )
        start = recorder.argument(name).value
        final, other = ends.setdefault(start, (recorder.value_of(tensor) if is_replaced else start, name))
        if final != (recorder.value_of(tensor) if is_replaced else start):
            raise messages.shared_state_replaced(name, other)
    return {start: final for start, (final, _) in ends.items()}


@dataclass(frozen=True, slots=True)
class _StepEnd:
    """A complete recording, from which graphs with more or fewer outputs can be made.

    ends: The value of each state at the end of the step, by its value at the start.
    """

    recorder: Recorder
    ends: Mapping[int, int]
    result: Any
    optimizers: Sequence[torch.optim.Optimizer]
    kept_gradients: tuple[str, ...]

    def trace(self, outputs: Sequence[tuple[OutputInfo, int]]) -> Trace:
        """Returns the recording as a graph of pure functions, without the states that the step does not use.

        Args:
            outputs: Each output and its value in the recording.
        """
        arguments = self.recorder.arguments
        state_arguments = [argument for argument in arguments if argument.kind == "state"]
        input_arguments = [argument for argument in arguments if argument.kind == "input"]
        constants = [argument for argument in arguments if argument.kind == "constant"]
        ends = [self.ends.get(argument.value, argument.value) for argument in state_arguments]
        graph = functionalize(
            [*state_arguments, *input_arguments, *constants],
            self.recorder.calls,
            [*ends, *(value for _, value in outputs)],
        )
        return Trace(
            number=self.recorder.number,
            graph=graph,
            states=tuple(_leave_out_untouched(graph, state_arguments)),
            inputs=tuple(
                InputInfo(name=argument.name, shape=tuple(argument.meta.shape), dtype=argument.meta.dtype)
                for argument in input_arguments
            ),
            outputs=tuple(info for info, _ in outputs),
            result=self.result,
            optimizers=tuple(dict.fromkeys(self.optimizers)),
            kept_gradients=self.kept_gradients,
            repeats=self.recorder.repeats,
            calls=tuple(self.recorder.calls),
            arguments=tuple(self.recorder.arguments),
            with_outputs=lambda more: self.trace([*outputs, *((info, self._end_value(info)) for info in more)]),
        )

    def _end_value(self, output: OutputInfo) -> int:
        value = self.recorder.value_of(output.tensor)
        return self.ends.get(value, value)


def _leave_out_untouched(graph: fx.Graph, state_arguments: Sequence[Argument]) -> list[StateInfo]:
    """Erases the states that the step does not use; returns the others."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    end = graph.output_node()
    results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    infos, kept = [], []
    for argument, start, final in zip(state_arguments, placeholders, results, strict=False):
        assert argument.cell is not None
        changed = final is not start
        if changed:
            _check_same_type(argument.name, start, final)
            kept.append(final)
        elif len(start.users) == 1 and start not in results[len(state_arguments) :]:
            continue  # only the output node uses it, as the unchanged state
        infos.append(StateInfo(name=argument.name, cell=argument.cell, changed=changed))
    end.args = ((*kept, *results[len(state_arguments) :]),)
    names = {info.name for info in infos}
    for argument, start in zip(state_arguments, placeholders, strict=False):
        if argument.name not in names:
            graph.erase_node(start)
    return infos


def _check_same_type(name: str, start: fx.Node, final: fx.Node) -> None:
    old, new = start.meta["val"], final.meta["val"]
    if old.shape != new.shape or old.dtype != new.dtype:
        raise TraceError(
            f"the step replaced the state {name!r}, of shape {tuple(old.shape)} and type {old.dtype}, by a tensor of "
            f"shape {tuple(new.shape)} and type {new.dtype}; state keeps its shape and type"
        )


def _settle(states: Mapping[str, Getter], handles: Mapping[str, Handle]) -> None:
    """Gives each tensor that replaced a state the state's cell, even if it was another state before."""
    for name, getter in states.items():
        try:
            tensor, handle = getter(), handles[name]
        except KeyError:  # deleted by a step that has failed
            continue
        if isinstance(tensor, LazyTensor) and tensor._handle.cell is not handle.cell:
            tensor._handle = handle


def _drop_gradients(recorder: Recorder, parameters: Iterable[torch.Tensor]) -> None:
    """Removes the gradients that the step made, since each traced step begins without gradients."""
    for parameter in parameters:
        gradient = parameter.grad if parameter.is_leaf else None
        if isinstance(gradient, LazyTensor) and gradient._handle.trace == recorder.number:
            parameter.grad = None


def _add_state(recorder: Recorder, name: str, tensor: LazyTensor) -> None:
    cell, meta = _cell(tensor), tensor._handle.meta
    if not recorder.is_state(cell) and meta.is_contiguous() and meta.numel() == cell.numel:
        cell.reshape(tuple(meta.shape))  # made as a view of a temporary, such as torch.arange(6).view(2, 3)
    recorder.add_state(name, cell)


def _is_remade(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, LazyTensor) and tensor._handle.recipe is not None and tensor._handle.cell is None


def _state_tensor(name: str, getter: Getter) -> LazyTensor:
    tensor = getter()
    if not isinstance(tensor, LazyTensor):
        raise TraceError(
            f"the state {name!r} is not on the device, but on {getattr(tensor, 'device', 'no device')}: create it "
            f"under `with backend.device:` or move it with `.to(backend.torch_device)`; make an optimizer "
            f"after cstorch.compile, which moves the model"
        )
    if tensor._handle.cell is None:
        raise messages.stale(tensor)
    return tensor


def _cell(tensor: torch.Tensor) -> Cell:
    assert isinstance(tensor, LazyTensor)
    assert tensor._handle.cell is not None
    return tensor._handle.cell


def _owners(modules: Mapping[nn.Module, str]) -> dict[int, str]:
    """Returns the path of the module that owns each parameter, by the id of the parameter's cell."""
    owners: dict[int, str] = {}
    for module, path in modules.items():
        for parameter in module._parameters.values():
            if isinstance(parameter, LazyTensor):
                owners.setdefault(id(parameter._handle.cell), path)
    return owners
