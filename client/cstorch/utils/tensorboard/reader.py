"""The SummaryReader, which reads what SummaryWriters have written, by name and step."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import (
    STORE_EVERYTHING_SIZE_GUIDANCE,
    EventAccumulator,
    ScalarEvent,
    TensorEvent,
)

from cstorch.errors import ConfigurationError
from cstorch.utils.tensorboard import tensor_files
from cstorch.utils.tensorboard.tensor_files import TensorDescriptor

_TEXT = "/text_summary"  # how add_text ends a name


class SummaryReader:
    """Reads the event files of a folder and of all folders below it.

    Args:
        log_dirs: The folder.
        filter: A pattern (`*` and the like) of the folders to read, by their path below `log_dirs`; None: all.
        **kwargs: The arguments of tensorboard's EventAccumulator. By default every event is kept.

    Raises:
        ConfigurationError: There is no such folder.

    Reference: release 2.10, `cerebras.pytorch.utils.tensorboard`.
    """

    def __init__(self, log_dirs: str, filter: str | None = None, **kwargs: Any) -> None:
        self._root = Path(log_dirs)
        if not self._root.is_dir():
            raise ConfigurationError(f"there is no folder {str(log_dirs)!r} to read summaries from")
        self._filter = filter
        self._settings = {"size_guidance": STORE_EVERYTHING_SIZE_GUIDANCE, **kwargs}
        self.reload()

    def reload(self) -> None:
        """Reads the files again, with what has been written meanwhile."""
        folders = {file.parent for file in self._root.rglob("events.out.tfevents.*")}
        if self._filter is not None:
            folders = {folder for folder in folders if folder.relative_to(self._root).match(self._filter)}
        self._accumulators = [EventAccumulator(str(folder), **self._settings).Reload() for folder in sorted(folders)]

    def read_scalar(self, name: str, step: int | None = None) -> list[ScalarEvent]:
        """Returns the events of a scalar: wall_time, step, value; in the order of steps.

        Args:
            name: The name of the scalar.
            step: The step of the events; None: all.

        Raises:
            KeyError: There is no such scalar.
        """
        found = [accumulator.Scalars(name) for accumulator in self._with("scalars", name)]
        return _in_order(found, step)

    def Scalars(self, name: str) -> list[ScalarEvent]:
        """Returns all events of a scalar.

        Args:
            name: The name of the scalar.

        Raises:
            KeyError: There is no such scalar.
        """
        return self.read_scalar(name)

    def read_tensor(
        self, name: str, step: int | None = None, latest_only: bool = True
    ) -> TensorDescriptor | list[TensorDescriptor] | dict[int, list[TensorDescriptor]] | None:
        """Returns the tensors that `add_tensor` wrote under a name.

        Args:
            name: The name.
            step: The step; None: all.
            latest_only: Whether only the last tensor of each step is read.

        Returns:
            With a step, the last tensor (None if there is none), or a list of all of the step. Without, a list of the
            last of each step in order, or all by step.
        """
        found = tensor_files.read(self._root, name)
        if step is None:
            return [of_step[-1] for of_step in found.values()] if latest_only else found
        of_step = found.get(step, [])
        if not latest_only:
            return of_step
        return of_step[-1] if of_step else None

    def scalar_names(self) -> set[str]:
        """Returns the names of the scalars."""
        return set(self.Tags()["scalars"])

    def scalar_groups(self) -> set[str]:
        """Returns the groups under which TensorBoard shows the scalars: the part of a name before its first slash."""
        return {name.partition("/")[0] for name in self.scalar_names()}

    def tensor_names(self) -> set[str]:
        """Returns the names that `add_tensor` was given."""
        return tensor_files.names(self._root)

    def text_summary_names(self) -> list[str]:
        """Returns the names that `add_text` was given."""
        return [name.removesuffix(_TEXT) for name in self.Tags()["tensors"] if name.endswith(_TEXT)]

    def read_text_summary(self, name: str, step: int | None = None) -> list[TensorEvent]:
        """Returns the events of a text, in the order of steps.

        Args:
            name: The name of the text.
            step: The step of the events; None: all.

        Raises:
            KeyError: There is no such text.
        """
        tag = f"{name}{_TEXT}"
        return _in_order([accumulator.Tensors(tag) for accumulator in self._with("tensors", tag)], step)

    def Tags(self) -> dict[str, Any]:
        """Returns the names by kind, as tensorboard has them: "scalars", "tensors" (with texts), "images", ..."""
        merged: dict[str, Any] = {"scalars": [], "tensors": []}
        for accumulator in self._accumulators:
            for kind, names in accumulator.Tags().items():
                merged[kind] = sorted({*merged.get(kind, []), *names}) if isinstance(names, list) else names
        return merged

    def _with(self, kind: str, tag: str) -> list[EventAccumulator]:
        found = [accumulator for accumulator in self._accumulators if tag in accumulator.Tags()[kind]]
        if not found:
            known = ", ".join(self.Tags()[kind]) or "none"
            raise KeyError(f"nothing called {tag!r} was summarized below {self._root}; there is: {known}")
        return found


def _in_order(found: Iterable[list[Any]], step: int | None) -> list[Any]:
    events = [event for events in found for event in events if step in (None, event.step)]
    return sorted(events, key=lambda event: (event.step, event.wall_time))
