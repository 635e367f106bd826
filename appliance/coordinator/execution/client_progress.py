"""How far the client is in an execution: what it was told of it, and what it needs no more."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from wsc.v1 import coordinator_pb2


@dataclass(slots=True, kw_only=True)
class ClientProgress:
    """Guarded by the lock of its execution. Steps are those of the execution."""

    is_started: bool = False  # nothing that the client has sent can be lost: from now on nothing is asked of it
    shown_step: int = 0  # the last whose outputs were given to the client
    consumed_step: int = 0
    told: set[int] = field(default_factory=set)  # checkpoints that the client knows of
    taken: set[int] = field(default_factory=set)  # those of them that it needs no more

    @classmethod
    def of(cls, resumption: coordinator_pb2.Resumption) -> "ClientProgress":
        """As the client says after another coordinator has died."""
        return cls(
            is_started=resumption.started,
            shown_step=resumption.shown_step,
            consumed_step=resumption.consumed_step,
            told=set(resumption.announced_checkpoints),
            taken=set(resumption.taken_checkpoints),
        )

    def has_all(self, checkpoint_steps: Iterable[int], last_output_step: int) -> bool:
        """Whether these checkpoints were taken, and the outputs of all steps up to this one were consumed."""
        return self.consumed_step >= last_output_step and self.taken.issuperset(checkpoint_steps)
