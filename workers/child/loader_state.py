"""Where the user's loader stands: its state after the steps for which it is wanted, as plain data."""

import base64
import json
import os
import sys
from typing import Any

from .channel import Channel
from .failures import InputFailure, summary, user_traceback
from .vendor_state import dump_state, load_state

STATE_BYTES = 4 * 1024 * 1024  # of a loader's state, as text


_METHODS = ("state_dict", "load_state_dict", "aggregate_state_dict", "deaggregate_state_dict")


class Position:
    """Where the loader stands: its state, for the steps for which it is wanted.

    first_step: the step of the execution, from 0, that it began with. It is told how far it is since then, as if an
    execution had begun there: what it was resumed with has the rest.
    """

    def __init__(
        self, loader: Any, channel: Channel, prepare: dict[str, Any], state_steps: list[int], first_step: int = 0
    ) -> None:
        self.wanted = state_steps
        self.recovery_step = 0  # its state is wanted as well, if there is one
        self._first_step = first_step
        self._loader = loader
        self._channel = channel
        self._prepare = prepare
        self._batches = 0
        self._samples = 0

    def streamed(self, rows: int) -> None:
        """A batch with so many rows is this worker's."""
        self._batches += 1
        self._samples += rows

    def states(self, last_step: int) -> list[tuple[int, bytes]]:
        """The loader's state as it is now, for each wanted step up to `last_step`, from where it began.

        InputFailure if it has none; where that of recovery_step alone is wanted, it is empty then.
        """
        last_step += self._first_step
        states = [(step, self._checkpoint_state(step)) for step in self.wanted if step <= last_step]
        if 0 < self.recovery_step <= last_step:
            states.append((self.recovery_step, self._recovery_state()))
        return states

    def send(self, states: list[tuple[int, bytes]]) -> None:
        """Hand states over: they are not wanted any more."""
        for step, text in states:
            with os.fdopen(os.memfd_create("state", os.MFD_CLOEXEC), "r+b", buffering=0) as file:
                file.write(text)
                self._channel.send_file(file.fileno(), kind="state", step=step)
            if step in self.wanted:
                self.wanted.remove(step)
            else:
                self.recovery_step = 0

    def send_no_recovery_state(self) -> None:
        """The loader has failed: if its state is wanted for a recovery point, say that there is none."""
        if self.recovery_step:
            self.send([(self.recovery_step, b"")])

    def _is_restartable(self) -> bool:
        return all(hasattr(self._loader, method) for method in _METHODS)

    def _checkpoint_state(self, step: int) -> bytes:
        # The vendor's client does not say whether it will ask: it asks restartable loaders alone.
        if self._prepare["vendor_builder"] and not self._is_restartable():
            return b""
        return self._state(step)

    def _recovery_state(self) -> bytes:
        if not self._is_restartable():
            return b""
        try:
            return self._state(self.recovery_step)
        except InputFailure:
            return b""  # the steps can be done without it

    def _state(self, step: int) -> bytes:
        worker = {
            "local_worker_id": self._prepare["worker"],
            "num_workers_per_csx": self._prepare["num_workers"],
            "num_csx": self._prepare["num_csx"],
            "wse_id": self._prepare["wafer"],
            "appliance_step": step - self._first_step,
            "worker_step": self._batches,
            "samples_streamed": self._samples,
        }
        os.environ["WAFERBOX_WORKER_STATE"] = json.dumps(worker)  # for cstorch.distributed.get_worker_state
        try:
            if self._prepare["vendor_builder"]:
                text = json.dumps(dump_state(worker, self._loader)).encode()
            else:
                text = json.dumps(plain(self._loader.state_dict())).encode()
        except InputFailure:
            raise
        except Exception as error:  # the user's code; it is reported
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
    """Let the loader go on from the states of all workers' loaders, a JSON list of what they have sent."""
    restored = load_state if is_vendors else _restored
    try:
        state = loader.aggregate_state_dict([restored(form) for form in json.loads(states)])
        loader.load_state_dict(loader.deaggregate_state_dict(state))
    except Exception as error:  # the user's code; it is reported
        raise InputFailure(f"the loader could not be resumed: {summary(error)}", user_traceback(error)) from error


def _restored(form: Any) -> Any:
    """The value that `plain` has made this of."""
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
    """A state in the form that is described in __init__. InputFailure for what has none."""
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
