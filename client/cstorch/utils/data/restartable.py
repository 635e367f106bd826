"""Loaders that can be restarted where they stood."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class RestartableDataLoader(Protocol):
    """What the loader that an input_fn returns must have to be saved with checkpoints, besides `__iter__`."""

    def state_dict(self) -> dict[str, Any]:
        """Where this worker's loader stands: behind the batches that have been taken from it.

        It is made of numbers, strings, bytes, tensors, arrays, and lists, tuples and dicts of these. In here
        `cstorch.distributed.get_worker_state()` says how many batches and samples the worker has streamed.
        """

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Makes the next pass begin there. strict: whether a state that does not fit is an error."""

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        """One state of the states of all workers, those of a wafer after those of the wafer before."""

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        """The state of this worker, which knows its number: the number of workers may be another than before."""
