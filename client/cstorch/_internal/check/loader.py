"""What a check finds out of a loader: where its time is spent, its last batch, and what its workers share."""

import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from cstorch._internal.execution import Input
from cstorch._internal.loader_processes import workers_in_process
from cstorch._internal.random_state import random_state_kept
from cstorch._internal.tracing.provenance import line_of_function, user_line_of
from cstorch.distributed import streaming
from waferbox import settings
from waferbox.input_process.messages import InputSettings, encode

_SAMPLE_SECONDS: Final = 0.005


class BusyLines:
    """The lines of the script at which its thread is found every few milliseconds; a context, in the script's thread.

    Used by the script's thread.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True)

    @property
    def busiest(self) -> str:
        """The line at which the thread was found most often; empty: there is none."""
        return max(self._counts, key=self._counts.__getitem__, default="")

    def _watch(self, thread: int) -> None:
        while not self._is_over.wait(_SAMPLE_SECONDS):
            if line := user_line_of(sys._current_frames().get(thread)):
                self._counts[line] += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()


def line_of_input(loader: Input, made_at: Mapping[Any, str]) -> str:
    """Returns the line of the input_fn that makes its batches, such as "train.py:20"; empty: it is not the user's.

    It is that of the torch DataLoader, or of the generator's `yield`; the input_fn's first line if neither is known.

    Args:
        loader: The loader, which has yielded a batch in this process.
        made_at: The lines at which torch DataLoaders were made.
    """
    made = loader.dataloader
    if inspect.isgenerator(made):
        return user_line_of(made.gi_frame) or line_of_function(loader.input_fn)
    line = made_at.get(made, "") if isinstance(made, DataLoader) else ""
    return line or line_of_function(loader.input_fn)


def partial_batch(loader: Any, steps: int) -> str:
    """Returns a description of the partial batch that a torch DataLoader yields within some steps; empty: none."""
    batches = getattr(loader, "batch_sampler", None)
    size, drop_last = getattr(batches, "batch_size", None), getattr(batches, "drop_last", None)
    try:
        samples = len(getattr(batches, "sampler", None))  # type: ignore[arg-type]
    except TypeError:
        return ""
    if not size or drop_last is not False or not samples % size or steps <= samples // size:
        return ""
    return (
        f"batch {samples // size + 1} of a pass has {samples % size} rows and the others have {size}, as there are "
        f"{samples} samples: the step is compiled for one size. Give the torch DataLoader drop_last=True, or fill the "
        "last batch up, with a mask that keeps the added rows out of the loss"
    )


def shared_samples(loader: Input, rows: int) -> str:
    """Returns a description of the samples that two workers both yield, though the input_fn shards; empty: none.

    An input_fn that asks for its place among the workers shards. Otherwise the cluster deals batches out.

    Args:
        loader: The loader, which has yielded a batch in this process.
        rows: The rows of a batch of the whole step.
    """
    if streaming.share_was_asked() and _have_same_samples(loader, rows // 2, num_csx=2, num_workers=1):
        whom = "one wafer"
    elif streaming.rank_was_asked() and _have_same_samples(loader, rows, num_csx=1, num_workers=2):
        whom = "one worker"
    else:
        return ""
    return (
        f"the input_fn makes the part of {whom}, and two of them get the same samples: let each take every n-th, from "
        "cstorch.distributed.get_streaming_rank() on, where n is cstorch.distributed.num_streamers()"
    )


def _have_same_samples(loader: Input, rows: int, *, num_csx: int, num_workers: int) -> bool:
    """Whether the first two workers begin with the same batch, of these rows."""
    batches = []
    for wafer, worker in ((0, 0), (num_csx - 1, num_workers - 1)):
        place = InputSettings(
            worker=worker,
            num_workers=num_workers,
            wafer=wafer,
            num_csx=num_csx,
            half_type="",
            mixed_precision=False,
        )
        with _worker(place), random_state_kept(), workers_in_process():
            try:
                batch = next(iter(loader.input_fn(*loader.args, **loader.kwargs)))
            except Exception:  # noqa: BLE001 - it may need what only a worker has, and is not run to find its errors
                return False
        batches.append([leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)])
    first, second = batches
    return (
        len(first) == len(second)
        and all(map(torch.equal, first, second))
        and all(tensor.dim() > 0 and len(tensor) == rows for tensor in first)
        and any(bool((tensor != tensor.flatten()[0]).any()) for tensor in first)
    )


@contextmanager
def _worker(place: InputSettings) -> Iterator[None]:
    """Context in which the input_fn finds itself in the process of a worker."""
    os.environ[settings.INPUT.name] = encode(place).decode()
    try:
        yield
    finally:
        del os.environ[settings.INPUT.name]
