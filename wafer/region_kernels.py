"""The kernels of a plan in layer pipelined mode, made ready for each Run.

What updates states is a kernel as a shard of MemoryX has it, which writes where the states lie; all else is a kernel as
a wafer has it in weight streaming.
"""

from collections.abc import Mapping, Sequence

import torch

from cirh.execution.kernel import span
from memoryx.kernels import StateKernels
from memoryx.store import StateStore
from nodes.folders import cache_root
from nodes.steps.groups import SendBuffers
from nodes.steps.program import Action, Values
from nodes.telemetry.progress import short_list
from wafer.joins import JoinedPlace, joining
from wafer.kernels import WaferKernel, WaferKernels
from wsc.v1 import plan_pb2


class RegionKernels:
    """Of one execution. `action` is to be called for all Runs, those that make one value in order."""

    def __init__(
        self,
        plan: plan_pb2.PipelinePlan,
        kernels: WaferKernels,
        updates: StateKernels,
        states: Mapping[int, torch.Tensor],
        store: StateStore,
        joined: Mapping[int, JoinedPlace],
        buffers: SendBuffers,
    ) -> None:
        """kernels, updates: make those of the plan. store: what keeps the states.

        joined: where what micro-batches join lies, and how they join it.
        """
        runs = [i.run for region in plan.regions for i in region.instructions if i.HasField("run")]
        updating = {run.kernel for run in runs if any(run.commits)}
        others = {run.kernel for run in runs if run.outputs and not any(run.commits)}
        texts = {kernel.id: kernel.cirh for kernel in plan.kernels if kernel.id in updating}
        self._updates = updates.make(texts, store.memory, cache_root() / "kernels")
        self._wafer_kernels = kernels
        self._kernels = kernels.make((k for k in plan.kernels if k.id in others), plan.kernel_library)
        self._names = {slot.value: slot.name.removeprefix("state.") for slot in plan.states}
        self._slots = {slot.value: slot.name for slot in plan.states}
        self._states = dict(states)
        self._store = store
        self._begin, self._end = span(store.memory.tensor(torch.uint8, (store.memory.nbytes,), 0))
        self._joined = dict(joined)
        self._buffers = buffers
        self._made: set[int] = set()  # values that a Run makes that was bound

    def close(self) -> None:
        """Drop all tensors."""
        self._wafer_kernels.release()
        self._updates.clear()
        self._states.clear()
        self._joined.clear()

    def name(self, run: plan_pb2.Run) -> str:
        """Of a Run without a layer."""
        states = [self._names[state] for state in run.commits if state]
        return short_list(states) if states else f"kernel {run.kernel}"

    def action(self, run: plan_pb2.Run, values: Values) -> Action:
        """A call of the Run's kernel: what it makes is among the values afterwards, and what it drops is not."""
        tensors = values.tensors
        inputs, outputs, drops = values.indices(run.inputs), values.indices(run.outputs), values.indices(run.drops)
        places = [None if value in self._made else self._place(value) for value in run.outputs]
        if not run.outputs:  # it waits for its inputs

            def call(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                return ()

        elif any(run.commits):
            states = [self._states[state] if state else None for state in run.commits]
            passing = [i for i, value in enumerate(run.inputs) if self._passes(value)]
            update = self._updates[run.kernel].bind(states, places, passing)
            store, committed = self._store, [self._slots[state] for state in run.commits if state]

            def call(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                if store.copies_on_write:
                    store.before_write(committed)
                return update(given)

        else:
            kernel = self._kernels[run.kernel]
            if not self._made.isdisjoint(run.outputs):
                kernel = joining(kernel, self._joined_results(run))
            if not self._states.keys().isdisjoint(run.inputs):
                kernel = self._beside_states(kernel)

            def call(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                return kernel(given, places)

        self._made.update(run.outputs)

        def run_kernel(step: int) -> None:
            results = call([tensors[index] for index in inputs])
            for index, result in zip(outputs, results, strict=True):
                tensors[index] = result
            for index in drops:
                tensors[index] = None

        return run_kernel

    def _place(self, value: int) -> torch.Tensor | None:
        return self._joined[value][0] if value in self._joined else self._buffers.place(value)

    def _passes(self, value: int) -> bool:
        """Whether a value is another tensor in each step."""
        return value not in self._states and self._place(value) is None

    def _joined_results(self, run: plan_pb2.Run) -> dict[int, JoinedPlace]:
        """The results that are joined to what micro-batches before have made. Raises ValueError: nobody says how."""
        again = {index: value for index, value in enumerate(run.outputs) if value in self._made}
        if unknown := set(again.values()) - self._joined.keys():
            raise ValueError(f"several Runs make the values {sorted(unknown)}, which are not joined")
        return {index: self._joined[value] for index, value in again.items()}

    def _beside_states(self, kernel: WaferKernel) -> WaferKernel:
        """The kernel; nothing that it makes shows a state, which would change with it."""
        begin, end = self._begin, self._end

        def call(inputs: Sequence[torch.Tensor], places: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
            results = kernel(inputs, places)
            for index, result in enumerate(results):
                if begin <= result.data_ptr() < end:
                    results[index] = result.clone()
            return results

        return call
