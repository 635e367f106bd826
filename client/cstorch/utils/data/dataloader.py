"""The DataLoader: a recipe for input that every worker of the cluster follows by itself; and restartable loaders."""

import inspect
import io
import itertools
import sys
from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import cloudpickle
import torch

from cstorch._internal.batch_objects import has_objects
from cstorch._internal.check.run import checked_run
from cstorch._internal.execution import current_execution
from cstorch._internal.importable_modules import can_be_imported
from cstorch._internal.loader_processes import workers_in_process
from cstorch._internal.random_state import random_state, random_state_kept
from cstorch._internal.sparing_fetcher import spare_samples
from cstorch.distributed.worker import appliance_environ
from cstorch.distributed.worker_state import DataLoaderCheckpoint, WorkerState
from cstorch.errors import InputError, UsageError

# --- Loaders that can be restarted where they stood -------------------------------------------------------------------


@runtime_checkable
class RestartableDataLoader(Protocol):
    """The methods, besides `__iter__`, of a loader whose position is saved with checkpoints. An input_fn returns it.

    Reference: release 2.10, `cerebras.pytorch.utils`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of this worker's loader: after the batches that have been taken from it.

        It consists of numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts of these. Here
        `cstorch.distributed.get_worker_state()` returns the number of batches and samples that the worker has streamed.
        """

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Makes the next pass begin at a position.

        Args:
            state_dict: The position: what `deaggregate_state_dict` returned.
            strict: Whether a state that does not fit is an error.
        """

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns one state, made of those of all workers.

        Args:
            worker_states: The states, wafer by wafer.
        """

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """Returns the state of this worker. The number of workers may differ from that of the saved state.

        Args:
            aggregated_state_dict: What `aggregate_state_dict` returned.
            strict: Whether a state that does not fit is an error.
        """


# --- Pickling what the workers run, so that their tracebacks show the lines of the user's own files -------------------


def pickled_recipe(recipe: object) -> bytes:
    """Returns a recipe, pickled by cloudpickle with the names of the user's files. Raises as cloudpickle does."""
    with io.BytesIO() as file, closing(_Pickler(file)) as pickler:
        pickler.dump(recipe)
        return file.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Reduces a code object with its file name, without which no line can be shown; cloudpickle 3.1.3 replaces it."""
    make, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    written = make(*arguments).co_filename
    return make, tuple(code.co_filename if argument == written else argument for argument in arguments)


class _Pickler(cloudpickle.CloudPickler):
    """A pickler that sends the code of modules that a worker cannot import, as cloudpickle does that of __main__."""

    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.CloudPickler.dispatch_table)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._seen: set[str] = set()  # modules
        self._sent: list[ModuleType] = []

    def close(self) -> None:
        """Leaves cloudpickle, whose list of modules is the process's, as it was."""
        for module in self._sent:
            cloudpickle.unregister_pickle_by_value(module)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (FunctionType, type)):
            self._see(obj.__module__)
        elif isinstance(obj, ModuleType):
            self._see(obj.__name__)
        return super().reducer_override(obj)

    def _see(self, name: str) -> None:
        """Looks at a module when the first of its functions and classes is pickled."""
        if name in self._seen:
            return
        self._seen.add(name)
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType) or module.__name__ != name:
            return
        if name not in cloudpickle.list_registry_pickle_by_value() and not can_be_imported(module):
            cloudpickle.register_pickle_by_value(module)
            self._sent.append(module)


# --- The DataLoader: a recipe for input that every worker of the cluster follows by itself ----------------------------


_ids = itertools.count(1)


