"""The speed of an input_fn's loader by itself."""

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cstorch._internal.batch import num_samples
from cstorch.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics:
    """The figures of one pass over the loader.

    Args:
        batches: The number of batches.
        samples: The number of samples.
        first_batch_seconds: From the begin of the pass to its first batch.
        seconds: From the begin of the pass to its last batch.
    """

    batches: int
    samples: int
    first_batch_seconds: float
    seconds: float

    @property
    def samples_per_second(self) -> float:
        """The rate over the whole pass."""
        return self.samples / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The figures that `benchmark_dataloader` has measured.

    Args:
        build_seconds: The duration of the call of the input_fn.
        epochs: The passes.
    """

    build_seconds: float
    epochs: list[EpochMetrics] = field(default_factory=list)

    @property
    def samples_per_second(self) -> float:
        """The rate over all passes."""
        return sum(epoch.samples for epoch in self.epochs) / max(sum(epoch.seconds for epoch in self.epochs), 1e-9)


def benchmark_dataloader(
    input_fn: Callable[..., Iterable[Any]],
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    sampling_frequency: int | None = None,
    profile_activities: list[str] | None = None,
    print_metrics: bool = True,
) -> Metrics:
    """Calls an input_fn and takes batches from its loader as fast as they come.

    Args:
        input_fn: Called without arguments.
        num_epochs: The number of passes over the loader; None: one.
        steps_per_epoch: The greatest number of batches of a pass; None: all.
        sampling_frequency: Accepted without effect: rates are those of whole passes.
        profile_activities: Accepted without effect.
        print_metrics: Whether to print a line for each pass.

    Returns:
        The figures.

    Raises:
        ConfigurationError: A number is less than 1.

    Reference: release 2.10, `cerebras.pytorch.utils.benchmark`.
    """
    for name, value in (("num_epochs", num_epochs), ("steps_per_epoch", steps_per_epoch)):
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} must be at least 1, got {value}")
    begin = time.perf_counter()
    loader = input_fn()
    metrics = Metrics(build_seconds=time.perf_counter() - begin)
    for number in range(num_epochs or 1):
        epoch = _measure(itertools.islice(iter(loader), steps_per_epoch))
        metrics.epochs.append(epoch)
        if print_metrics:
            print(
                f"epoch {number}: {epoch.batches} batches, {epoch.samples_per_second:.1f} samples/s, "
                f"first batch after {epoch.first_batch_seconds:.3f} s"
            )
    return metrics


def _measure(batches: Iterable[Any]) -> EpochMetrics:
    begin = time.perf_counter()
    count = samples = 0
    first = seconds = 0.0
    for batch in batches:
        seconds = time.perf_counter() - begin
        first = first or seconds
        count += 1
        samples += num_samples(batch)
    return EpochMetrics(batches=count, samples=samples, first_batch_seconds=first, seconds=seconds)
