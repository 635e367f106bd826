"""A job on an input worker."""

import logging
import os
import socket
from collections.abc import Mapping

from interconnect.links.hub import Hub
from interconnect.links.link import Link
from nodes.lifecycle.execution import report_failure
from nodes.lifecycle.node_job import JobContext, JobFailure, LinkKey
from nodes.lifecycle.role_job import RoleJob
from workers.input_process import InputProcess
from workers.worker_program import WorkerProgram
from wsc.v1 import node_pb2

logger = logging.getLogger(__name__)


class WorkerJob(RoleJob):
    """Keeps the loaders that were prepared, so that an execution can begin one anew."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        self._prepared: dict[str, node_pb2.PrepareInput] = {}
        self._waiting: dict[str, InputProcess] = {}  # started, and not yet part of an execution

    def prepare_input(self, request: node_pb2.PrepareInput) -> None:
        """Start the input_fn's process at once: it makes the loader while the step is compiled."""
        for folder in request.mount_dirs:
            if not os.path.isdir(folder):
                raise JobFailure(
                    node_pb2.Failure.KIND_USER,
                    f"{self.context.node} on {socket.gethostname()} has no folder {folder!r} (mount_dirs of the "
                    "ClusterConfig): make it there, or mount it where this worker runs, or take it out of mount_dirs",
                )
        self._end_waiting(request.loader)
        self._prepared[request.loader] = request
        self._waiting[request.loader] = InputProcess(request, self._output_failed)

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> WorkerProgram:
        prepared = self._prepared.get(request.loader)
        if prepared is None:
            raise JobFailure(node_pb2.Failure.KIND_INTERNAL, f"no input was prepared as {request.loader!r}")
        if request.loader not in self._waiting:
            self._waiting[request.loader] = InputProcess(prepared, self._output_failed)
        ((_, link),) = ((key, link) for key, link in links.items() if key[0] == node_pb2.LINK_PURPOSE_WAFER)

        def emit(step: int, state: bytes) -> None:
            response = node_pb2.InputState(execution=request.execution, step=step, state=state)
            self.context.emit(node_pb2.AttachResponse(input_state=response))

        def emit_digests(digests: list[bytes]) -> None:
            response = node_pb2.InputDigests(execution=request.execution, digests=digests)
            self.context.emit(node_pb2.AttachResponse(input_digests=response))

        process = self._waiting[request.loader]
        program = WorkerProgram(request, prepared, process, hub, link, emit, emit_digests)
        del self._waiting[request.loader]  # the program's from now on
        if request.done_steps:
            how = "resumed there" if request.input_states else "made again, and skips the batches before"
            logger.info("the input begins after step %d: its loader is %s", request.done_steps, how)
        return program

    def keep_recovery_point(self, request: node_pb2.KeepRecoveryPoint) -> None:
        if isinstance(self._program, WorkerProgram) and request.execution == self._number:
            self._program.keep_state(request.step)

    def close(self) -> None:
        super().close()
        for loader in list(self._waiting):
            self._end_waiting(loader)

    def _output_failed(self, error: Exception) -> None:
        report_failure(self.context, error)

    def _end_waiting(self, loader: str) -> None:
        process = self._waiting.pop(loader, None)
        if process is not None:
            process.close()
