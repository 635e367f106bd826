"""Kernels that update states, bound to the buffers of their results."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from xdsl.dialects.builtin import ModuleOp

from waferbox.cirh.dialect.types import TensorInfo
from waferbox.cirh.execution.elementwise import ElementwiseKernel
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.host.folders import why_not_kept
from waferbox.lair.kernel import GeneratedKernel, generate
from waferbox.lair.library import NotBuilt, NotWritable
from waferbox.links.shared_memory import SharedMemory
from waferbox.runtime.logs import advise

Call = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Buffers = Sequence[torch.Tensor | None]  # one for each result


class StateKernel:
    """One kernel of a plan. Built once; bound for each Run. Used by the thread of the steps."""

    def __init__(self, module: ModuleOp, generated: GeneratedKernel | None, states: SharedMemory) -> None:
        """states: the shared memory of the states."""
        self._generated = generated
        self._elementwise = None if generated is not None else ElementwiseKernel.build(module)
        self._general = Kernel(module) if generated is None and self._elementwise is None else None
        self._begin = states.tensor(torch.uint8, (1,), 0).data_ptr()
        self._end = self._begin + states.nbytes

    @property
    def may_show_inputs(self) -> bool:
        """Whether results without a destination may be views of inputs."""
        return self._general is not None

    def may_be_parted(self, states: Buffers, destinations: Buffers) -> bool:
        """Whether it can run in parts, each over some of the elements: every result that is no scalar has a buffer."""
        return self._generated is not None and all(
            state is not None or destination is not None or not result.shape
            for state, destination, result in zip(states, destinations, self._generated.outputs, strict=True)
        )

    def bind(
        self, states: Buffers, destinations: Buffers, passing: Sequence[int] = (), part: tuple[int, int] = (0, 1)
    ) -> Call:
        """Returns a call that writes result i to the state buffer states[i], or else to destinations[i], if given.

        Args:
            passing: inputs that differ from call to call, so that the call keeps no reference to them.
            part: number and count of the parts that the kernel runs in, if it may be parted.
        """
        if self._general is not None:
            return self._bind_general(self._general, states, destinations)
        # No copy is needed: such a kernel reads an element for the last time before it writes it.
        bound: Callable[[Sequence[torch.Tensor]], None]
        if self._generated is not None:
            buffers = _buffers(states, destinations, self._generated.outputs)
            bound = self._generated.bind(buffers, passing, part)
        else:
            assert self._elementwise is not None
            buffers = _buffers(states, destinations, self._elementwise.outputs)
            bound = partial(self._elementwise, out=buffers)

        def call(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            bound(inputs)
            return buffers

        return call

    def _bind_general(self, kernel: Kernel, states: Buffers, destinations: Buffers) -> Call:
        """Binds a kernel that may read a state at its end: results are copied to the states after it has run."""
        commits = [(i, state) for i, state in enumerate(states) if state is not None]
        begin, end = self._begin, self._end

        def call(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            results = kernel(inputs, destinations)
            for i, result in enumerate(results):
                # A view of a state would change with the state, now or at a later commit.
                if begin <= result.data_ptr() < end and destinations[i] is None:
                    results[i] = result.clone()
            for i, state in commits:
                state.copy_(results[i])
                results[i] = state
            return results

        return call


class StateKernels:
    """The kernels of the plan that was loaded last, which is often loaded again. Used by one thread at a time."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._modules: dict[int, ModuleOp] = {}
        self._generated: dict[int, GeneratedKernel] = {}

    def make(self, texts: Mapping[int, str], states: SharedMemory, folder: Path) -> dict[int, StateKernel]:
        """Returns the kernels of a plan by number, made from their texts.

        Kernels that LAIR can express are generated and compiled, or found in the folder; the others call torch.

        Raises:
            CirhError: a text is not valid.
        """
        if texts != self._texts:
            modules = {}
            for number, text in texts.items():
                modules[number] = parse_module(text)
                verify(modules[number])
            self._texts, self._modules, self._generated = dict(texts), modules, _generate(modules, folder)
        return {
            number: StateKernel(module, self._generated.get(number), states) for number, module in self._modules.items()
        }


def _generate(modules: Mapping[int, ModuleOp], folder: Path) -> dict[int, GeneratedKernel]:
    """Returns the kernels that can be generated. They are stored in the folder if it can be written."""
    reason: NotBuilt | str
    try:
        return generate(modules, folder)
    except NotWritable as error:
        reason = why_not_kept(folder, error.nbytes, str(error))
        # A library stays mapped after its file is removed.
        with suppress(OSError, NotBuilt), TemporaryDirectory(prefix="waferbox-") as elsewhere:
            generated = generate(modules, Path(elsewhere))
            advise("kernels", f"Updates are compiled anew for each execution, as they cannot be kept in {reason}")
            return generated
    except NotBuilt as error:
        reason = error
    advise("kernels", f"Updates run operation by operation, at about a fifth of the speed: {reason}")
    return {}


def _buffers(states: Buffers, destinations: Buffers, results: Sequence[TensorInfo]) -> list[torch.Tensor]:
    buffers = []
    for state, destination, result in zip(states, destinations, results, strict=True):
        buffer = state if state is not None else destination
        buffers.append(buffer if buffer is not None else torch.empty(result.shape, dtype=result.dtype))
    return buffers
