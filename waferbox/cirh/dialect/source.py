"""The source of an operation: the module of the network, the traced op, and the line of the user's script."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of one operation. An empty string, or line 0, stands for an unknown part.

    metric: Whether a metric computes it, which it does in the types of its tensors, also in mixed precision.
    """

    module: str = ""
    backward: bool = False
    metric: bool = False
    op: str = ""
    file: str = ""
    line: int = 0

    @property
    def place(self) -> str:
        """The line, such as "train.py:53"; empty: it is not known."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        where = self.place or "unknown source"
        context = ", ".join(
            part for part in (f"in {self.module}" if self.module else "", "backward" * self.backward) if part
        )
        return f"{where} ({context})" if context else where
