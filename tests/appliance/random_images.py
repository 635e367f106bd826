"""Operations of image models for the random programs: values of any shape are taken for images where they can be."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Chance = random.Random
CHANNELS = 12  # the most that there are weights for


def image(t: torch.Tensor, r: Chance, spatial: int = 1) -> torch.Tensor | None:
    """Samples, channels, and so many dimensions; sometimes what were samples are channels."""
    if t.dim() == spatial + 1:
        t = t.unsqueeze(r.choice([0, 1, 1]))
    return t if t.dim() == spatial + 2 and t.shape[1] <= CHANNELS else None


def on_images(function: Callable[[torch.Tensor, Any], torch.Tensor], spatial: int = 1) -> Any:
    def operation(t: torch.Tensor, r: Chance, live: Any, m: Any, ids: torch.Tensor) -> torch.Tensor | None:
        taken = image(t, r, spatial)
        return None if taken is None else function(taken, m)

    return operation


def kernel(m: Any, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return m.square.reshape(-1)[:count].reshape(shape)


def statistics(m: Any, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    return m.scale[:channels].detach().clone(), m.v[:channels].detach().abs() + 0.5


def batch_norm(t: torch.Tensor, r: Chance, live: Any, m: Any, ids: torch.Tensor) -> torch.Tensor | None:
    if t.dim() < 2 or t.shape[1] > CHANNELS or t.numel() <= t.shape[1]:
        return None
    mean, variance = statistics(m, t.shape[1])
    result = F.batch_norm(t, mean, variance, m.v[: t.shape[1]], m.scale[: t.shape[1]], True, 0.3)
    live[:0] = [mean, variance]
    return result


def frozen_norm(t: torch.Tensor, r: Chance, live: Any, m: Any, ids: torch.Tensor) -> torch.Tensor | None:
    if t.dim() < 2 or t.shape[1] > CHANNELS:
        return None
    return F.batch_norm(t, *statistics(m, t.shape[1]), m.v[: t.shape[1]], m.scale[: t.shape[1]])


def instance_norm(t: torch.Tensor, m: Any) -> torch.Tensor:
    mean, variance = statistics(m, t.shape[1])
    return F.instance_norm(F.pad(t, (1, 1)), mean, variance, m.v[: t.shape[1]], m.scale[: t.shape[1]])


def group_norm(t: torch.Tensor, m: Any) -> torch.Tensor:
    groups = 2 if t.shape[1] % 2 == 0 else 1
    return F.group_norm(F.pad(t, (1, 1)), groups, m.v[: t.shape[1]], m.scale[: t.shape[1]])


def padded(t: torch.Tensor, r: Chance, live: Any, m: Any, ids: torch.Tensor) -> torch.Tensor:
    behind = t.dim() - 1 - r.randrange(t.dim())
    return F.pad(t, [0, 0] * behind + [r.choice([0, 1]), 1], value=0.5)


def bag(t: torch.Tensor, r: Chance, live: Any, m: Any, ids: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(ids, m.table, mode=r.choice(["sum", "mean", "max"]), padding_idx=r.choice([None, 2]))


def two_indices(t: torch.Tensor, r: Chance, live: Any, m: Any, ids: torch.Tensor) -> torch.Tensor | None:
    if t.dim() < 3:
        return None
    first = r.randrange(t.dim() - 1)
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 0])
    taken = (slice(None),) * first + (rows % t.shape[first], columns % t.shape[first + 1])
    return t[taken]


def overwritten(t: torch.Tensor, r: Chance, live: Any, m: Any, ids: torch.Tensor) -> torch.Tensor:
    dim = r.randrange(t.dim())
    part = torch.ones_like(t.narrow(dim, 0, (t.shape[dim] + 1) // 2))
    return torch.slice_scatter(t, part, dim, 0, part.shape[dim])


IMAGE_OPERATIONS: dict[str, Any] = {
    "convolution": on_images(lambda t, m: F.conv1d(t, kernel(m, 2, t.shape[1], 2), m.v[:2], padding=1)),
    "convolution-2d": on_images(lambda t, m: F.conv2d(t, kernel(m, 2, t.shape[1], 2, 2), padding=1, stride=2), 2),
    "depthwise": on_images(lambda t, m: F.conv1d(t, kernel(m, t.shape[1], 1, 2), padding=1, groups=t.shape[1])),
    "transposed": on_images(lambda t, m: F.conv_transpose1d(t, kernel(m, t.shape[1], 2, 3), m.v[:2], stride=2)),
    "max-pool": on_images(lambda t, m: F.max_pool1d(t, 3, 1, 1)),
    "average-pool": on_images(lambda t, m: F.avg_pool1d(t, 2, 1, 1)),
    "adaptive-average": on_images(lambda t, m: F.adaptive_avg_pool1d(t, 2)),
    "adaptive-maximum": on_images(lambda t, m: F.adaptive_max_pool1d(t, 2)),
    "power-average": on_images(lambda t, m: F.lp_pool1d(F.pad(t.abs() + 0.1, (1, 1)), 2, 2)),
    "nearest": on_images(lambda t, m: F.interpolate(t, scale_factor=2)),
    "linear-between": on_images(lambda t, m: F.interpolate(t, size=5, mode="linear")),
    "bilinear": on_images(lambda t, m: F.interpolate(t, size=(3, 5), mode="bilinear"), 2),
    "replicated-edge": on_images(lambda t, m: F.pad(t, (1, 2), mode="replicate")),
    "circle": on_images(lambda t, m: F.pad(t, (1, 1), mode="circular")),
    "unfold": on_images(lambda t, m: F.unfold(F.pad(t, (1, 1, 1, 1)), 2, stride=2), 2),
    "group-norm": on_images(group_norm),
    "batch-norm": batch_norm,
    "frozen-norm": frozen_norm,
    "instance-norm": on_images(instance_norm),
    "pad": padded,
    "roll": lambda t, r, live, m, ids: t.roll(1, r.choice([r.randrange(t.dim()), None])),
    "repeat": lambda t, r, live, m, ids: t.repeat(*[r.choice([1, 1, 2]) for _ in range(t.dim())]),
    "channel-shuffle": on_images(lambda t, m: F.channel_shuffle(torch.cat([t, t * 2], 1), 2)),
    "pixel-shuffle": on_images(lambda t, m: F.pixel_shuffle(torch.cat([t, t * 2, t, t + 1], 1), 2), 2),
    "bag": bag,
    "two-indices": two_indices,
    "overwritten": overwritten,
    "maximum-of": lambda t, r, live, m, ids: t.max(r.randrange(t.dim()), keepdim=r.random() < 0.5).values,
    "logsumexp": lambda t, r, live, m, ids: t.logsumexp(r.randrange(t.dim())),
}
