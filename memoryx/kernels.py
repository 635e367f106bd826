"""A kernel on MemoryX, bound to the buffers that its results go to."""

from collections.abc import Callable, Sequence

import torch

from cirh.elementwise import ElementwiseKernel
from cirh.kernel import Kernel
from interconnect.segment import Segment

Call = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Buffers = Sequence[torch.Tensor | None]  # one for each result


class StateKernel:
    """One kernel of a plan. Built once; bound for each Run."""

    def __init__(self, text: str, states: Segment) -> None:
        """states: the segment that the states lie in."""
        self._elementwise = ElementwiseKernel.build(text)
        self._general = Kernel.build(text)
        self._begin = states.tensor(torch.uint8, (1,), 0).data_ptr()
        self._end = self._begin + states.nbytes

    def bind(self, states: Buffers, places: Buffers) -> Call:
        """A call that leaves result i in the state buffer states[i], or else, where there is one, in places[i]."""
        if self._elementwise is not None:
            return self._bind_elementwise(self._elementwise, states, places)
        return self._bind_general(states, places)

    def _bind_elementwise(self, kernel: ElementwiseKernel, states: Buffers, places: Buffers) -> Call:
        """Straight into the buffers: such a kernel reads an element for the last time before it writes it."""
        buffers: list[torch.Tensor] = []
        for state, place, result in zip(states, places, kernel.outputs, strict=True):
            buffer = state if state is not None else place
            buffers.append(buffer if buffer is not None else torch.empty(result.shape, dtype=result.dtype))

        def call(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            kernel(inputs, buffers)
            return buffers

        return call

    def _bind_general(self, states: Buffers, places: Buffers) -> Call:
        """Into buffers of the kernel's own, and only then over the states, any of which it may have read last."""
        kernel = self._general
        commits = [(i, state) for i, state in enumerate(states) if state is not None]
        begin, end = self._begin, self._end

        def call(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            results = kernel(inputs, places)
            for i, result in enumerate(results):
                # A view of a state would change with it, now or at a later commit.
                if begin <= result.data_ptr() < end and places[i] is None:
                    results[i] = result.clone()
            for i, state in commits:
                state.copy_(results[i])
                results[i] = state
            return results

        return call
