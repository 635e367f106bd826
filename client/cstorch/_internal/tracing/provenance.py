"""The source of an operation of the step: the user's line and the module."""

import functools
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, Self

import torch
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from cstorch._internal.log import SlowWork
from cstorch._internal.notebook import notebook_shell
from cstorch.errors import CstorchWarning
from waferbox.cirh.dialect.source import Source

_CSTORCH = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = tuple({sysconfig.get_paths()["purelib"] + os.sep, sysconfig.get_paths()["platlib"] + os.sep})
_SKIPPED = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    _CSTORCH + os.sep,
    os.path.join(os.path.dirname(_CSTORCH), "cerebras"),  # cerebras, cerebras_pytorch, ...
    "<frozen",
    "<string>",
    "<eval_with",
)

_OUTSIDE: Final = "what is outside of the model's modules"  # such as the update by the optimizer

_shown: dict[str, str | None] = {}


def _show(filename: str) -> str | None:
    """Returns the name of a file in messages and in the module; None if its frames are not the user's."""
    if filename.startswith(_SKIPPED):
        return None
    if filename.startswith(_STDLIB) and not filename.startswith(_SITE):
        return None
    if filename.startswith("<"):
        return filename  # typed at a prompt
    try:
        relative = os.path.relpath(filename)
    except FileNotFoundError:  # The current folder has been removed.
        return filename
    return os.path.abspath(filename) if relative.startswith(os.pardir) else relative


def _shown_name(filename: str) -> str | None:
    try:
        return _shown[filename]
    except KeyError:
        if (cell := _cell(filename)) is not None:
            return cell  # which may be run again, and then has another number
        shown = _show(filename)
        # The bytes of a file's name need not be text, and messages carry text alone.
        _shown[filename] = None if shown is None else shown.encode(errors="backslashreplace").decode()
        return _shown[filename]


def _cell(filename: str) -> str | None:
    """Returns the name of a notebook's cell, such as "In[4]"; None: the file is none."""
    shell = notebook_shell()
    names = None if shell is None else shell.compile.format_code_name(filename)
    return None if names is None else names[1]


def is_user_file(filename: str) -> bool:
    """Whether a file is not part of torch, cstorch or the standard library."""
    return bool(filename) and _shown_name(filename) is not None


def is_of_package(frame: FrameType) -> bool:
    """Whether a frame runs the code of an installed package."""
    return frame.f_code.co_filename.startswith(_SITE)


def line_of(error: BaseException) -> str:
    """Returns the innermost line of the user in the traceback of an error, such as "train.py:53"."""
    found = "an unknown line"
    traceback = error.__traceback__
    while traceback is not None:
        if (shown := _shown_name(traceback.tb_frame.f_code.co_filename)) is not None:
            found = f"{shown}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def user_frame() -> tuple[str, int]:
    """Returns file and line of the innermost frame outside torch, cstorch and the standard library, or ("", 0)."""
    file, frame = _innermost(sys._getframe(1))
    return file, 0 if frame is None else frame.f_lineno


def _innermost(frame: FrameType | None) -> tuple[str, FrameType | None]:
    while frame is not None:
        shown = _shown_name(frame.f_code.co_filename)
        if shown is not None:
            return shown, frame
        frame = frame.f_back
    return "", None


def warn_user(message: str) -> None:
    """Issues a CstorchWarning at the user's current line."""
    frame = _innermost(sys._getframe(1))[1] or sys._getframe(1)
    warnings.warn_explicit(
        message,
        CstorchWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def user_line() -> str:
    """Returns the user's current line, such as "train.py:53"."""
    return user_line_of(sys._getframe(1)) or "an unknown line"


def user_line_of(frame: FrameType | None) -> str:
    """Returns the user's line in the innermost of the frames of a stack; empty: there is none."""
    file, innermost = _innermost(frame)
    return "" if innermost is None else f"{file}:{innermost.f_lineno}"


def line_of_function(function: Callable[..., Any]) -> str:
    """Returns the line at which a function begins, such as "train.py:20"; empty: it is not the user's."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    code = getattr(function, "__code__", None)
    shown = None if code is None else _shown_name(code.co_filename)
    return "" if code is None or shown is None else f"{shown}:{code.co_firstlineno}"


class Scopes:
    """The modules of recorded operations; a context, which installs hooks of torch.

    A forward operation belongs to the innermost module that runs. An operation of the backward pass belongs to the
    module of the forward operation whose gradient it computes: both carry autograd's sequence number. The gradient that
    reaches a parameter belongs to the parameter's module.

    Args:
        modules: The path of each module.
        parameters: The path of the module that owns a parameter, by the id of the parameter's cell.
        work: Takes the module of the operation that is being recorded, for those who wait.
    """

    def __init__(self, modules: Mapping[torch.nn.Module, str], parameters: Mapping[int, str], work: SlowWork) -> None:
        self._modules = modules
        self._work = work
        self._parameters = parameters
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._in_metric = False
        self._forward: dict[int, tuple[str, str, int]] = {}
        self._handles: list[RemovableHandle] = []

    @property
    def in_forward(self) -> bool:
        """Whether the forward pass of a module runs."""
        return bool(self._stack) and torch._C._current_autograd_node() is None

    def source(self, name: str) -> Source:
        """Returns the source of the operation that is being recorded."""
        node = torch._C._current_autograd_node()
        if node is None:
            module = self._stack[-1] if self._stack else ""
            self._work.where = module or _OUTSIDE
            file, line = user_frame()
            if torch.is_grad_enabled():
                # Operations without gradients, which come after one with them, have its number too.
                self._forward.setdefault(_get_sequence_nr() - 1, (module, file, line))
            return Source(module=module, metric=self._in_metric, op=name, file=file, line=line)
        variable = getattr(node, "variable", None)
        if variable is not None:  # AccumulateGrad
            handle = getattr(variable, "_handle", None)
            module = self._parameters.get(id(handle.cell), "") if handle is not None else ""
            file, line = user_frame()
        else:
            module, file, line = self._forward.get(node._sequence_nr(), ("", "", 0))
            if not file:
                file, line = user_frame()
        self._work.where = module or _OUTSIDE
        return Source(module=module, backward=True, op=name, file=file, line=line)

    def _enter(self, module: torch.nn.Module, arguments: object) -> None:
        # A module without a name (a loss made in the step) inherits the path around it.
        outer = self._stack[-1] if self._stack else ""
        self._stack.append(self._modules.get(module, outer or type(module).__name__))
        self._starts.append(_get_sequence_nr())

    def _leave(self, module: torch.nn.Module, arguments: object, output: object) -> None:
        # Autograd nodes made in the module that no recorded operation claimed, such as those of custom Functions.
        path = self._stack.pop()
        for number in range(self._starts.pop(), _get_sequence_nr()):
            self._forward.setdefault(number, (path, "", 0))

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Assigns the operations recorded in the context to a named part of the running module."""
        outer = self._stack[-1] if self._stack else ""
        self._stack.append(f"{outer}.{name}" if outer else name)
        try:
            yield
        finally:
            self._stack.pop()

    @contextmanager
    def of_metric(self) -> Iterator[None]:
        """The operations recorded in the context are those of a metric."""
        outer, self._in_metric = self._in_metric, True
        try:
            yield
        finally:
            self._in_metric = outer

    def __enter__(self) -> Self:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
