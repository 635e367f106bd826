"""What `benchmarks.hosts` trains: the same networks, rows and losses on all sides."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpt import GPT, GPTSettings, token_loss

WARM_STEPS: Final = 5
MEASURED_STEPS: Final = 20

_GPT: Final = GPTSettings(vocabulary=4096, width=512, layers=4, heads=8, sequence=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraining:
    """A network and its data.

    Attributes:
        title: says what it is.
        rows: of each host in a step.
        half: whether products, weights on their way and gradients on theirs are in bfloat16.
        make_model: makes the network.
        make_rows: makes so many inputs and targets.
        loss: of outputs and targets.
        parts: of the network, each of which FSDP2 gathers alone.
    """

    title: str
    rows: int
    half: bool
    make_model: Callable[[], nn.Module]
    make_rows: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    parts: Callable[[nn.Module], Sequence[nn.Module]]

    def streamed_bytes(self, hosts: int) -> float:
        """The bytes over a link in a step, in each direction: weights are streamed once, gradients are reduced once."""
        values = sum(parameter.numel() for parameter in self.make_model().parameters())
        return (hosts - 1) / hosts * 2 * values * (2 if self.half else 4)


def _layers(count: int, width: int) -> HostTraining:
    """A network of equal layers, which learns the identity."""

    def make_rows(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        vectors = torch.randn(rows, width)
        return vectors, vectors

    return HostTraining(
        title=f"{count} layers of {width} x {width} in float32",
        rows=32,
        half=False,
        make_model=lambda: nn.Sequential(
            *(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU()))
        ),
        make_rows=make_rows,
        loss=F.mse_loss,
        parts=lambda model: list(model.children()),
    )


def _make_tokens(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(_GPT.vocabulary, (rows, _GPT.sequence + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _blocks(model: nn.Module) -> Sequence[nn.Module]:
    assert isinstance(model, GPT)
    return list(model.h)


TRAININGS: Final[Mapping[str, HostTraining]] = {
    "layers": _layers(8, 1024),
    "narrow": _layers(32, 512),  # as many bytes, in states that lie on all shards in turn
    "gpt": HostTraining(
        title=f"a GPT of {_GPT.layers} layers of width {_GPT.width} in bfloat16, {_GPT.vocabulary} tokens",
        rows=1,
        half=True,
        make_model=lambda: GPT(_GPT),
        make_rows=_make_tokens,
        loss=token_loss,
        parts=_blocks,
    ),
}
