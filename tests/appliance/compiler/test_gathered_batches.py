"""All samples with all samples: every wafer makes its rows of the products, with what the others have gathered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import CLUSTERS, Traced
from model_zoo_contrastive import Towers, clip, pairs
from torch import nn
from torch.nn import functional as F

from cstorch._internal.state import Registry, named_getters
from cstorch.optim import AdamW
from waferbox.cirh.dialect.operations import body_ops
from waferbox.cirh.text.parser import parse_module

pytestmark = pytest.mark.parity

torch.manual_seed(0)
IMAGES, TEXTS = (half.double() for half in pairs())


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def siglip(model: Any, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    of_images, of_texts = model(images, texts)
    scores = of_texts @ of_images.t() * model.scale.exp()
    signs = 2 * torch.eye(len(scores), device=scores.device, dtype=scores.dtype) - 1
    return -F.logsigmoid(signs * scores).sum(-1).mean()


def info_nce(model: Any, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    of_images, of_texts = model(images, texts)
    scores = of_images @ of_texts.t()
    return (torch.logsumexp(scores, 0) - (of_images * of_texts).sum(1)).mean()


def among_themselves(model: Any, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Samples attend to all samples."""
    of_images, _ = model(images, texts)
    return (F.softmax(of_images @ of_images.t(), -1) @ of_images).square().sum()


def over_samples(model: Any, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    of_images, of_texts = model(images, texts)
    return (F.softmax(of_images, 0) * F.log_softmax(of_texts, 0)).sum()


LOSSES = [clip, siglip, info_nce, among_themselves, over_samples]


def training(loss_of: Callable[..., torch.Tensor]) -> Any:
    def build(model: Any) -> Any:
        registry = Registry()
        optimizer = AdamW(model.parameters(), lr=0.01, eps=1e-3)
        registry.register("optimizer", optimizer)

        def step(batch: Any) -> torch.Tensor:
            loss = loss_of(model, *batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, dict(named_getters(registry))

    return build


@pytest.mark.parametrize("loss_of", LOSSES)
def test_training_gives_what_plain_torch_gives(loss_of: Any) -> None:
    batches = [(IMAGES, TEXTS), (IMAGES.flip(0), TEXTS.square())]
    Traced(training(loss_of), Towers(), batches[0]).check(batches, CLUSTERS, seeds=(0, 1, 2))


@pytest.mark.parametrize(("dtype", "wafers"), [(torch.float16, 2), (torch.float32, 3)])
def test_what_is_gathered_is_exact(dtype: torch.dtype, wafers: int) -> None:
    """Zeros are added to it, and infinities and other element types stand that."""
    batch = IMAGES.to(dtype).index_fill(0, torch.tensor([2, 7]), -torch.inf)

    def build(model: Any) -> Any:
        return lambda x: F.softmax(x, 0)

    Traced(build, nn.Module(), batch, double=False).check([batch], [(wafers, 1)], rtol=1e-6)


def test_a_value_that_is_read_twice_is_gathered_once() -> None:
    """Forward and backward pass of all images with all texts: the images travel in one group."""
    plan = Traced(training(clip), Towers(), (IMAGES, TEXTS)).plan(2)
    modules = [parse_module(kernel.cirh) for kernel in plan.wafer.kernels]
    gathers = [op for module in modules for op in body_ops(module) if op.name == "aten.index_add"]
    assert len(gathers) == 2  # the images, and the scores


def test_one_wafer_gathers_nothing() -> None:
    plan = Traced(training(clip), Towers(), (IMAGES, TEXTS)).plan(1)
    assert not any("index_add" in kernel.cirh for kernel in plan.wafer.kernels)
