"""Examples of operations that only the vendor's client writes, and what plain torch makes of the same tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as f

Tensor = torch.Tensor
I64 = torch.int64


@dataclass
class VendorExample:
    """One operation, and the same by plain torch."""

    name: str
    operands: list[Tensor]
    attributes: dict[str, Any]
    expected: Callable[..., Any]
    constants: Sequence[int] = ()
    read: int | None = None
    types: Sequence[tuple[Sequence[int], torch.dtype]] = field(default_factory=list)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _type(tensor: Tensor) -> tuple[Sequence[int], torch.dtype]:
    return tensor.shape, tensor.dtype


def _gradients(function: Callable[..., Tensor], gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of each tensor that the function takes."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves, gradient)


def vendor_examples() -> Iterator[VendorExample]:
    """Every operation of the real dialect that our own client does not write."""
    for part in (_pointwise, _images, _norms, _picking, _slices, _annotations):
        yield from part()


def _pointwise() -> Iterator[VendorExample]:
    x, g = _random(3, 4), _random(3, 4) + 1
    y = x.sigmoid()
    yield VendorExample("SigmoidGrad", [y, g], {}, lambda y, g: g * y * (1 - y))
    for name, function, attributes in (
        ("Elu", lambda x: f.elu(x, 0.5), {"alpha": 0.5}),
        ("LeakyRelu", lambda x: f.leaky_relu(x, 0.1), {"alpha": 0.1}),
        ("HardSigmoid", f.hardsigmoid, {}),
    ):
        yield VendorExample(name, [x], attributes, function)
        yield VendorExample(
            f"{name}Grad", [g, x], attributes, lambda g, x, function=function: _gradients(function, g, x)[0]
        )
    yield VendorExample("Softplus", [x], {"beta": 2.0, "threshold": 20.0}, lambda x: f.softplus(x, 2.0))
    small = torch.tensor([[-3, 0, 127, -128]], dtype=torch.int8)
    wide = [((1, 4), torch.int32)]
    yield VendorExample("ExtSI", [small], {}, lambda x: x.int(), types=wide)
    yield VendorExample("ExtUI", [small], {}, lambda x: x.view(torch.uint8).int(), types=wide)
    yield VendorExample("ExtUI", [small > 0], {}, lambda x: x.int(), types=wide)
    labels = _random(3, 4).softmax(1)
    yield VendorExample(
        "SoftmaxCrossEntropyWithLogits",
        [x, labels],
        {"axis": 1},
        lambda x, y: (f.cross_entropy(x, y, reduction="none"), x.softmax(1) - y),
    )


def _images() -> Iterator[VendorExample]:
    for rank, layout in ((3, "NCW"), (4, "NCHW"), (5, "NCDHW")):
        count = rank - 2
        image, kernel = _random(2, 4, *[5] * count), _random(6, 2, *[3] * count)
        settings = {"stride": [2] * count, "padding": [1] * count, "dilation": [1] * count, "groups": 2}
        attributes = {**settings, "data_format": layout}
        convolve = getattr(f, f"conv{count}d")

        def function(x: Tensor, w: Tensor, convolve: Any = convolve, settings: Any = settings) -> Tensor:
            return convolve(x, w, None, **settings)

        output = function(image, kernel)
        gradient = torch.ones_like(output) * 0.5
        made = _gradients(function, gradient, image, kernel)
        for direction, operands, expected in (
            ("FWD", [image, kernel], output),
            ("BWD_INPUT", [gradient, kernel], made[0]),
            ("BWD_KERNEL", [image, gradient], made[1]),
        ):
            more = {"transposed": True} if direction == "BWD_INPUT" else {}
            yield VendorExample(
                "Convolution",
                operands,
                {**attributes, **more, "conv_pass_direction": direction},
                lambda *_, expected=expected: expected,
                types=[_type(expected)],
            )
    value, bias = _random(2, 3, 4), _random(3)
    yield VendorExample("BiasAdd", [value, bias], {"dim": 1}, lambda x, b: x + b[:, None], types=[_type(value)])
    yield VendorExample("BiasAddGrad", [value], {"dim": 1}, lambda x: x.sum((0, 2)), types=[((3,), torch.float32)])
    yield from _pools()


def _pools() -> Iterator[VendorExample]:
    image = _random(2, 3, 1, 6, 6)
    pools: list[tuple[str, int, Callable[[Tensor], Tensor]]] = [
        ("MAX", 0, lambda x: f.max_pool3d(x, (1, 2, 2), (1, 2, 2))),
        ("MAX", 1, lambda x: f.max_pool3d(x, (1, 2, 2), (1, 2, 2), (0, 1, 1))),
        ("AVERAGE", 0, lambda x: f.avg_pool3d(x, (1, 2, 2), (1, 2, 2))),
    ]
    for kind, pad, pool in pools:
        attributes = {
            "data_format": "NCDHW",
            "dilation": [1] * 5,
            "ksize": [1, 1, 1, 2, 2],
            "strides": [1, 1, 1, 2, 2],
            "padding": [0] * 6 + [pad] * 4,
            "pool_type": kind,
        }
        made = pool(image)
        yield VendorExample("Pool", [image, image], attributes, lambda x, _, pool=pool: pool(x), types=[_type(made)])
        gradient = torch.arange(made.numel()).reshape(made.shape).float()
        yield VendorExample(
            "Pool",
            [image, gradient],
            {**attributes, "gradient": True},
            lambda x, g, pool=pool: _gradients(pool, g, x)[0],
            types=[_type(image)],
        )


def _norms() -> Iterator[VendorExample]:
    image, scale, offset = _random(4, 6, 3, 3), _random(6), _random(6) + 1
    mean, variance = _random(6), _random(6) ** 2 + 0.5
    attributes = {"data_format": "NCHW", "epsilon": 1e-3}
    types = [_type(image), _type(scale), _type(scale)]
    operands = [image, scale, offset, mean, variance]

    def trained(x: Tensor, scale: Tensor, offset: Tensor, *_: Tensor) -> Tensor:
        return f.batch_norm(x, None, None, scale, offset, True, 0.0, 1e-3)

    yield VendorExample("FusedBatchNorm", operands, {**attributes, "is_training": True}, trained, read=1, types=types)
    yield VendorExample(
        "FusedBatchNorm",
        operands,
        {**attributes, "is_training": False},
        lambda x, s, o, m, v: f.batch_norm(x, m, v, s, o, False, 0.0, 1e-3),
        read=1,
        types=types,
    )
    gradient = _random(4, 6, 3, 3) * 2
    yield VendorExample(
        "FusedBatchNormGrad",
        [gradient, image, scale],
        {**attributes, "is_training": True},
        lambda g, x, s: _gradients(trained, g, x, s, torch.zeros(6)),
        types=types,
    )

    def grouped(x: Tensor, *weights: Tensor) -> Tensor:
        scale, offset = weights or (None, None)
        return f.group_norm(x, 3, scale, offset, eps=1e-3)

    attributes = {**attributes, "num_groups": 3}
    yield VendorExample("GroupNorm", [image, scale, offset], attributes, grouped)
    yield VendorExample("GroupNorm", [image], attributes, grouped)
    yield VendorExample(
        "GroupNormGrad",
        [gradient, image, scale],
        attributes,
        lambda g, x, s: _gradients(grouped, g, x, s, torch.zeros(6)),
    )


def _picking() -> Iterator[VendorExample]:
    x, at = _random(3, 5, 2), torch.tensor([[0, 4], [3, 3], [1, 2]])
    yield VendorExample("Gather", [x, at], {"axis": 1, "batch_dims": 0, "is_sparse": False}, lambda x, at: x[:, at])
    yield VendorExample(
        "Gather", [x, at.int()], {"axis": 1, "batch_dims": 1}, lambda x, at: x[torch.arange(3)[:, None], at.long()]
    )
    wide = _random(3, 2, 5, 2)
    yield VendorExample(
        "Gather",
        [wide, at],
        {"axis": 2, "batch_dims": 1},
        lambda x, at: torch.stack([row[:, places] for row, places in zip(x, at, strict=True)]),
    )
    places = torch.tensor([[[0], [4]], [[3], [3]]])
    yield VendorExample("Gather", [x, places], {"axis": 1}, lambda x, i: x.gather(1, i), types=[((2, 2, 1), x.dtype)])
    yield VendorExample("GatherNd", [x, at % 3], {}, lambda x, at: x[at[:, 0], at[:, 1]])
    yield VendorExample("GatherNd", [x, at[:, :1]], {"start_dim": 1}, lambda x, at: x[torch.arange(3), at[:, 0]])
    base, places, rows = _random(3, 5), torch.tensor([[0, 4], [3, 3], [1, 2]]), _random(3, 2)
    for kind, reduction in (("ADD", "sum"), ("MUL", "prod"), ("MAX", "amax"), ("MIN", "amin")):
        yield VendorExample(
            "Scatter",
            [base, places, rows],
            {"axis": 1, "reduce_kind": kind},
            lambda x, at, u, reduction=reduction: x.scatter_reduce(1, at, u, reduction),
        )
    yield VendorExample(
        "Scatter",
        [base, places.int().sort(1, descending=True).values[:, :1], rows[:, :1]],
        {"axis": 1, "reduce_kind": "NONE"},
        lambda x, at, u: x.scatter(1, at.long(), u),
    )
    for largest in (True, False):
        attributes = {"dimension": 1, "k": 3, "largest": largest, "sorted": True}
        types = [((3, 3, 2), torch.float32), ((3, 3, 2), I64)]
        yield VendorExample("TopK", [x], attributes, lambda x, largest=largest: x.topk(3, 1, largest), types=types)
    yield VendorExample(
        "OneHot",
        [at, torch.tensor(5), torch.tensor(2.0), torch.tensor(-1.0), torch.tensor(-1)],
        {},
        lambda at: f.one_hot(at, 5) * 3.0 - 1.0,
        constants=[1, 2, 3, 4],
    )
    yield VendorExample(
        "OneHot",
        [at, torch.tensor(5), torch.tensor(1), torch.tensor(0), torch.tensor(1)],
        {},
        lambda at: f.one_hot(at, 5).movedim(-1, 1),
        constants=[1, 2, 3, 4],
    )


def _slices() -> Iterator[VendorExample]:
    x = _random(4, 5)
    for name, function in (("CumSum", torch.cumsum), ("CumProd", torch.cumprod)):
        yield VendorExample(name, [x], {"axis": 1}, lambda x, function=function: function(x, 1))
        yield VendorExample(
            name, [x], {"axis": 0, "reverse": True}, lambda x, function=function: function(x.flip(0), 0).flip(0)
        )
    yield VendorExample("CumSum", [x], {"axis": 1, "exclusive": True}, lambda x: torch.cumsum(x, 1) - x)
    yield VendorExample(
        "CumSum",
        [torch.arange(6).reshape(2, 3)],
        {"axis": 1, "exclusive": True, "reverse": True},
        lambda x: x.flip(1).cumsum(1).flip(1) - x,
    )
    for low, high, between in (([0, 1], [0, 3], [0, 0]), ([0, -1], [1, -2], [0, 0]), ([0, 0], [0, 1], [0, 1])):
        yield VendorExample(
            "pad",
            [x],
            {
                "edge_padding_low": low,
                "edge_padding_high": high,
                "interior_padding": between,
                "constant_values": [1.5, 1.5],
                "padding_mode": "CONSTANT",
            },
            lambda x, low=low, high=high, between=between: _padded(x, low, high, between),
        )
    yield VendorExample("unpad", [x], {"edge_unpadding_high": [1, 2]}, lambda x: x[:3, :3])
    number = torch.tensor
    yield VendorExample("Slice", [x, number([0, 1]), number([-1, 3])], {}, lambda x: x[:, 1:4], constants=[1, 2])
    begin, end, steps = number([3, 1]), number([0, 4]), number([1, 2])
    masks = {"begin_mask": 0, "end_mask": 2, "shrink_axis_mask": 1}
    yield VendorExample("StridedSlice", [x, begin, end, steps], masks, lambda x: x[3, 1::2], constants=[1, 2, 3])
    whole = number([4, 5])
    yield VendorExample(
        "StridedSliceGrad",
        [whole, begin, end, steps, number([1.0, 2.0])],
        masks,
        lambda g: torch.zeros(4, 5).index_put((number([3, 3]), number([1, 3])), g),
        constants=[0, 1, 2, 3],
    )
    yield VendorExample("Repeat", [x], {"repeats": [2, 1, 3]}, lambda x: x.repeat(2, 1, 3))
    yield VendorExample("MatrixBandPart", [x, number(1), number(-1)], {}, lambda x: x.triu(-1), constants=[1, 2])
    yield VendorExample("MatrixBandPart", [x, number(0), number(2)], {}, lambda x: x.triu(0).tril(2), constants=[1, 2])


def _padded(x: Tensor, low: list[int], high: list[int], between: list[int]) -> Tensor:
    """Element by element."""
    made = x
    for dim in (0, 1):
        rows: list[Tensor] = []
        fill = torch.full_like(made.select(dim, 0), 1.5)
        for row in made.unbind(dim):
            rows += [row, *[fill] * between[dim]]
        rows = rows[: len(rows) - between[dim]]
        rows = [fill] * low[dim] + rows + [fill] * high[dim]
        made = torch.stack(rows[max(0, -low[dim]) : len(rows) - max(0, -high[dim])], dim)
    return made


def _annotations() -> Iterator[VendorExample]:
    x, y = _random(3, 4), _random(2)
    mesh = {"split_axes": [-1, 0], "names": "InnerDimension"}
    for name, attributes in (
        ("AnnotateTensor", {"tensor_annotation": "note"}),
        ("ConstrainValueLayout", {}),
        ("DeviceToDeviceTransfer", {"dst_device": "WSE"}),
        ("MeshAllGather", {"gather_axes": [1]}),
        ("MeshAllSlice", mesh),
        ("MeshShard", {**mesh, "mesh_id": 0, "partial_axes": []}),
        ("MeshToMeshTransfer", {"srcMeshId": 0, "dstMeshId": 1}),
        ("RefillRecomputeConstraint", {}),
        ("ScopeBoundary", {"boundary_type": "begin", "scope_name": "layer"}),
        ("TagGradient", {"shared_name": "weight"}),
    ):
        yield VendorExample(name, [x], attributes, lambda x: x)
    yield VendorExample("SerializeBarrier", [x, y], {}, lambda x, y: (x, y))
