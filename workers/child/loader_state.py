"""Where the user's loader stands: its state after the steps for which it is wanted, as plain data."""

import base64
import json
import os
import sys
from typing import Any

from .channel import Channel
from .failures import InputFailure, summary, user_traceback

STATE_BYTES = 4 * 1024 * 1024  # of a loader's state, as text


class Position:
    """Where the loader stands: its state, for the checkpoints of the steps for which it is wanted."""

    def __init__(self, loader: Any, channel: Channel, prepare: dict[str, Any], state_steps: list[int]) -> None:
        self.wanted = state_steps
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
        """The loader's state as it is now, for each wanted step up to `last_step`; InputFailure if it has none."""
        return [(step, self._state(step)) for step in self.wanted if step <= last_step]

    def send(self, states: list[tuple[int, bytes]]) -> None:
        """Hand states over: they are not wanted any more."""
        for step, text in states:
            with os.fdopen(os.memfd_create("state", os.MFD_CLOEXEC), "r+b", buffering=0) as file:
                file.write(text)
                self._channel.send_file(file.fileno(), kind="state", step=step)
            self.wanted.remove(step)

    def _state(self, step: int) -> bytes:
        # For cstorch.distributed.get_worker_state.
        os.environ["WAFERBOX_WORKER_STATE"] = json.dumps(
            {
                "local_worker_id": self._prepare["worker"],
                "num_workers_per_csx": self._prepare["num_workers"],
                "num_csx": self._prepare["num_csx"],
                "wse_id": self._prepare["wafer"],
                "appliance_step": step,
                "worker_step": self._batches,
                "samples_streamed": self._samples,
            }
        )
        try:
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