class DataLoader:
    """The input of a DataExecutor: a function that makes the loader, which every worker of the cluster calls.

    An execution begins with the first batch of a pass. If the loader is restartable (`RestartableDataLoader`), it
    begins after the last batch of the execution before with the same DataLoader, or where `load_state_dict` put it. An
    execution that ended before its last step, or failed, does not count. `id` is a number that no other DataLoader of
    this process has, not even a copy.

    Args:
        input_fn: A function that returns an iterable of batches, usually a `torch.utils.data.DataLoader`. Every worker
            of the cluster calls it; on the client it runs for the first batch only.
        *args: The arguments of `input_fn`.
        **kwargs: The arguments of `input_fn`.

    Raises:
        TypeError: `input_fn` is not callable.

    Example:
        ::

            def input_fn(batch_size):
                return torch.utils.data.DataLoader(dataset(), batch_size, shuffle=True, drop_last=True)

            dataloader = cstorch.utils.data.DataLoader(input_fn, batch_size=64)

    Reference: release 2.10, `cerebras.pytorch.utils`.
    """

    def __init__(self, input_fn: Callable[..., Iterable[Any]], *args: Any, **kwargs: Any) -> None:
        if not callable(input_fn):
            raise TypeError(
                f"input_fn must be a function that returns an iterable of batches, not {type(input_fn).__name__}; "
                "hand over the function itself: DataLoader(input_fn, *args)"
            )
        self.id = next(_ids)
        self._batch_size: int | None = None
        self.input_fn = input_fn
        self.args = args
        self.kwargs = kwargs
        self._loader: Iterable[Any] | None = None  # the one that was made last
        self._is_between = True  # whether no execution has begun since it was known where the next one begins
        self._position: dict[str, Any] | None = None  # where the next execution begins

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self), id=next(_ids), _loader=None, _is_between=True)
        return other

    def __len__(self) -> int:
        """Returns the number of batches of one pass.

        Raises:
            TypeError: The loader does not know its length.
        """
        return len(self.dataloader)  # type: ignore[arg-type]  # a TypeError says so

    def __iter__(self) -> Iterator[Any]:
        """Iterates one pass over the loader, in this process and without any cluster."""
        return iter(self.dataloader)

    @property
    def dataloader(self) -> Iterable[Any]:
        """The loader that the input_fn returned last in this process; it is made now if there is none."""
        return self._make_aside() if self._loader is None else self._loader

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch: of the first of the last execution; before it, what the input_fn's loader says of itself.

        None where that says nothing.
        """
        if self._batch_size is not None:
            return self._batch_size
        loader = self.dataloader
        for named in (loader, getattr(loader, "batch_sampler", None)):
            size = getattr(named, "batch_size", None)
            if isinstance(size, int):
                return size
        return None

    @batch_size.setter
    def batch_size(self, size: int | None) -> None:
        """The samples of a batch: of the first batch of the last execution, or before it the loader's own figure.

        None if the loader has no such figure.
        """
        self._batch_size = size

    @property
    def is_restartable(self) -> bool:
        """Whether the loader of the input_fn has the methods of `RestartableDataLoader`."""
        return isinstance(self.dataloader, RestartableDataLoader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the input: what `aggregate_state_dict` makes of the states of all workers' loaders.

        It is the position after the batch of the current step, though workers are ahead. It can be read on a checkpoint
        step of the executor that runs with this DataLoader, on CSX in a checkpoint closure; or between loops that ran
        to their ends, where it is the position of the next one.

        An execution gives its first step to the first worker of each wafer, its second to the next, and so on. A loader
        whose state is the sum of what all workers have taken continues exactly with any number of workers. One that
        keeps a position for each worker does so if the steps until the checkpoint are a multiple of
        num_workers_per_csx.

        Raises:
            UsageError: It is no such moment, or the loader cannot be restarted.
            InputError: A state cannot be read.
        """
        execution = current_execution()
        if execution is None and self._is_between:
            return self._first_state()
        if execution is None or execution.executor.dataloader is not self:
            raise UsageError(
                "the input has a state while an executor runs with it, and between loops that run to their ends: ask "
                "in a @checkpoint_closure"
            )
        if not execution.executor.on_checkpoint_step:
            raise UsageError(
                f"step {execution.executor.user_iteration} is no checkpoint step, and the state of the input is known "
                "on those only: ask in a @checkpoint_closure, and give the DataExecutor checkpoint_steps"
            )
        loader = self._restartable()
        return loader.aggregate_state_dict(execution.input_states())

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Makes the next execution with this DataLoader begin at a position.

        Every worker's loader gets what its `deaggregate_state_dict` makes of the position.

        Args:
            state_dict: What `state_dict` returned.
            strict: Passed on to the loader's own methods if it is False.

        Raises:
            UsageError: An executor is being iterated with it, or the loader cannot be restarted.
        """
        execution = current_execution()
        if execution is not None and execution.executor.dataloader is self:
            raise UsageError("the loop over this input has begun: load its state before `for batch in executor:`")
        self._restartable()
        self._begin_next(state_dict, strict=strict)

    def completed(self, worker_states: list[dict[str, Any]]) -> None:
        """Makes the next execution begin where one that has done its last step ended.

        Args:
            worker_states: The states of the loaders of all workers after that step.

        Raises:
            UsageError: The loader cannot be restarted.
        """
        self._begin_next(self._restartable().aggregate_state_dict(worker_states), strict=True)

    def _begin_next(self, state_dict: dict[str, Any], *, strict: bool) -> None:
        self._position, self._is_between = {"state": state_dict, "strict": strict}, True

    def own_state(self, *, worker_step: int, samples_streamed: int) -> dict[str, Any]:
        """Returns the state of the loader in this process, as that of the only worker.

        Args:
            worker_step: The number of batches streamed.
            samples_streamed: The number of rows in them.
        """
        standing = DataLoaderCheckpoint(
            appliance_step=worker_step, worker_step=worker_step, samples_streamed=samples_streamed
        )
        WorkerState.configure(standing)
        try:
            return self._restartable().state_dict()
        finally:
            WorkerState.clear()

    def _first_state(self) -> dict[str, Any]:
        if self._position is not None:
            state: dict[str, Any] = self._position["state"]
            return state
        return self._restartable().aggregate_state_dict([self.own_state(worker_step=0, samples_streamed=0)])

    def _restartable(self) -> RestartableDataLoader:
        loader = self.dataloader
        if not isinstance(loader, RestartableDataLoader):
            raise UsageError(
                f"the loader that the input_fn {_name(self.input_fn)} returned cannot be restarted: give it "
                "state_dict, load_state_dict, aggregate_state_dict and deaggregate_state_dict (see "
                "cstorch.utils.data.RestartableDataLoader)"
            )
        return loader

    def builder(self) -> bytes:
        """Returns the pickled recipe for the workers of an execution.

        It has the input_fn, its arguments, the state of the random generators, torch's default type, and the position
        to begin at.

        Raises:
            InputError: The input_fn, an argument or a loaded state cannot be pickled.
        """
        recipe = {
            # The first: what the others import, as they are unpickled, finds files and variables set.
            **({"files": run.files} if (run := checked_run()) is not None else {}),
            **({"environment": appliance_environ} if appliance_environ else {}),
            "input_fn": self.input_fn,
            "args": self.args,
            "kwargs": self.kwargs,
            "random_state": random_state(),
            "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "position": self._position,
        }
        self._is_between = False
        try:
            return pickled_recipe(recipe)
        except Exception as error:
            variable = _unpicklable_variable(self.input_fn, set())
            raise InputError(
                f"the input_fn {_name(self.input_fn)} cannot be sent to the workers: {error}"
                f"{f' ({variable})' if variable else ''}. "
                "It must not hold open files, locks, the model or the backend; make what it needs inside of it, or "
                "pass values as arguments: DataLoader(input_fn, FLAGS.batch_size)"
            ) from error

    def first_batch(self, *, has_values: bool = True) -> Any:
        """Returns the first batch of the execution, made without other processes; the step has its shapes.

        Args:
            has_values: False: tensors of a large batch may be on the meta device; most of its samples are not made.

        Raises:
            InputError: The loader yields nothing.
        """
        return self.first_batches(1, has_values=has_values)[0]

    def first_batches(self, most: int, *, has_values: bool = True) -> Sequence[Any]:
        """Returns the first batch, and those after it if it has strings or other objects beside its tensors.

        Args:
            most: The number of batches, at most.
            has_values: As of `first_batch`.

        Raises:
            InputError: The loader yields nothing.
        """
        with workers_in_process(), closing(self._batches(has_values=has_values)) as batches:
            found = [next(batches)]
            if has_objects(found[0]):
                with random_state_kept():  # as if only the first had been made
                    found.extend(itertools.islice(batches, most - 1))
        return found

    def passes(self) -> Iterator[Any]:
        """Yields batches without end: pass after pass over one loader.

        Raises:
            InputError: A pass yields nothing, or the loader cannot be iterated twice.
        """
        self._is_between = False
        yield from self._batches()

    def _batches(self, *, has_values: bool = True) -> Generator[Any]:
        loader = self._make()
        may_be_empty = False
        if self._position is not None:
            strict = {} if self._position["strict"] else {"strict": False}
            restartable = self._restartable()
            restartable.load_state_dict(restartable.deaggregate_state_dict(self._position["state"], **strict), **strict)
            may_be_empty = True  # it may have stood at the end of a pass
        count = 0
        while True:
            before = count
            iterator = iter(loader)
            if not has_values:
                spare_samples(iterator)
            for batch in iterator:
                count += 1
                yield batch
            if (count == before and not may_be_empty) or iterator is loader:
                raise InputError(_too_few_batches(count))
            may_be_empty = False

    def _make_aside(self) -> Iterable[Any]:
        """Makes a loader that is not iterated, and leaves the random generators as they are."""
        with random_state_kept():
            return self._make()

    def _make(self) -> Iterable[Any]:
        loader = self.input_fn(*self.args, **self.kwargs)
        if not isinstance(loader, Iterable):
            raise InputError(
                f"the input_fn {_name(self.input_fn)} returned {type(loader).__name__}, not an iterable of batches"
            )
        self._loader = loader
        return loader


def _too_few_batches(count: int) -> str:
    return (
        f"the loader ran dry after {count} batches and more are needed: it yields nothing, or it is a generator, which "
        "cannot be iterated a second time; let the input_fn return an object with __iter__, or lower num_steps"
    )


def _unpicklable_variable(function: Any, seen: set[Any]) -> str | None:
    """Returns which variable keeps a function of Python, or one that it calls, from being pickled, if there is one."""
    if not isinstance(function, FunctionType) or function in seen:
        return None
    seen.add(function)
    used = inspect.getclosurevars(function)
    for kind, variables in (("closure variable", used.nonlocals), ("global", used.globals)):
        for name, value in variables.items():
            try:
                pickled_recipe(value)
            except Exception:  # noqa: BLE001 - what the user's objects raise
                return _unpicklable_variable(value, seen) or f"the {kind} {name} of {_name(function)}"
    return None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
