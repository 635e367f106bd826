"""Tokens per second of GPT-2 small (124M, sequence 256, batch 4) in bfloat16: one run of PyTorch or of the cluster.

PyTorch has autocast and fused AdamW, eager or with `torch.compile`; the cluster has one wafer, of torch's own calls
or of kernels that Inductor generates. Run by `python -m benchmarks`, which alternates them:

    python -m benchmarks.gpt2_training eager|compiled|cluster|inductor --num-steps N --threads T
"""

import argparse
import itertools
import json
import logging
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

# Before torch: an OpenMP thread that spins takes a core from the other processes. Eager gets the same policy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.gpt import GPT, GPTSettings, token_loss

VOCABULARY = 50257
BATCH, SEQUENCE = 4, 256
SETTINGS = GPTSettings(vocabulary=VOCABULARY, width=768, layers=12, heads=12, sequence=SEQUENCE)


class ReadyBatches(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Four batches made beforehand, so that neither side measures the making of input."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (4, BATCH, SEQUENCE + 1), generator=generator)
        while True:
            yield from ((batch[:, :-1], batch[:, 1:]) for batch in tokens)


def input_fn() -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    return DataLoader(ReadyBatches(), batch_size=None)


class GPT2(GPT):
    """With its initial weights, and one weight for the embedding of tokens and the head."""

    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.apply(self._initialise)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0.0, 0.02)


def rate(times: list[float]) -> float:
    """Tokens per second by the median step, the first two left out."""
    steps = [after - before for before, after in itertools.pairwise(times[2:])]
    return BATCH * SEQUENCE / statistics.median(steps)


def rate_of_all(times: list[float]) -> float:
    """Tokens per second by the time of all steps but the first two: with what is done now and then."""
    return BATCH * SEQUENCE * (len(times) - 3) / (times[-1] - times[2])


def run_eager(num_steps: int, threads: int) -> dict[str, float]:
    return _run_pytorch(num_steps, threads, compiled=False)


def run_compiled(num_steps: int, threads: int) -> dict[str, float]:
    return _run_pytorch(num_steps, threads, compiled=True)


def _run_pytorch(num_steps: int, threads: int, *, compiled: bool) -> dict[str, float]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT2()

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss(model(tokens), targets)

    forward = torch.compile(loss_of) if compiled else loss_of
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    times, loss = [], 0.0
    for _, (tokens, targets) in zip(range(num_steps), input_fn(), strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            loss_tensor = forward(tokens, targets)
        optimizer.zero_grad()
        loss_tensor.backward()
        optimizer.step()
        loss = loss_tensor.item()
        times.append(time.perf_counter())
    return {"tokens_per_second": rate(times), "loss": loss}


class RoleSeconds(logging.Handler):
    """What the client logs at the end of an execution: the seconds of each role, by what they were spent on."""

    LINE = re.compile(r"(\S+)\.(\w+): ([\d.]+) s")

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seconds: dict[str, dict[str, float]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        found = self.LINE.fullmatch(record.getMessage())
        if found is not None:
            self.seconds.setdefault(found[1], {})[found[2]] = float(found[3])

    def shares(self) -> dict[str, dict[str, float]]:
        """Of the whole time of each role."""
        return {
            role: {what: value / parts["total"] for what, value in parts.items() if what != "total"}
            for role, parts in self.seconds.items()
            if parts.get("total")
        }


def run_cluster(num_steps: int, threads: int) -> dict[str, Any]:
    return _run_cluster(num_steps, threads, kernel_library="aten")


def run_inductor(num_steps: int, threads: int) -> dict[str, Any]:
    return _run_cluster(num_steps, threads, kernel_library="inductor")


def _run_cluster(num_steps: int, threads: int, *, kernel_library: str) -> dict[str, Any]:
    import cerebras.pytorch as cstorch

    cstorch.backends.csx.performance.kernel_library = kernel_library
    spent = RoleSeconds()
    logger = logging.getLogger("cstorch")
    logger.addHandler(spent)
    logger.setLevel(logging.DEBUG)

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    cstorch.amp.set_half_dtype("bfloat16")
    cstorch.amp.enable_mixed_precision()
    with tempfile.TemporaryDirectory() as folder:
        backend = cstorch.backend("CSX", artifact_dir=Path(folder), compile_dir=str(Path(folder) / "compile"))
        model = GPT2()
        compiled = cstorch.compile(model, backend)
        optimizer = cstorch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-8, weight_decay=0.01)
        times: list[float] = []
        losses: list[float] = []

        @cstorch.trace
        def step(batch: list[torch.Tensor]) -> torch.Tensor:
            tokens, targets = batch
            loss = token_loss(compiled(tokens), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        @cstorch.step_closure
        def keep(loss: torch.Tensor) -> None:
            losses.append(loss.item())
            times.append(time.perf_counter())

        loader = cstorch.utils.data.DataLoader(input_fn)
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=num_steps):
            keep(step(batch))
        return {
            "tokens_per_second": rate(times),
            "tokens_per_second_of_all": rate_of_all(times),
            "loss": losses[-1],
            "share_of_time": spent.shares(),
        }


SIDES: Final[Mapping[str, Callable[[int, int], dict[str, Any]]]] = {
    "eager": run_eager,
    "compiled": run_compiled,
    "cluster": run_cluster,
    "inductor": run_inductor,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=[*SIDES])
    parser.add_argument("--num-steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(SIDES[options.side](options.num_steps, options.threads)))


if __name__ == "__main__":
    main()
