"""Who of the vendor's clients is here, by the names that we have given to their workflows and jobs."""

import logging
import secrets
import threading
from dataclasses import dataclass
from typing import Final

from vendor_gateway.session import JobTarget, VendorSession
from waferbox.host.threads import GuardedThread

logger = logging.getLogger(__name__)

MAX_SESSIONS: Final = 64
MAX_JOBS: Final = 1024  # of all sessions, ended ones included
LOOK_SECONDS: Final = 0.5


class UnknownJobError(ValueError):
    """No client of ours has a job of that name."""


class TooManyError(RuntimeError):
    """There are as many clients as are served at once."""


@dataclass(slots=True, kw_only=True)
class VendorJob:
    """A job as the client sees it: several of them are one job of Waferbox."""

    name: str
    session: VendorSession
    compiles: bool  # only
    build: str  # of the release that the client is of
    version: str
    has_ended: bool = False
    was_cancelled: bool = False


class VendorSessions:
    """Thread-safe. Ends who is gone."""

    def __init__(self, place: JobTarget) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._sessions: dict[str, VendorSession] = {}  # by workflow
        self._jobs: dict[str, VendorJob] = {}  # by name, the oldest first
        self._over = threading.Event()
        self._watcher = GuardedThread(self._watch, name="vendor sessions", on_defect=lambda error: self._over.set())

    def start(self) -> None:
        self._watcher.start()

    def new_workflow(self) -> str:
        """A name for one."""
        return f"workflow-{secrets.token_hex(8)}"

    def session_of(self, peer: str) -> VendorSession | None:
        """What the client at this address, in gRPC's words, has last asked for, if it has had a job."""
        return next((session for session in reversed(list(self._sessions.values())) if session.peer == peer), None)

    def note_call(self, workflow: str) -> None:
        """The client of this workflow has called."""
        session = self._sessions.get(workflow)
        if session is not None:
            session.presence.note_call()

    def add_job(self, workflow: str, peer: str, *, compiles: bool, version: str, build: str) -> VendorJob:
        """A new job of a workflow, whose client calls from this address. Raises TooManyError."""
        with self._lock:
            self._forget_ended()
            session = self._sessions.get(workflow)
            if len(self._jobs) >= MAX_JOBS or (session is None and len(self._sessions) >= MAX_SESSIONS):
                raise TooManyError(f"{len(self._sessions)} clients of the vendor's are served already: try again later")
            if session is None:
                session = self._sessions[workflow] = VendorSession(self._place, workflow)
            session.peer = peer
            session.presence.note_call()
            name = f"wsjob-{secrets.token_hex(8)}"
            job = VendorJob(name=name, session=session, compiles=compiles, version=version, build=build)
            self._jobs[name] = job
            return job

    def _forget_ended(self) -> None:
        """Make room for one more job, if there are ended ones. With the lock."""
        ended = [each.name for each in self._jobs.values() if each.has_ended]
        for old in ended[: max(0, len(self._jobs) + 1 - MAX_JOBS)]:
            del self._jobs[old]

    def job(self, name: str) -> VendorJob:
        """The job of this name. Raises UnknownJobError."""
        job = self._jobs.get(name)
        if job is None:
            raise UnknownJobError(f"there is no job {name[:64]!r}")
        job.session.presence.note_call()
        return job

    def end_job(self, name: str, *, is_success: bool, reason: str) -> None:
        """The client is done with a job, or gives it up."""
        job = self._jobs.get(name)
        if job is None or job.has_ended:
            return
        job.has_ended, job.was_cancelled = True, not is_success
        session = job.session
        session.presence.forget(name)
        if job.compiles and (is_success or self._live_jobs(session)):
            return  # what it has compiled is to be run, or something runs
        if is_success:
            session.end_job(is_success=True)
        else:
            logger.info("%s is given up: %s", name, reason[:200])
            self._end(session, f"the client has cancelled {name}")

    def close(self) -> None:
        """End them all."""
        self._over.set()
        for session in list(self._sessions.values()):
            self._end(session, "the gateway went down")
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
        """Runs in a thread."""
        while not self._over.wait(LOOK_SECONDS):
            for session in list(self._sessions.values()):
                if session.presence.is_gone(has_job=bool(self._live_jobs(session))):
                    logger.info("the client of workflow %s has gone", session.workflow)
                    self._end(session, "the vendor's client has gone: it beats no more")
