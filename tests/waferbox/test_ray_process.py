"""What is known of a role process on Ray while Ray starts its actor again, without a Ray."""

import queue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'waferbox[ray]'")

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from waferbox.ray_engine.launcher import RayProcess

SECONDS = 10.0


def test_between_two_lives_it_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can take it for one that hangs, and end the one that has just come."""
    answers: queue.Queue[Any] = queue.Queue()
    asked: queue.Queue[object] = queue.Queue()
    method = SimpleNamespace(remote=lambda: None)
    told: list[str] = []

    def get(reference: object) -> Any:
        asked.put(reference)
        if isinstance(answer := answers.get(timeout=SECONDS), Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda *_, **__: None)
    actor = SimpleNamespace(process=method, wait=method, end=method)
    followed = RayProcess("wafer", actor, told.extend, lambda: None)

    def place() -> tuple[str, int]:
        """Once it waits for Ray's next answer."""
        asked.get(timeout=SECONDS)
        return followed.host, followed.pid

    assert place() == ("", 0)
    answers.put(("10.0.0.1", 7))
    assert place() == ("10.0.0.1", 7)
    answers.put(ActorUnavailableError("it restarts", None))
    assert place() == ("", 0)
    answers.put(("10.0.0.2", 8))
    assert place() == ("10.0.0.2", 8)
    assert told == ["wafer (pid 7 at 10.0.0.1) ended; Ray has started it again as pid 8 at 10.0.0.2"]
    answers.put(ActorDiedError())
    followed.kill()
    assert followed.poll() == 1
