"""A job on a wafer."""

from collections.abc import Mapping

import torch

from wafer.kernels import WaferKernels
from wafer.pipeline_program import PipelineProgram
from wafer.wafer_program import WaferProgram
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.runtime.node_job import JobContext, LinkKey
from waferbox.runtime.role_job import StepProgram
from waferbox.runtime.schedule import THREADED_FLOPS
from waferbox.states.layout import StateRequirements
from waferbox.states.state_job import StateJob
from waferbox.states.state_memory import StateSettings
from waferbox.states.state_service import StateService
from wsc.v1 import node_pb2


class WaferJob(StateJob):
    """A job on a wafer. It keeps kernels between executions and, in layer pipelined mode, states as a shard does."""

    def __init__(self, context: JobContext, threads: int, service: StateService) -> None:
        """threads: the most that compute."""
        super().__init__(context, service, StateSettings())
        self._threads = threads
        self._kernels = WaferKernels()

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> StepProgram:
        if request.HasField("pipeline"):
            return self._compile_pipeline(request, hub, links)
        # The number holds for threads that begin to compute from now on, such as the one that will run the steps.
        torch.set_num_threads(self._threads if request.wafer.flops >= THREADED_FLOPS else 1)
        return WaferProgram(request.wafer, request.wafer_number, self._kernels, hub, links, list(request.trees))

    def _compile_pipeline(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> PipelineProgram:
        plan, states = request.pipeline, self._states
        states.load(StateRequirements(slots=plan.states), request.recovery_point)
        threads = self._threads if plan.flops >= THREADED_FLOPS else 1
        num_threads = min(threads, len(plan.regions))
        torch.set_num_threads(max(1, threads // num_threads))
        return PipelineProgram(
            plan,
            self._kernels,
            states.kernels,
            states.store,
            states.snapshots,
            states.recovery_points,
            hub,
            links,
            num_threads=num_threads,
        )
