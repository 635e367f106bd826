"""compile prepares a model for tracing; trace marks the function that is one whole step."""

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule
from torch.nn.parameter import is_lazy

from cstorch import backends
from cstorch._internal import state
from cstorch._internal.execution import check_outside_of_loops, current_execution
from cstorch._internal.imported_again import is_imported_again
from cstorch._internal.tracing import move_module
from cstorch.backend import Backend, current_backend, has_backend, is_on_csx
from cstorch.backend import backend as make_backend
from cstorch.errors import UsageError

# --- compile: prepares a model for tracing ----------------------------------------------------------------------------


logger = logging.getLogger("cstorch.compile")


class CompiledModel:
    """A model on the backend's device. It is called as the model, and has all of the model's attributes.

    Args:
        model: The model.
        backend: The backend, in whose context the model is called.
    """

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.__dict__["module"] = model
        self.__dict__["_backend"] = backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        execution = current_execution()
        if execution is not None:
            if self._backend is not current_backend(raise_exception=False):
                raise UsageError(
                    f"this {type(self.module).__name__} was compiled for a backend that is closed: make the model and "
                    "its optimizer anew, and compile it for the new backend"
                )
            execution.use_model(self.module)
        with self._backend.forward_context():
            return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copies the model, for averages of its weights; the copy is no compiled model."""
        return copy.deepcopy(self.module, memo)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict into the tensors of the model, as `nn.Module.load_state_dict`.

        Args:
            state_dict: What `state_dict` returned.
            strict: Whether all names must fit.
            assign: Must be False.

        Raises:
            UsageError: `assign` is True, which would replace tensors that the cluster keeps.
        """
        if assign:
            raise UsageError("load_state_dict(assign=True) replaces tensors that the cluster knows; leave assign out")
        return self.module.load_state_dict(state_dict, strict=strict)

    def __repr__(self) -> str:
        return f"CompiledModel({self.module!r})"


def compile(model: nn.Module, backend: str | Backend | None = None) -> CompiledModel:
    """Moves a model to the backend's device and makes its tensors state. Nothing is compiled before the first step.

    The model then has the device as its attribute `device`.

    Args:
        model: Any module. Its parameters stay the same tensors.
        backend: The backend of this process, or its name; None: the one that there is, else the CPU.

    Returns:
        The model on the device, to be called in the traced step.

    Raises:
        TypeError: `model` is not a module.
        UsageError: The backend is not that of this process, the model is made by torch.jit.script, or a loop is
            running, or parameters of the model have no shape yet.

    Example:
        ::

            cstorch.backend("CSX")
            model = cstorch.compile(Model())
            optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-3)

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if isinstance(model, CompiledModel):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile takes a torch.nn.Module, not {type(model).__name__}")
    target = _resolve(backend)
    check_outside_of_loops("compile a model before the loop of an executor, not inside it")
    if target.is_csx:
        if any(isinstance(part, RecursiveScriptModule) for part in model.modules()):
            raise UsageError(
                "a module of torch.jit.script runs in an interpreter of its own, in which a step cannot be traced: "
                "compile the module that was given to torch.jit.script, and script a copy of it for other uses; a "
                "class that derives from torch.jit.ScriptModule must derive from torch.nn.Module"
            )
        if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            raise UsageError(
                "the model has parameters whose shapes a first call sets (nn.LazyLinear): call it once with a batch of "
                "zeros, `model(torch.zeros(2, 6))`, before cstorch.compile and before an optimizer gets its parameters"
            )
        move_module(model)
        if backends.csx.debug.log_initialization and not is_imported_again():
            size = sum(parameter.numel() for parameter in model.parameters())
            logger.info("The model is on the device: %s, %d parameters", type(model).__name__, size)
    if not isinstance(getattr(type(model), "device", None), property):  # some models have their own
        model.device = target.torch_device  # type: ignore[assignment]
    state.register("model", model)
    return CompiledModel(model, target)


def _resolve(wanted: str | Backend | None) -> Backend:
    if wanted is None:
        return current_backend() if has_backend() else make_backend("CPU")
    if isinstance(wanted, str):
        wanted = make_backend(wanted)
    if wanted is not current_backend():
        raise UsageError("compile was given another backend than that of this process (cstorch.backend())")
    return wanted


# --- trace: marks the function that is one whole step -----------------------------------------------------------------


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def trace(step_fn: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a function a step, which runs on the cluster; a decorator.

    On CSX the body is recorded in the first step, and later calls return what the first one returned. Tensors have no
    values in it, Python values are those of the first call, and state must exist before. The returned tensors can be
    given to step closures. In the second step the body runs again, to warn of Python values that would change the
    program: a TraceError with WAFERBOX_STRICT=1. On the CPU the body runs every time.

    Args:
        step_fn: The function of one whole step: forward, backward, update.

    Returns:
        A function with the same parameters.

    Raises:
        TypeError: `step_fn` is not callable, or its body does not run when it is called.
        UsageError: Raised by the call on CSX outside the loop of an executor.
        TraceError: Raised by the call if the body does something that cannot be traced, such as reading a value.

    Example:
        ::

            @cstorch.trace
            def training_step(batch):
                inputs, labels = batch
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            for batch in executor:
                log_loss(training_step(batch))

    Reference: release 2.10, `cerebras.pytorch`.
    """
    if not callable(step_fn):
        raise TypeError(f"trace decorates a function, not {type(step_fn).__name__}")
    if inspect.iscoroutinefunction(step_fn) or inspect.isgeneratorfunction(step_fn):
        raise TypeError("trace decorates a function that runs when it is called: no generator, and no coroutine")

    @functools.wraps(step_fn)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        execution = current_execution()
        if execution is None:
            if has_backend() and is_on_csx():
                name = getattr(step_fn, "__qualname__", "the traced function")
                raise UsageError(f"{name} is a traced step: on CSX call it inside `for batch in executor:`")
            return step_fn(*args, **kwargs)
        run_step = execution.run_step
        if "torch._dynamo" in sys.modules:  # under torch.compile the recording runs as it is
            run_step = torch.compiler.disable(run_step)  # type: ignore[no-untyped-call]
        result: Result = run_step(step_fn, args, kwargs)
        return result

    return call
