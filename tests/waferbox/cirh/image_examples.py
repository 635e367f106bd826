"""Single operations of image models: of one, two and three dimensions, and their gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

Make = Callable[..., Any]
SIZE = 6
LETTERS = "dhw"


def image_examples(make: Make) -> Iterator[Any]:
    """`make(name, *operands, **attributes)` makes an example."""
    for spatial in (1, 2, 3):
        yield from _padding(make, spatial)
        yield from _resizing(make, spatial)
    yield from _antialiased(make)
    for spatial in (2, 3):
        yield from _adaptive_maximum(make, spatial)
    yield from _pooling_of_volumes(make)
    yield from _batch_norms(make)
    columns = {"kernel_size": [2, 2], "dilation": [1, 1], "padding": [0, 0], "stride": [2, 2]}
    yield make("im2col", image(2), **columns)
    yield make("col2im", image(2).reshape(2, 16, -1), output_size=[SIZE, SIZE], **columns)
    sampling = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": False}
    grid = torch.zeros(2, 3, 3, 2)
    yield make("grid_sampler_2d", image(2), grid, **sampling)
    gradient = torch.rand(2, 4, 3, 3)
    yield make("grid_sampler_2d_backward", gradient, image(2), grid, **sampling, output_mask=[True, True])


def image(spatial: int, size: int = SIZE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(spatial)
    return torch.rand(2, 4, *[size] * spatial, generator=generator)


def _padding(make: Make, spatial: int) -> Iterator[Any]:
    pad = [1, 2] * spatial
    for kind in ("reflection", "replication"):
        yield make(f"{kind}_pad{spatial}d", image(spatial), padding=pad)
        yield make(f"{kind}_pad{spatial}d_backward", image(spatial, SIZE + 3), image(spatial), padding=pad)


def _resizing(make: Make, spatial: int) -> Iterator[Any]:
    scales = {"scales": 2.0} if spatial == 1 else {f"scales_{letter}": 2.0 for letter in LETTERS[3 - spatial :]}
    sizes = {"output_size": [2 * SIZE] * spatial}
    back = {**sizes, "input_size": [2, 4, *[SIZE] * spatial]}
    for kind in (f"upsample_nearest{spatial}d", f"_upsample_nearest_exact{spatial}d"):
        yield make(kind, image(spatial), **sizes, **scales)
        yield make(f"{kind}_backward", image(spatial, 2 * SIZE), **back, **scales)
    smooth = {1: ["linear1d"], 2: ["bilinear2d", "bicubic2d"], 3: ["trilinear3d"]}
    for kind in smooth[spatial]:
        yield make(f"upsample_{kind}", image(spatial), **sizes, align_corners=True, **scales)
        yield make(f"upsample_{kind}_backward", image(spatial, 2 * SIZE), **back, align_corners=True, **scales)


def _antialiased(make: Make) -> Iterator[Any]:
    sizes = {"output_size": [3, 3], "align_corners": False}
    for kind in ("bilinear2d", "bicubic2d"):
        yield make(f"_upsample_{kind}_aa", image(2), **sizes)
        yield make(f"_upsample_{kind}_aa_backward", image(2, 3), **sizes, input_size=[2, 4, SIZE, SIZE])


def _adaptive_maximum(make: Make, spatial: int) -> Iterator[Any]:
    name, whole = f"adaptive_max_pool{spatial}d", image(spatial)
    indices = getattr(F, name)(whole, 3, return_indices=True)[1]
    yield make(name, whole, output_size=[3] * spatial)
    yield make(f"{name}_backward", image(spatial, 3), whole, indices)


def _pooling_of_volumes(make: Make) -> Iterator[Any]:
    whole = image(3)
    pool = {"kernel_size": [2, 2, 2], "stride": [2, 2, 2], "padding": [0, 0, 0], "ceil_mode": False}
    dilated = {**pool, "dilation": [1, 1, 1]}
    indices = F.max_pool3d(whole, 2, return_indices=True)[1]
    yield make("max_pool3d_with_indices", whole, **dilated)
    yield make("max_pool3d_with_indices_backward", image(3, 3), whole, indices, **dilated)
    yield make("avg_pool3d", whole, **pool, count_include_pad=True)
    yield make("avg_pool3d_backward", image(3, 3), whole, **pool, count_include_pad=True)
    yield make("_adaptive_avg_pool3d", whole, output_size=[3, 3, 3])
    yield make("_adaptive_avg_pool3d_backward", image(3, 3), whole)


def _batch_norms(make: Make) -> Iterator[Any]:
    """In training and in evaluation, in one element type and in two."""
    for dtype, weights in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ):
        channels = [torch.linspace(0.5, 2, 4).to(weights)] * 4
        whole = image(2).to(dtype)
        training = {"training": True, "momentum": 0.1, "eps": 1e-5}
        yield make("_native_batch_norm_legit_functional", whole, *channels, **training)
        yield make("_native_batch_norm_legit_functional", whole, *channels, **{**training, "training": False})
        yield make("_native_batch_norm_legit.no_stats", whole, *channels[:2], **training)
        yield make("_native_batch_norm_legit_no_training", whole, *channels, momentum=0.1, eps=1e-5)
        for train, given in ((True, [1, 1, 1, 0, 0, 1, 1]), (False, [1, 1, 1, 1, 1, 0, 0])):
            back = {"train": train, "eps": 1e-5, "output_mask": [True, True, True], "operand_segments": given}
            yield make("native_batch_norm_backward", whole, whole, *channels[:3], **back)
