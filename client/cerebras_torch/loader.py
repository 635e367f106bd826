"""The dataloader: a torch DataLoader whose batches are steps."""

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

from cerebras_torch import session
from cerebras_torch.run import current_run
from cerebras_torch.setup import check_initialized
from cstorch._internal.execution import Execution
from cstorch.errors import UsageError
from cstorch.utils.data import DataExecutor, DataLoader


class LoopExecutor(DataExecutor):
    """Iterates a pass over a loader; on the cluster the body of the loop is recorded."""

    def make_execution(self) -> Execution:
        return self.backend.make_loop_execution(self)


class SessionLoader:
    """The batches of a loader, each a step of the session. Every worker of the cluster gets a copy of the loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError says so

    def __iter__(self) -> Iterator[Any]:
        current = session.current_session()
        if current is None:
            raise UsageError("a cbtorch.dataloader is iterated inside `with cbtorch.Session(...):`")
        run = current_run()
        left = run.config.steps_left(run.steps)
        steps = len(self) if left is None else min(len(self), left)
        if steps == 0:
            return iter(())
        take = functools.partial(operator.getitem, (self.loader,), 0)  # an input_fn that needs no code of ours
        executor = LoopExecutor(
            DataLoader(take),
            num_steps=steps,
            checkpoint_steps=run.config.checkpoint_steps,
            activation_steps=run.config.fetch_steps,
        )
        return current.steps(executor)


def dataloader(loader: Iterable[Any], use_parallel_loader: bool | None = None) -> SessionLoader:
    """Makes each batch of a pass over a torch DataLoader a step.

    Args:
        loader: The torch DataLoader. It has a length, and can be pickled.
        use_parallel_loader: Accepted without effect.

    Raises:
        UsageError: Nothing is initialized yet.
        TypeError: `loader` is no loader, or does not know its length.

    Reference: releases 1.2 to 1.7, `cerebras_torch`.
    """
    check_initialized()
    if not isinstance(loader, Iterable) or not hasattr(loader, "__len__"):
        raise TypeError(f"dataloader takes a torch DataLoader with a length, not {type(loader).__name__}")
    return SessionLoader(loader)
