"""Single operations of image and recommendation models on several wafers, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import BATCH, Step, Traced
from torch import nn
from torch.nn import functional as F

from appliance.compiler.core.errors import CompileError
from cstorch.errors import TraceError

pytestmark = pytest.mark.parity

SHAPES = {
    "kernel1": (4, 4, 3),
    "kernel2": (4, 4, 3, 3),
    "kernel3": (4, 4, 3, 3, 3),
    "grouped": (4, 2, 3, 3),
    "scale": (4,),
    "shift": (4,),
    "table": (11, 4),
}


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("pairs", torch.triu_indices(8, 8, 1))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 11, (BATCH, 5))
    ids[0] = 1  # a bag of padding
    return torch.randn(BATCH, 4, 8, 8, dtype=torch.float64), ids


# Gets the weights, images and indices; its result and all gradients are compared.
Function = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def step_of(function: Function) -> Callable[[Any], Step]:
    def build(m: Any) -> Step:
        def step(batch: Any) -> Any:
            x, ids = batch
            result = function(m, x * (1 + m.scale[0]), ids)
            (result * result.detach().cos()).sum().backward()
            gradients = [p.grad.clone() for p in m.parameters() if p.grad is not None]
            m.zero_grad()
            return [result.detach(), *gradients]

        return step

    return build


def line(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2)


def volume(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(BATCH, 4, 4, 4, 4)


def bag(**settings: Any) -> Function:
    return lambda m, x, ids: F.embedding_bag(ids, m.table, **settings)


CASES: dict[str, Function] = {
    "conv1d": lambda m, x, ids: F.conv1d(line(x), m.kernel1),
    "conv2d": lambda m, x, ids: F.conv2d(x, m.kernel2, m.shift, stride=2, padding=1, dilation=2),
    "conv3d": lambda m, x, ids: F.conv3d(volume(x), m.kernel3, m.shift),
    "conv-grouped": lambda m, x, ids: F.conv2d(x, m.grouped, groups=2),
    "conv-transposed": lambda m, x, ids: F.conv_transpose2d(x, m.kernel2, m.shift, stride=2, output_padding=1),
    "conv-channels-last": lambda m, x, ids: F.conv2d(x.to(memory_format=torch.channels_last), m.kernel2),
    "max-pool-3d": lambda m, x, ids: F.max_pool3d(volume(x), 2),
    "avg-pool-3d": lambda m, x, ids: F.avg_pool3d(volume(x), 2),
    "adaptive-avg-3d": lambda m, x, ids: F.adaptive_avg_pool3d(volume(x), 3),
    "adaptive-max-2d": lambda m, x, ids: F.adaptive_max_pool2d(x, 3),
    "adaptive-max-3d": lambda m, x, ids: F.adaptive_max_pool3d(volume(x), 3),
    "lp-pool": lambda m, x, ids: F.lp_pool2d(x, 2, 2),
    "local-response-norm": lambda m, x, ids: F.local_response_norm(x, 2),
    "nearest-2d": lambda m, x, ids: F.interpolate(x, scale_factor=2),
    "nearest-3d": lambda m, x, ids: F.interpolate(volume(x), scale_factor=2),
    "nearest-exact": lambda m, x, ids: F.interpolate(x, size=5, mode="nearest-exact"),
    "bilinear": lambda m, x, ids: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
    "antialiased": lambda m, x, ids: F.interpolate(x, size=5, mode="bilinear", antialias=True),
    "bicubic": lambda m, x, ids: F.interpolate(x, size=5, mode="bicubic"),
    "trilinear": lambda m, x, ids: F.interpolate(volume(x), scale_factor=2, mode="trilinear"),
    "reflect": lambda m, x, ids: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "replicate": lambda m, x, ids: F.pad(x, (1, 2, 2, 1), mode="replicate"),
    "circular": lambda m, x, ids: F.pad(x, (1, 2, 2, 1), mode="circular"),
    "fold": lambda m, x, ids: F.fold(F.unfold(x, 2, stride=2), 8, 2, stride=2),
    "pixel-unshuffle": lambda m, x, ids: F.pixel_unshuffle(x, 2),
    "grid-sample": lambda m, x, ids: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False),
    "labels-of-pixels": lambda m, x, ids: F.cross_entropy(x, (x[:, 0] > 0).long()),
    "bag-sum": bag(mode="sum"),
    "bag-mean": bag(mode="mean"),
    "bag-max": bag(mode="max"),
    "bag-sum-padded": bag(mode="sum", padding_idx=1),
    "bag-mean-padded": bag(mode="mean", padding_idx=1),
    "bag-max-padded": bag(mode="max", padding_idx=-10),
    "bag-weighted": lambda m, x, ids: F.embedding_bag(
        ids, m.table, mode="sum", per_sample_weights=x[:, 0, 0, :5], padding_idx=1
    ),
    "pairs": lambda m, x, ids: torch.bmm(x[:, 0], x[:, 1])[:, m.pairs[0], m.pairs[1]],
    "columns": lambda m, x, ids: x[:, m.pairs[0, :3] % 4],
}


@pytest.mark.parametrize("name", CASES)
def test_several_wafers_give_what_plain_torch_gives(name: str) -> None:
    values = batch()
    Traced(step_of(CASES[name]), Weights(), values).check([values], [(1, 1), (2, 1), (3, 1)])


MIXED: dict[str, Function] = {
    "conv-of-samples-as-channels": lambda m, x, ids: F.conv2d(x.transpose(0, 1)[:, :4], m.kernel2),
    "pool-over-samples": lambda m, x, ids: F.max_pool2d(x.permute(1, 2, 3, 0), 3, 1, 1),
    "group-norm-over-samples": lambda m, x, ids: F.group_norm(x.transpose(0, 1), 2),
    "padded-batch": lambda m, x, ids: F.pad(x, (0, 0, 0, 0, 0, 0, 1, 1)),
    "rolled-batch": lambda m, x, ids: x.roll(1, 0),
    "gradient-by-frequency": lambda m, x, ids: F.embedding(ids, m.table, scale_grad_by_freq=True),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_is_gathered_on_several_wafers(name: str) -> None:
    values = batch()
    traced = Traced(step_of(MIXED[name]), Weights(), values)
    traced.check([values], [(1, 1), (2, 1), (3, 1)])
    with pytest.raises(CompileError, match=r"sharding is strict: .*test_compiler_image_operations\.py:\d+"):
        traced.plan(2, strict_sharding=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x, ids: F.embedding_bag(ids.flatten(), m.table, torch.arange(0, 60, 5)), "different sizes.*padding"),
        (bag(scale_grad_by_freq=True), "scale_grad_by_freq is not supported"),
    ],
)
def test_bags_that_cannot_be_cut_are_refused(function: Function, message: str) -> None:
    with pytest.raises(TraceError, match=rf"test_compiler_image_operations\.py:\d+ embedding_bag .*{message}"):
        Traced(step_of(function), Weights(), batch())


@pytest.mark.parametrize("settings", [{"mode": "max", "sparse": True}, {"mode": "mean", "weights": True}])
def test_bags_that_torch_refuses_too(settings: dict[str, Any]) -> None:
    weights = torch.ones(BATCH, 5, dtype=torch.float64) if settings.pop("weights", False) else None
    model, (_, ids) = Weights().double(), batch()
    with pytest.raises((ValueError, NotImplementedError)):
        F.embedding_bag(ids, model.get_parameter("table"), per_sample_weights=weights, **settings)
    with pytest.raises((ValueError, NotImplementedError)):
        Traced(
            step_of(
                lambda m, x, ids: F.embedding_bag(
                    ids, m.table, per_sample_weights=None if weights is None else x[:, 0, 0, :5], **settings
                )
            ),
            Weights(),
            batch(),
        )
