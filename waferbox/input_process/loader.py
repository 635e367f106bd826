"""The user's loader: the call of the input_fn that makes it, and its states as plain data."""

import base64
import json
import os
import random
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from .failures import USER_ERRORS, InputFailure, summary, user_traceback
from .messages import INPUT_VARIABLE, STATE_BYTES, Channel, Prepare, State, encode

# --- States of loaders of the vendor's client, which reads them with dill ---------------------------------------------


def dump_state(worker: Mapping[str, int], loader: Any) -> str:
    """Returns the state of a loader in hex. The loader may read `worker` by cstorch.distributed.get_worker_state.

    The client reads only `user_state_dict` of the object, so a class of the vendor is not needed.
    """
    import dill

    _configure_worker_state(worker)
    state = SimpleNamespace(**worker, user_state_dict=loader.state_dict())
    return str(dill.dumps(state).hex())


def load_state(text: str) -> Any:
    """Returns the loader's state_dict from a text of dump_state."""
    import dill

    return dill.loads(bytes.fromhex(text)).user_state_dict  # noqa: S301 - only in the process of an input_fn


def _configure_worker_state(worker: Mapping[str, int]) -> None:
    # A loader that reads the worker state has imported the package.
    states = sys.modules.get("cerebras.pytorch.distributed.worker_state")
    loaders = sys.modules.get("cerebras.pytorch.utils.data.dataloader")
    if states is not None and loaders is not None:
        states.WorkerState.configure(loaders.DataLoaderCheckpoint(**worker, user_state_dict=None))


# --- States after steps -----------------------------------------------------------------------------------------------


_METHODS = ("state_dict", "load_state_dict", "aggregate_state_dict", "deaggregate_state_dict")


class Position:
    """The position of the loader in the execution, and the steps whose states are due. Used by one thread.

    Raises InputFailure if a due state cannot be made.
    """

    def __init__(
        self, loader: Any, channel: Channel, prepare: Prepare, state_steps: Sequence[int], first_step: int = 0
    ) -> None:
        """first_step: the step that the loader begins after; its worker state counts from there, as after a resume."""
        self.state_steps = list(state_steps)
        self.recovery_step = 0  # one more step whose state is due, which may be empty; 0: none
        self._first_step = first_step
        self._loader = loader
        self._channel = channel
        self._prepare = prepare
        self._batches = 0
        self._samples = 0

    def streamed(self, rows: int) -> None:
        """Counts a batch of this worker, which has `rows` rows."""
        self._batches += 1
        self._samples += rows

    def states(self, last_step: int) -> list[tuple[int, bytes]]:
        """Returns the loader's present state for each due step up to `last_step`, which counts from `first_step`."""
        last_step += self._first_step
        states = [(step, self._checkpoint_state(step)) for step in self.state_steps if step <= last_step]
        if 0 < self.recovery_step <= last_step:
            states.append((self.recovery_step, self._recovery_state()))
        return states

    def send(self, states: list[tuple[int, bytes]]) -> None:
        """Sends states, which are no longer due."""
        for step, text in states:
            with os.fdopen(os.memfd_create("state", os.MFD_CLOEXEC), "r+b", buffering=0) as file:
                file.write(text)
                self._channel.send(State(step=step), file.fileno())
            if step in self.state_steps:
                self.state_steps.remove(step)
            else:
                self.recovery_step = 0

    def send_no_recovery_state(self) -> None:
        """Sends an empty state if the one for a recovery point is due; called when the loader has failed."""
        if self.recovery_step:
            self.send([(self.recovery_step, b"")])

    def _is_restartable(self) -> bool:
        return all(hasattr(self._loader, method) for method in _METHODS)

    def _checkpoint_state(self, step: int) -> bytes:
        # The vendor's client requests the states of restartable loaders only, and does not announce it.
        if self._prepare.vendor_builder and not self._is_restartable():
            return b""
        return self._state(step)

    def _recovery_state(self) -> bytes:
        if not self._is_restartable():
            return b""
        try:
            return self._state(self.recovery_step)
        except InputFailure:
            return b""  # The steps need no state for a recovery point.

    def _state(self, step: int) -> bytes:
        settings = self._prepare.settings
        worker = {
            "local_worker_id": settings.worker,
            "num_workers_per_csx": settings.num_workers,
            "num_csx": settings.num_csx,
            "wse_id": settings.wafer,
            "appliance_step": step - self._first_step,
            "worker_step": self._batches,
            "samples_streamed": self._samples,
        }
        os.environ["WAFERBOX_WORKER_STATE"] = json.dumps(worker)  # for cstorch.distributed.get_worker_state
        try:
            if self._prepare.vendor_builder:
                text = json.dumps(dump_state(worker, self._loader)).encode()
            else:
                text = json.dumps(plain(self._loader.state_dict())).encode()
        except InputFailure:
            raise
        except USER_ERRORS as error:
            raise InputFailure(f"the loader's state_dict raised {summary(error)}", user_traceback(error)) from error
        finally:
            os.environ.pop("WAFERBOX_WORKER_STATE", None)
        if len(text) > STATE_BYTES:
            raise InputFailure(
                f"the state of the loader takes {len(text)} bytes, more than {STATE_BYTES}: keep what is large out of "
                "its state_dict; a seed and a count are enough to make an order of samples again"
            )
        return text


