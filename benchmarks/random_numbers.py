"""The cluster's random numbers against torch's own generator, on one thread: nanoseconds for each element."""

import time
from collections.abc import Callable, Iterator

import torch

from waferbox.cirh.calls.random_numbers import bernoulli, draw, integers, normal, uniform

SHAPES = {"GPT-2 block": (4, 256, 768), "GPT-2 attention": (4, 12, 256, 256), "FC": (64, 256)}
FLOAT = torch.float32


def _pairs(shape: tuple[int, ...]) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """By kind: ours, and torch's."""
    mask, zero_to_one, bell = bernoulli(0.9), uniform(FLOAT, 0, 1), normal(FLOAT, 0, 1)
    thousand = integers(torch.int64, 0, 1000)
    return {
        "mask": (lambda: draw(mask, 1, shape), lambda: torch.empty(shape).bernoulli_(0.9)),
        "uniform": (lambda: draw(zero_to_one, 1, shape), lambda: torch.rand(shape)),
        "normal": (lambda: draw(bell, 1, shape), lambda: torch.randn(shape)),
        "integers": (lambda: draw(thousand, 1, shape), lambda: torch.randint(0, 1000, shape)),
    }


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(repeats: int) -> Iterator[tuple[str, list[float], list[float]]]:
    """Shape and kind, then nanoseconds for each element of ours and of torch's, in pairs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for label, shape in SHAPES.items():
        count = torch.Size(shape).numel()
        for kind, (ours, theirs) in _pairs(shape).items():
            ours(), theirs()
            pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(repeats)]
            yield f"{kind}, {label}", [a / count * 1e9 for a, _ in pairs], [b / count * 1e9 for _, b in pairs]
    torch.set_num_threads(threads)
