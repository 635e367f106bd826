"""Reports of the job to management: its phase and step, in order."""

import contextlib
from collections.abc import Callable, Iterator

from wsc.v1 import management_pb2, node_pb2

MAX_ARTIFACTS = 4  # executions in a report
MAX_RESTARTS = 20  # restarts in a report


class JobReporter:
    """The sender of a job's reports, in the order of the calls and none after the last."""

    def __init__(self, send: Callable[[management_pb2.JobReport], None]) -> None:
        """send must not block."""
        self._send = send
        self._report = management_pb2.JobReport(phase=management_pb2.JOB_PHASE_STARTING)
        self._is_over = False

    def phase(self, phase: "management_pb2.JobPhase.ValueType", step: int = 0, num_steps: int = 0) -> None:
        """Reports a phase; step and num_steps: of the current execution, 0 without one."""
        if num_steps:
            self.reached(step, num_steps)
        self._send_phase(phase)

    def reached(self, step: int, num_steps: int) -> None:
        """Sets the step of the next report."""
        self._report.step, self._report.num_steps = step, num_steps

    def add_artifact(self, artifact: str) -> None:
        """Adds the artifact of an execution to the next report."""
        others = [other for other in self._report.artifacts if other != artifact]
        del self._report.artifacts[:]
        self._report.artifacts.extend([*others[1 - MAX_ARTIFACTS :], artifact])

    def add_restart(self, restart: management_pb2.Restart) -> None:
        """Reports a restart."""
        kept = [*self._report.restarts, restart][-MAX_RESTARTS:]
        del self._report.restarts[:]
        self._report.restarts.extend(kept)
        self._report.num_restarts += 1
        self._send_phase(self._report.phase)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Reports the phase of compilation while the context is open."""
        self.phase(management_pb2.JOB_PHASE_COMPILING)
        try:
            yield
        finally:
            self.phase(management_pb2.JOB_PHASE_IDLE)

    def end(self, phase: "management_pb2.JobPhase.ValueType", message: str) -> None:
        """Sends the last report."""
        self._report.message = message
        self._send_phase(phase)
        self._is_over = True

    def end_with(self, failure: node_pb2.Failure | None, *, succeeded: bool, doing: str) -> None:
        """Sends the last report, by the failure that ended the job. doing: activity of a job that the client left."""
        if failure is not None:
            cancelled = failure.kind == node_pb2.Failure.KIND_CANCELLED
            phase = management_pb2.JOB_PHASE_CANCELLED if cancelled else management_pb2.JOB_PHASE_FAILED
            self.end(phase, failure.message)
        elif succeeded:
            self.end(management_pb2.JOB_PHASE_SUCCEEDED, "")
        else:
            self.end(management_pb2.JOB_PHASE_CANCELLED, f"the client left while it {doing}")

    def _send_phase(self, phase: "management_pb2.JobPhase.ValueType") -> None:
        if self._is_over:
            return
        self._report.phase = phase
        report = management_pb2.JobReport()
        report.CopyFrom(self._report)
        self._send(report)
