"""The client's progress in an execution."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from wsc.v1 import coordinator_pb2


@dataclass(slots=True, kw_only=True)
class ClientProgress:
    """The client's progress in an execution: the steps that were sent to it, and those that it has acknowledged.

    Steps are those of the execution.
    """

    is_started: bool = False  # the steps run, and nothing that the client has sent can be lost
    shown_step: int = 0  # the last whose outputs were sent to the client
    consumed_step: int = 0
    announced: set[int] = field(default_factory=set)  # steps of checkpoints that were sent to the client
    released: set[int] = field(default_factory=set)  # those of them that the client has released

    @classmethod
    def of(cls, resumption: coordinator_pb2.Resumption) -> "ClientProgress":
        """The progress that the client reports to a coordinator that has taken over the job.

        A client that has left its loop takes nothing more of the steps before, whether it was sent or not.
        """
        return cls(
            is_started=resumption.started,
            shown_step=max(resumption.shown_step, resumption.consumed_step),
            consumed_step=resumption.consumed_step,
            announced={*resumption.announced_checkpoints, *resumption.released_checkpoints},
            released=set(resumption.released_checkpoints),
        )

    def has_all(self, checkpoint_steps: Iterable[int], last_output_step: int) -> bool:
        """Whether these checkpoints were released, and the outputs of all steps up to last_output_step consumed."""
        return self.consumed_step >= last_output_step and self.released.issuperset(checkpoint_steps)
