"""The outputs of steps that are single numbers, some a second: what a loss curve is drawn from."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

from interconnect.links.elements import torch_dtype
from wsc.v1 import plan_pb2

INTERVAL_SECONDS = 0.25
MAX_NAMES = 32

OnScalars = Callable[[int, Mapping[str, float]], None]  # step, values by name


class ScalarSampler:
    """Looks at the outputs of each step; of few it reads the numbers."""

    def __init__(self, outputs: Sequence[plan_pb2.Output], num_steps: int, on_scalars: OnScalars) -> None:
        """The first and the last step are among those that are read."""
        single = [(index, output) for index, output in enumerate(outputs) if math.prod(output.type.shape) == 1]
        self._scalars = [(i, o.name, torch_dtype(o.type.element_type)) for i, o in single[:MAX_NAMES]]
        self._num_steps = num_steps
        self._on_scalars = on_scalars
        self._due = 0.0

    def see(self, step: int, tensors: Sequence[bytes]) -> None:
        """tensors: the bytes of all outputs, in the plan's order."""
        now = time.monotonic()
        if not self._scalars or (now < self._due and step != self._num_steps):
            return
        self._due = now + INTERVAL_SECONDS
        import torch  # is there already, with the compiler

        self._on_scalars(
            step,
            {
                name: float(torch.frombuffer(bytearray(tensors[index]), dtype=dtype)[0].item())
                for index, name, dtype in self._scalars
            },
        )