def resume(loader: Any, states: bytes, *, is_vendors: bool) -> None:
    """Resumes the loader from the states of all workers' loaders, a JSON list. Raises InputFailure."""
    restored = load_state if is_vendors else _restored
    try:
        state = loader.aggregate_state_dict([restored(form) for form in json.loads(states)])
        loader.load_state_dict(loader.deaggregate_state_dict(state))
    except USER_ERRORS as error:
        raise InputFailure(f"the loader could not be resumed: {summary(error)}", user_traceback(error)) from error


def _restored(form: Any) -> Any:
    """Returns the value of a form that `plain` made."""
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    if not isinstance(form, list):
        return form
    word, *rest = form
    if word == "dict":
        return {_restored(key): _restored(item) for key, item in rest}
    if word in ("list", "tuple"):
        items = map(_restored, rest)
        return list(items) if word == "list" else tuple(items)
    content = bytearray(base64.b64decode(rest[-1]))
    if word == "bytes":
        return bytes(content)
    dtype, shape, _ = rest
    if word == "array":
        return numpy.frombuffer(content, dtype=dtype).reshape(shape)
    dtype = getattr(torch, dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)


def plain(value: Any) -> Any:
    """Returns a state in the form that the package describes. Raises InputFailure for values without such a form."""
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    if isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return ["list" if isinstance(value, list) else "tuple", *map(plain, value)]
    if isinstance(value, dict):
        return ["dict", *([plain(key), plain(item)] for key, item in value.items())]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", dtype, list(value.shape), base64.b64encode(content).decode()]
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return ["array", value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]
    raise InputFailure(
        f"the state of the loader holds a {type(value).__name__}, which cannot be saved: use numbers, strings, bytes, "
        "tensors, arrays, and lists, tuples and dicts of these"
    )


# --- The call of the input_fn -----------------------------------------------------------------------------------------


def build(prepare: Prepare, builder: bytes) -> tuple[Any, str]:
    """Calls the user's input_fn with the random generators and the default type that torch has on the client.

    Returns the loader, at the position that the client has loaded, and the name and place of the input_fn. Raises
    InputFailure.
    """
    sys.path[:] = _search_path(prepare, sys.path)
    if os.path.isdir(prepare.working_directory):  # Another host may not have the folder.
        os.chdir(prepare.working_directory)
    os.environ[INPUT_VARIABLE] = encode(prepare.settings).decode()
    read = _read_vendor_builder if prepare.vendor_builder else _read_builder
    try:
        import torch

        recipe = read(builder)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "cloudpickle", "dill"):
            raise InputFailure(f"the input_fn cannot be read here: {summary(error)}", user_traceback(error)) from error
        raise InputFailure(f"the interpreter {sys.executable} has no {error.name}; install it there") from error
    except USER_ERRORS as error:
        raise InputFailure(f"the input_fn raised {summary(error)}", user_traceback(error)) from error
    try:
        if recipe["random_state"] is not None:
            _set_random_state(recipe["random_state"])
        if recipe["default_dtype"]:
            torch.set_default_dtype(getattr(torch, recipe["default_dtype"]))
        loader = recipe["input_fn"](*recipe["args"], **recipe["kwargs"])
        if (position := recipe["position"]) is not None:
            strict = {} if position["strict"] else {"strict": False}
            loader.load_state_dict(loader.deaggregate_state_dict(position["state"], **strict), **strict)
    except USER_ERRORS as error:
        raise InputFailure(f"the input_fn raised {summary(error)}", user_traceback(error)) from error
    if not hasattr(loader, "__iter__"):
        raise InputFailure(f"the input_fn returned {type(loader).__name__}, which is not an iterable of batches")
    return loader, _source(recipe["input_fn"])


def _search_path(prepare: Prepare, own: Sequence[str]) -> list[str]:
    """Returns sys.path for the input_fn. own: that of this process."""
    first, last, same = prepare.python_paths, prepare.last_python_paths, prepare.interpreter_python_paths
    if sysconfig.get_path("stdlib") in same:
        # In its order: a *.pth file may have put folders between those of the interpreter, with other versions.
        return [*first, *same, *(path for path in own if path not in (*first, *same))]
    return [*first, *(path for path in own if path not in (*first, *last)), *last]


def _read_builder(builder: bytes) -> dict[str, Any]:
    """Returns the recipe from the client library. Only this process unpickles data of a script: it is the user's."""
    import cloudpickle

    recipe: dict[str, Any] = cloudpickle.loads(builder)
    return recipe


def _read_vendor_builder(builder: bytes) -> dict[str, Any]:
    """Returns the recipe from the vendor's client, which sends no state of its random generators."""
    import dill

    texts = json.loads(builder)
    arguments = dill.loads(bytes.fromhex(texts["arguments"]))  # noqa: S301 - only here, as above
    args, kwargs = arguments if isinstance(arguments, tuple) else ((), arguments)
    input_fn = dill.loads(bytes.fromhex(texts["input_fn"]))  # noqa: S301 - only here, as above
    position = None
    if texts["position"]:
        state, options = dill.loads(bytes.fromhex(texts["position"]))  # noqa: S301 - only here, as above
        position = {"state": state, "strict": options.get("strict", True)}
    return {
        "random_state": None,
        "default_dtype": "",
        "input_fn": input_fn,
        "args": args,
        "kwargs": kwargs,
        "position": position,
    }


def _source(function: Any) -> str:
    """Returns a function's name, file and line, as far as it has them."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _set_random_state(state: dict[str, Any]) -> None:
    torch = sys.modules["torch"]
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    random.setstate(state["python"])
    sys.modules["numpy"].random.set_state(state["numpy"])  # imported with the state, an array
