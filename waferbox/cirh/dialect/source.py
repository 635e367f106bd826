"""Where an operation comes from: the module of the network, the traced op, and the line of the user's script."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of one operation. Empty strings and line 0 mean: not known."""

    module: str = ""
    backward: bool = False
    op: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.file else "unknown source"
        context = ", ".join(
            part for part in (f"in {self.module}" if self.module else "", "backward" * self.backward) if part
        )
        return f"{where} ({context})" if context else where
