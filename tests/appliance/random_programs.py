"""Random small programs, forward and backward, for the compiler: every value is an output, so that nothing cancels.

Sizes collide with the batch (12), and operations mix samples more often than a model would.
"""

import random
from collections.abc import Callable
from typing import Any

import torch
from compiled_steps import BATCH, Traced
from random_images import IMAGE_OPERATIONS
from torch import nn
from torch.nn import functional as F


class Weights(nn.Module):
    w: nn.Parameter
    v: nn.Parameter
    table: nn.Parameter
    scale: nn.Parameter
    square: nn.Parameter

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in (("w", (6, 4)), ("v", (12,)), ("table", (7, 5)), ("scale", (12,)), ("square", (12, 12))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def batch_of(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chance = random.Random(seed * 7 + 1)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, chance.choice([2, 5, 12]), chance.choice([1, 3, 4]), generator=generator)
    y = torch.randn(BATCH, chance.choice([1, 6, 12]), generator=generator)
    return x.double(), y.double(), torch.randint(0, 7, (BATCH, 4), generator=generator)


Chance = random.Random
Live = list[torch.Tensor]
# An operation of the random programs gets a value, the source of chance, all values and the batch; None: not possible.
Operation = Callable[[torch.Tensor, Chance, Live, Weights, torch.Tensor], "torch.Tensor | None"]


def dim(t: torch.Tensor, r: Chance) -> int:
    return r.randrange(t.dim())


def merged(t: torch.Tensor, r: Chance) -> torch.Tensor | None:
    if t.dim() < 2:
        return None
    d = r.randrange(t.dim() - 1)
    return t.reshape(*t.shape[:d], -1, *t.shape[d + 2 :])


def divided(t: torch.Tensor, r: Chance) -> torch.Tensor | None:
    d = dim(t, r)
    parts = [k for k in (2, 3, 4, 6) if t.shape[d] % k == 0]
    if not parts:
        return None
    k = r.choice(parts)
    sizes = (k, t.shape[d] // k) if r.random() < 0.5 else (t.shape[d] // k, k)
    return t.reshape(*t.shape[:d], *sizes, *t.shape[d + 1 :])


def part_variance(t: torch.Tensor, r: Chance) -> torch.Tensor | None:
    d = dim(t, r)
    return t.var(d, keepdim=r.random() < 0.5) if t.shape[d] > 1 else None


def first_half(t: torch.Tensor, d: int) -> torch.Tensor:
    return t.narrow(d, 0, max(1, t.shape[d] // 2))


def combined(t: torch.Tensor, other: torch.Tensor, function: Any) -> torch.Tensor | None:
    try:
        torch.broadcast_shapes(t.shape, other.shape)  # type: ignore[no-untyped-call]  # torch has no types of it
    except RuntimeError:
        return None
    result: torch.Tensor = function(t, other)
    return result


def linear(t: torch.Tensor, m: Weights) -> torch.Tensor:
    weight = m.w if t.shape[-1] == 4 else m.w[:, :1].expand(-1, t.shape[-1])
    return F.linear(t, weight, m.v[:6])


def cross_entropy(t: torch.Tensor, r: Chance, ids: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor | None:
    if t.dim() != 2 or t.shape[0] != BATCH or not 1 < t.shape[1] <= 12:
        return None
    labels = torch.where(ids[:, 1] % 3 == 0, -100, ids[:, 0] % t.shape[1])
    kept = weight[: t.shape[1]].detach().abs() if weight is not None else None
    return F.cross_entropy(t, labels, kept, reduction=r.choice(["mean", "sum"]), label_smoothing=r.choice([0.0, 0.1]))


def attention(t: torch.Tensor, r: Chance, m: Weights, ids: torch.Tensor) -> torch.Tensor | None:
    if t.dim() != 3:
        return None
    query = t[:, None] if r.random() < 0.5 else t[None] if r.random() < 0.5 else t.transpose(0, 1)[:, None]
    kind = r.choice(["all", "causal", "state", "samples"])
    mask = None
    if kind == "state":
        mask = m.square[: query.shape[2], : query.shape[2]].detach()
    elif kind == "samples" and query.shape[0] == BATCH:
        mask = (ids[:, :1] % 2 == 0)[:, None, None]
    return F.scaled_dot_product_attention(query, query * 0.5, query + 1, attn_mask=mask, is_causal=kind == "causal")


def own_elements(t: torch.Tensor, r: Chance, ids: torch.Tensor) -> torch.Tensor | None:
    if t.dim() < 2 or t.shape[0] != BATCH:
        return None
    counter = torch.arange(BATCH, device=ids.device)
    which = (ids if r.random() < 0.5 else ids[:, 0]) % t.shape[1] - t.shape[1] * r.choice([0, 1])
    return t[counter[:, None] if which.dim() == 2 else counter, which]


def token_cross_entropy(t: torch.Tensor, r: Chance, ids: torch.Tensor) -> torch.Tensor | None:
    if t.dim() != 3 or t.shape[0] != BATCH or not 1 < t.shape[1] <= 12 or t.shape[2] > 4:
        return None
    labels = torch.where(ids % 3 == 0, -100, ids % t.shape[1])[:, : t.shape[2]]
    return F.cross_entropy(t, labels, reduction=r.choice(["mean", "sum"]), label_smoothing=r.choice([0.0, 0.1]))


def padded(t: torch.Tensor, r: Chance) -> torch.Tensor:
    before = t.dim() - 1 - dim(t, r)
    return F.pad(t, [0, 0] * before + [1, 2], value=0.5)


def repeated(t: torch.Tensor, r: Chance) -> torch.Tensor:
    times = [1] * t.dim()
    times[dim(t, r)] = 2
    return t.repeat(*([3] if r.random() < 0.3 else []), *times)


def two_dims(t: torch.Tensor, function: Any) -> torch.Tensor | None:
    return function(t) if t.dim() == 2 else None


OPERATIONS: dict[str, Operation] = {
    "sum-over-samples": lambda t, r, live, m, ids: t.sum(0),
    "tanh": lambda t, r, live, m, ids: torch.tanh(t),
    "relu": lambda t, r, live, m, ids: F.relu(t),
    "gelu": lambda t, r, live, m, ids: F.gelu(t),
    "square": lambda t, r, live, m, ids: t * t,
    "root": lambda t, r, live, m, ids: (t.abs() + 1).sqrt(),
    "plus-one": lambda t, r, live, m, ids: t + 1,
    "twice": lambda t, r, live, m, ids: t * 2,
    "linear": lambda t, r, live, m, ids: linear(t, m),
    "softmax": lambda t, r, live, m, ids: F.softmax(t, dim(t, r)),
    "log-softmax": lambda t, r, live, m, ids: F.log_softmax(t, dim(t, r)),
    "layer-norm": lambda t, r, live, m, ids: (
        F.layer_norm(t, t.shape[-1:], m.v[: t.shape[-1]]) if 1 < t.shape[-1] <= 12 else None
    ),
    "transpose": lambda t, r, live, m, ids: t.transpose(dim(t, r), dim(t, r)),
    "merge": lambda t, r, live, m, ids: merged(t, r),
    "divide": lambda t, r, live, m, ids: divided(t, r),
    "sum": lambda t, r, live, m, ids: t.sum(dim(t, r), keepdim=r.random() < 0.5),
    "mean": lambda t, r, live, m, ids: t.mean(dim(t, r), keepdim=r.random() < 0.5),
    "amax": lambda t, r, live, m, ids: t.amax(dim(t, r), keepdim=r.random() < 0.5),
    "amin": lambda t, r, live, m, ids: t.amin(dim(t, r)),
    "var": lambda t, r, live, m, ids: part_variance(t, r),
    "norm": lambda t, r, live, m, ids: t / (1 + t.norm()),
    "norm-of-rows": lambda t, r, live, m, ids: torch.linalg.vector_norm(t + 2, dim=dim(t, r)),
    "mul": lambda t, r, live, m, ids: combined(t, r.choice(live), torch.mul),
    "add": lambda t, r, live, m, ids: combined(t, r.choice(live), torch.add),
    "sub": lambda t, r, live, m, ids: combined(t, r.choice(live), torch.sub),
    "cat": lambda t, r, live, m, ids: torch.cat([t, t * 2], dim(t, r)),
    "cat-over-samples": lambda t, r, live, m, ids: torch.cat([t, t * 2], 0),
    "cat-of-ones": lambda t, r, live, m, ids: torch.cat([t, torch.ones_like(t)], dim(t, r)),
    "stack": lambda t, r, live, m, ids: torch.stack([t, t + 1], dim(t, r)),
    "slice": lambda t, r, live, m, ids: first_half(t, dim(t, r)),
    "select": lambda t, r, live, m, ids: t.select(dim(t, r), -1),
    "unsqueeze": lambda t, r, live, m, ids: t.unsqueeze(dim(t, r)),
    "expand": lambda t, r, live, m, ids: t.unsqueeze(0).expand(2, *t.shape),
    "cumsum": lambda t, r, live, m, ids: t.cumsum(dim(t, r)),
    "flip": lambda t, r, live, m, ids: t.flip(dim(t, r)),
    "embedding": lambda t, r, live, m, ids: F.embedding(ids, m.table),
    "rows": lambda t, r, live, m, ids: m.table[ids[:, 0]],
    "columns": lambda t, r, live, m, ids: m.table[:, ids[:, 0] % 5],
    "where": lambda t, r, live, m, ids: torch.where(t > 0, t, live[0].mean()),
    "masked": lambda t, r, live, m, ids: t.masked_fill(t > 1, 0.5),
    "bmm": lambda t, r, live, m, ids: torch.bmm(t, t.transpose(1, 2)) if t.dim() == 3 else None,
    "gram": lambda t, r, live, m, ids: two_dims(t, lambda t: t.transpose(0, 1) @ t),
    "outer": lambda t, r, live, m, ids: two_dims(t, lambda t: t @ t.transpose(0, 1)),
    "square-matrix": lambda t, r, live, m, ids: m.square @ t if t.dim() == 2 and t.shape[0] == 12 else None,
    "mse": lambda t, r, live, m, ids: F.mse_loss(t, t.detach() * 0.5, reduction=r.choice(["mean", "sum"])),
    "bce": lambda t, r, live, m, ids: F.binary_cross_entropy(torch.sigmoid(t), torch.sigmoid(t.detach() + 1)),
    "cross-entropy": lambda t, r, live, m, ids: cross_entropy(t, r, ids, None),
    "weighted-cross-entropy": lambda t, r, live, m, ids: cross_entropy(t, r, ids, m.v),
    "center": lambda t, r, live, m, ids: t - t.mean(0, keepdim=True),
    "scaled-by-mean": lambda t, r, live, m, ids: t.mean() * t,
    "one-hot": lambda t, r, live, m, ids: (ids[..., None] == torch.arange(7, device=ids.device)).double() @ m.table,
    "gather": lambda t, r, live, m, ids: (
        t.gather(1, ids[:, :2] % t.shape[1]) if t.dim() == 2 and t.shape[0] == BATCH else None
    ),
    "argmax": lambda t, r, live, m, ids: t * t.argmax(dim(t, r), keepdim=True),
    "tril": lambda t, r, live, m, ids: t.tril() if t.dim() >= 2 else None,
    "attention": lambda t, r, live, m, ids: attention(t, r, m, ids),
    "own-elements": lambda t, r, live, m, ids: own_elements(t, r, ids),
    "token-cross-entropy": lambda t, r, live, m, ids: token_cross_entropy(t, r, ids),
    "pad": lambda t, r, live, m, ids: padded(t, r),
    "repeat": lambda t, r, live, m, ids: repeated(t, r),
    "roll": lambda t, r, live, m, ids: t.roll(1, dim(t, r)),
    "baddbmm": lambda t, r, live, m, ids: (
        torch.baddbmm(m.v[:1], t, t.transpose(1, 2), beta=0.5) if t.dim() == 3 else None
    ),
    "matrix-vector": lambda t, r, live, m, ids: two_dims(t, lambda t: t @ t.sum(0)),
    "largest": lambda t, r, live, m, ids: t.max(dim(t, r)).values,
    "log-sum-exp": lambda t, r, live, m, ids: t.logsumexp(dim(t, r)),
    "product": lambda t, r, live, m, ids: t.prod(dim(t, r)),
    "log-sigmoid": lambda t, r, live, m, ids: F.logsigmoid(t),
    "rms-norm": lambda t, r, live, m, ids: (
        F.rms_norm(t, t.shape[-1:], m.v[: t.shape[-1]]) if t.shape[-1] < 13 else None
    ),
    "write-a-slice": lambda t, r, live, m, ids: torch.slice_scatter(
        t, first_half(t, d := dim(t, r)) * 2, d, 0, max(1, t.shape[d] // 2)
    ),
    "write-a-row": lambda t, r, live, m, ids: torch.select_scatter(t, t.select(d := dim(t, r), 0) * 2, d, -1),
    "scaled-by-size": lambda t, r, live, m, ids: t * (1.0 / t.shape[0]),
    **IMAGE_OPERATIONS,
}


def program(seed: int, operations: list[str] | None = None) -> Callable[[Any], Callable[[Any], Any]]:
    """A step of two to six random operations, the gradients of what they make, and all values."""

    def build(model: Any) -> Callable[[Any], Any]:
        parameters = list(model.parameters())

        def step(batch: Any) -> Any:
            r = random.Random(seed)
            x, y, ids = batch
            live = [x * (1 + model.w[0, 0]), y + model.v[0]]
            losses: list[torch.Tensor] = []
            for _ in range(r.randint(2, 6)):
                value = r.choice(live[-3:])
                name = r.choice(operations or list(OPERATIONS))
                if value.dim() == 0 or value.numel() > 20000:
                    continue
                made = OPERATIONS[name](value, r, live, model, ids)
                if made is not None:
                    (losses if made.dim() == 0 else live).append(made)
            loss = sum((t * t.detach().cos()).sum() for t in live[-2:]) + sum(losses)
            loss.backward()
            gradients = [p.grad.clone() for p in parameters if p.grad is not None]
            for parameter in parameters:
                parameter.grad = None
            return [t.detach() for t in (loss, *gradients, *losses, *live)]

        return step

    return build


def traced_program(seed: int, operations: list[str] | None = None) -> tuple[Traced, Any]:
    batch = batch_of(seed)
    return Traced(program(seed, operations), Weights(), batch), batch
