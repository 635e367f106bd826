"""The sessions of the vendor's clients, by the names that the gateway gives to their workflows and jobs."""

import logging
import secrets
import threading
from dataclasses import dataclass
from typing import Final

from vendor_gateway.session import JobTarget, VendorSession
from waferbox.host.threads import GuardedThread

logger = logging.getLogger(__name__)

MAX_SESSIONS: Final = 64
MAX_JOBS: Final = 1024  # of all sessions together, with ended ones
LOOK_SECONDS: Final = 0.5


class UnknownJobError(ValueError):
    """Raised for the name of a job that no session has."""


class TooManyError(RuntimeError):
    """Raised for a client beyond MAX_SESSIONS, or a job beyond MAX_JOBS."""


@dataclass(slots=True, kw_only=True)
class VendorJob:
    """A job as the client sees it. Several of them are one job of Waferbox.

    Attributes:
        name: the name, which is also the authority of its calls.
        session: the client's session.
        compiles: whether the job only compiles.
        build: the build of the client's release.
        version: the version of the client's release.
        has_ended: whether the client, or the gateway, has ended the job.
        was_cancelled: whether it ended without success.
    """

    name: str
    session: VendorSession
    compiles: bool
    build: str
    version: str
    has_ended: bool = False
    was_cancelled: bool = False


class VendorSessions:
    """The sessions of all clients, and a thread that ends the sessions of clients that send no more. Thread-safe."""

    def __init__(self, target: JobTarget) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._sessions: dict[str, VendorSession] = {}  # by workflow
        self._jobs: dict[str, VendorJob] = {}  # by name, the oldest first
        self._over = threading.Event()
        self._watcher = GuardedThread(self._watch, name="vendor sessions", on_defect=lambda error: self._over.set())

    def start(self) -> None:
        self._watcher.start()

    def new_workflow(self) -> str:
        """Returns the name of a new workflow."""
        return f"workflow-{secrets.token_hex(8)}"

    def session_of(self, peer: str) -> VendorSession | None:
        """Returns the latest session of the client at an address, which gRPC calls the peer; None: it had no job."""
        return next((session for session in reversed(list(self._sessions.values())) if session.peer == peer), None)

    def note_call(self, workflow: str) -> None:
        """Records a call of the client of a workflow."""
        session = self._sessions.get(workflow)
        if session is not None:
            session.presence.note_call()

    def add_job(self, workflow: str, peer: str, *, compiles: bool, version: str, build: str) -> VendorJob:
        """Adds a job of a workflow, whose client calls from address `peer`. Raises TooManyError."""
        with self._lock:
            self._remove_ended()
            session = self._sessions.get(workflow)
            if len(self._jobs) >= MAX_JOBS or (session is None and len(self._sessions) >= MAX_SESSIONS):
                raise TooManyError(f"the gateway serves {len(self._sessions)} clients already: try again later")
            if session is None:
                session = self._sessions[workflow] = VendorSession(self._target, workflow)
            session.peer = peer
            session.presence.note_call()
            name = f"wsjob-{secrets.token_hex(8)}"
            job = VendorJob(name=name, session=session, compiles=compiles, version=version, build=build)
            self._jobs[name] = job
            return job

    def _remove_ended(self) -> None:
        """Removes as many ended jobs as one more job needs. Called with the lock."""
        ended = [each.name for each in self._jobs.values() if each.has_ended]
        for old in ended[: max(0, len(self._jobs) + 1 - MAX_JOBS)]:
            del self._jobs[old]

    def job(self, name: str) -> VendorJob:
        """Returns the job of a name, and records a call of its client. Raises UnknownJobError."""
        job = self._jobs.get(name)
        if job is None:
            raise UnknownJobError(f"there is no job {name[:64]!r}")
        job.session.presence.note_call()
        return job

    def end_job(self, name: str, *, is_success: bool, reason: str) -> None:
        """Ends a job that the client has finished or cancelled."""
        job = self._jobs.get(name)
        if job is None or job.has_ended:
            return
        job.has_ended, job.was_cancelled = True, not is_success
        session = job.session
        session.presence.remove_job(name)
        if job.compiles and (is_success or self._live_jobs(session)):
            return  # The client will run the compiled step, or another job of the session runs.
        if is_success:
            session.end_job(is_success=True)
        else:
            logger.info("The client has cancelled %s: %s", name, reason[:200])
            self._end(session, f"the client has cancelled {name}")

    def close(self) -> None:
        """Ends all sessions."""
        self._over.set()
        for session in list(self._sessions.values()):
            self._end(session, "the gateway has ended")
        self._watcher.join()

    def _live_jobs(self, session: VendorSession) -> list[VendorJob]:
        jobs = list(self._jobs.values())
        return [job for job in jobs if job.session is session and not job.has_ended]

    def _end(self, session: VendorSession, reason: str) -> None:
        with self._lock:
            if self._sessions.get(session.workflow) is session:
                del self._sessions[session.workflow]
        for job in self._live_jobs(session):
            job.has_ended = job.was_cancelled = True
        session.close(reason)

    def _watch(self) -> None:
        """Ends the sessions of clients that have timed out. Runs in a thread."""
        while not self._over.wait(LOOK_SECONDS):
            for session in list(self._sessions.values()):
                if session.presence.has_timed_out(has_job=bool(self._live_jobs(session))):
                    logger.info("The client of workflow %s has timed out", session.workflow)
                    self._end(session, "the vendor's client sends no heartbeats any more")
