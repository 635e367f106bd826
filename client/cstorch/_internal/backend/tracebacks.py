"""Tracebacks of uncaught errors without the frames inside of Waferbox and torch: what the script did is left."""

import sys
from types import TracebackType
from typing import Any

from cstorch._internal.notebook import notebook_shell
from cstorch._internal.tracing.provenance import is_of_package, is_user_file
from cstorch.errors import CstorchError, InternalError
from waferbox import settings

_OURS = ("cstorch", "waferbox", "grpc")  # packages; provenance knows torch and the standard library

_is_shortened = False


def shorten_tracebacks() -> None:
    """Has uncaught errors shown without internal frames, in a script or a notebook, unless WAFERBOX_TRACEBACK is full.

    The errors themselves stay as they are until they are shown. A defect of Waferbox is shown with all frames.
    """
    global _is_shortened
    if _is_shortened or settings.TRACEBACK.get():
        return
    _is_shortened = True
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shorten(error)
        show(kind, error, error.__traceback__)

    sys.excepthook = hook
    if (shell := notebook_shell()) is not None:
        # Not only CstorchError: what a call refuses may be a FileExistsError, and the stop button interrupts a wait.
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show_in_notebook)


def _show_in_notebook(
    shell: Any, kind: type[BaseException], error: BaseException, trace: TracebackType, tb_offset: int | None = None
) -> None:
    shorten(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)


def shorten(error: BaseException) -> None:
    """Takes internal frames out of the traceback of an error, and of the errors before it.

    Nothing is taken out if Waferbox has no part in it, if no other frame would be left, or if it is a defect.
    """
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        if not isinstance(one, InternalError):
            _shorten(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _shorten(error: BaseException) -> None:
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    is_ours = isinstance(error, CstorchError) or "cstorch" in map(_package, frames)
    kept = [frame for frame in frames if _is_users(frame)]
    if isinstance(error, KeyboardInterrupt):  # which may come while torch imports a package
        kept = [frame for frame in kept if not is_of_package(frame.tb_frame)] or kept
    if is_ours and kept:
        short = None
        for frame in reversed(kept):
            short = TracebackType(short, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        error.__traceback__ = short


def _package(frame: TracebackType) -> str:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_users(frame: TracebackType) -> bool:
    return is_user_file(frame.tb_frame.f_code.co_filename) and _package(frame) not in _OURS
