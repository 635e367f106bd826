"""The checked run of this process: its settings, and the record that it writes. None in ordinary runs."""

import functools
import math
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from cstorch._internal import state
from cstorch._internal.check.private_files import PrivateFiles
from cstorch._internal.tracing import Cell, LazyTensor, cell_of, user_line
from cstorch._internal.tracing.context import context
from cstorch._internal.tracing.provenance import line_of
from cstorch.errors import CstorchError, CstorchWarning
from waferbox import settings
from waferbox.checked_run.record import (
    INPUT,
    CheckpointSaved,
    Event,
    ExecutionBegun,
    ExecutionEnded,
    Found,
    Question,
    RunFailed,
    RunSettings,
    StepValues,
)
from waferbox.checked_run.record import append as append_event

# The elements of a tensor that a record has: the first one, and others at equal distances.
MOST_ELEMENTS: Final = 1 << 14
_PACKAGE: Final = str(Path(__file__).parents[2])


class CheckedRun:
    """The checked run of this process. Used by the script's thread.

    Args:
        settings: The settings.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        self.files = PrivateFiles(self.folder / "files")
        self.saved_states: set[str] | None = None  # the states in checkpoints of the script; None: it saved none
        self.saved_at = ""  # the line of the last one
        self.buffer_lines: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()  # of register_buffer
        self.in_step = False
        self._executions = 0
        self._ended = 0
        self._began = 0.0
        self._found: set[tuple[Question, str, str]] = set()
        self._show_warning = warnings.showwarning
        self._show_error = sys.excepthook
        self.is_refused = False  # whether the step does what cannot be traced or lowered
        self._refused_lines: set[str] = set()
        context.on_refusal = self._refused
        warnings.showwarning = self._warned
        sys.excepthook = self._failed
        self.loader_lines: WeakKeyDictionary[DataLoader[Any], str] = WeakKeyDictionary()  # where they were made
        register_module_buffer_registration_hook(self._buffer_registered)
        self._note_loaders()

    # --- Events -------------------------------------------------------------------------------------------------------

    def add(self, event: Event) -> None:
        """Adds an event to the record."""
        append_event(self.folder, event)

    def found(self, question: Question, message: str, line: str = "", *, is_error: bool = False) -> None:
        """Adds a finding to the record, once."""
        key = (question, line, message)
        if key not in self._found:
            self._found.add(key)
            self.add(Found(question=question, line=line, message=message, is_error=is_error))

    def begin_execution(self, steps: int, asked_steps: int) -> int:
        """Begins an execution, and returns its number.

        Raises:
            SystemExit: The run has had enough executions.
        """
        if self._executions == self.settings.executions:
            raise SystemExit(0)
        self._executions += 1
        self._began = time.monotonic()
        self.add(ExecutionBegun(execution=self._executions, steps=steps, asked_steps=asked_steps))
        return self._executions

    def end_execution(self) -> None:
        """Ends the execution, whose steps have all run."""
        self._ended += 1
        self.add(ExecutionEnded(execution=self._executions, seconds=time.monotonic() - self._began))

    def record_step(
        self, execution: int, step: int, outputs: Any, states: Mapping[str, torch.Tensor], batch: Any = None
    ) -> None:
        """Records the values of a step.

        Args:
            execution: The number of the execution.
            step: The number of the step, from 1; 0: before the first.
            outputs: The result of the traced function, with CPU tensors; None: it is not known.
            states: The states after the step, as CPU tensors, by name.
            batch: The batch of the step; None: it is not known.
        """
        named = {"output.": outputs, INPUT: batch}
        values = {
            f"{prefix}{n}": sample(leaf) for prefix, tree in named.items() for n, leaf in enumerate(tensors(tree))
        }
        values |= {name: sample(tensor) for name, tensor in states.items()}
        path = self.folder / f"values-{execution}-{step}.safetensors"
        save_file(values, path)
        self.add(StepValues(execution=execution, step=step, path=path.name))

    def _buffer_registered(self, module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        self.buffer_lines.setdefault(module, {})[name] = user_line()

    def _note_loaders(self) -> None:
        """Has the line noted at which each torch DataLoader is made."""
        initialise = DataLoader.__init__

        @functools.wraps(initialise)
        def noted(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            self.loader_lines[loader] = user_line()
            initialise(loader, *args, **kwargs)

        DataLoader.__init__ = noted  # type: ignore[method-assign, assignment]

    # --- Refusals, warnings and errors --------------------------------------------------------------------------------

    def _refused(self, error: CstorchError, line: str) -> None:
        """Records what cannot be traced or lowered, once for a line. The step goes on with zeros, to find the next."""
        self.is_refused = True
        if line not in self._refused_lines:
            self._refused_lines.add(line)
            self.found(Question.TRACE, str(error), line, is_error=True)

    def _warned(self, message: Warning | str, category: type[Warning], *arguments: Any, **named: Any) -> None:
        """Records a warning of the client library; shows every warning as before."""
        if issubclass(category, CstorchWarning):
            self.found(Question.PROGRAM, str(message), user_line())
        self._show_warning(message, category, *arguments, **named)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Records the error that ends the script: one of the client library, if the script's was raised from it."""
        chain = list(_chain(error))
        named = next((each for each in chain if isinstance(each, CstorchError)), error)
        causes = chain[1:] if named is error else ()
        innermost = named.__traceback__
        while innermost is not None and innermost.tb_next is not None:
            innermost = innermost.tb_next
        file = "" if innermost is None else innermost.tb_frame.f_code.co_filename
        self.add(
            RunFailed(
                type=type(named).__name__,
                message="; its cause is ".join([str(named), *(f"{type(each).__name__}: {each}" for each in causes)]),
                line=line_of(named),
                traceback="".join(traceback.format_exception(kind, error, trace)),
                is_ours=file.startswith(_PACKAGE) or isinstance(named, CstorchError),
                executions=self._ended,
                in_step=self.in_step,
            )
        )
        self._show_error(kind, error, trace)

    # --- Checkpoints --------------------------------------------------------------------------------------------------

    def saved(self, state_dict: Any) -> None:
        """Notes the states in a checkpoint of the script: those in it, and those of which it has copies."""
        leaves = tensors(state_dict)
        cells = {_cell(leaf) for leaf in leaves}
        states = {name: getter() for name, getter in state.named_getters().items()}
        names = {name for name, tensor in states.items() if _cell(tensor) in cells}
        own = {_cell(states[name]) for name in names}
        copies = [leaf.detach().cpu() for leaf in leaves if _cell(leaf) not in own]
        for name in states.keys() - names if copies else ():
            value = states[name].detach().cpu()
            if any(copy.dtype is value.dtype and torch.equal(copy, value) for copy in copies):
                names.add(name)
        self.saved_at = user_line()
        if self.saved_states is None:
            self.add(CheckpointSaved(line=self.saved_at))
        self.saved_states = names | (self.saved_states or set())


def _cell(tensor: torch.Tensor) -> Cell | int:
    """Returns what two tensors with the same values share."""
    return cell_of(tensor) if isinstance(tensor, LazyTensor) else tensor.data_ptr()


def tensors(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of a tree, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor, at most MOST_ELEMENTS of them, in float64."""
    flat = tensor.detach().reshape(-1)
    distance = max(1, math.ceil(flat.numel() / MOST_ELEMENTS))
    return flat[::distance].to(torch.float64, copy=True).contiguous()  # tied weights share their memory


@functools.cache
def checked_run() -> CheckedRun | None:
    """Returns the checked run of this process; None in ordinary runs."""
    text = settings.CHECK.get()
    return CheckedRun(RunSettings.from_json(text)) if text else None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, the one because of which it was raised, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
