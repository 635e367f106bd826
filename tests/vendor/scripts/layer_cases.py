"""Small models over torch.nn, each with what it takes: what `trace_layers.py` runs by the vendor's client."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BATCH, STEPS = 8, 3


@dataclass
class Case:
    """A model, or a function of its inputs, and the shapes (without the batch) and types of these."""

    make: object  # () -> nn.Module, whose forward takes the inputs
    inputs: list = field(default_factory=lambda: [((6,), "float32")])
    trains: bool = True  # the step has a backward pass and an update
    evaluates: bool = False  # the model is in evaluation
    shows: bool = False  # the step's outputs have what the model makes
    high: int = 5  # of integer inputs


class Applied(nn.Module):
    """A function of the inputs."""

    def __init__(self, function, *parts):
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs):
        return self.function(*inputs, *self.parts)


def of(function, *shape, dtype="float32", **more):
    """A case of a function of one input."""
    return Case(lambda: Applied(function), [(shape or (6,), dtype)], **more)


def layer(make, *shape, **more):
    """A case of a module of one input."""
    return Case(make, [(shape or (6,), "float32")], **more)


def two(function, first, second, dtype="float32", **more):
    """A case of a function of two inputs; the type is the second's."""
    return Case(lambda: Applied(function), [(first, "float32"), (second, dtype)], **more)


CASES = {}

# Convolutions. The channels are 4, to 8.
_SHAPES = {1: (4, 9), 2: (4, 9, 8), 3: (4, 5, 6, 5)}
_SETTINGS = {
    "": {},
    "_padding": {"padding": 1},
    "_stride": {"stride": 2},
    "_stride_padding": {"stride": 2, "padding": 1},
    "_dilation": {"dilation": 2, "padding": 1},
    "_groups": {"groups": 2, "padding": 1},
    "_depthwise": {"groups": 4},
    "_no_bias": {"bias": False},
    "_same": {"padding": "same"},
    "_reflect": {"padding": 1, "padding_mode": "reflect"},
    "_circular": {"padding": 1, "padding_mode": "circular"},
}
for _rank, _shape in _SHAPES.items():
    for _name, _settings in _SETTINGS.items():
        if _rank == 3 and _name in ("_reflect", "_circular", "_same"):
            continue
        CASES[f"conv{_rank}d{_name}"] = layer(
            lambda r=_rank, s=_settings: getattr(nn, f"Conv{r}d")(4, 8, 3, **s), *_shape
        )
    for _name, _settings in {
        "": {},
        "_stride_padding": {"stride": 2, "padding": 1},
        "_output_padding": {"stride": 2, "padding": 1, "output_padding": 1},
        "_dilation": {"dilation": 2},
        "_groups": {"groups": 2},
        "_no_bias": {"bias": False},
    }.items():
        CASES[f"conv_transpose{_rank}d{_name}"] = layer(
            lambda r=_rank, s=_settings: getattr(nn, f"ConvTranspose{r}d")(4, 8, 3, **s), *_shape
        )
for _name, _settings in _SETTINGS.items():
    # The client cannot lower the gradients of these.
    CASES[f"forward_conv1d{_name}"] = layer(lambda s=_settings: nn.Conv1d(4, 8, 3, **s), 4, 9, trains=False)
CASES["conv2d_oblong"] = layer(lambda: nn.Conv2d(4, 8, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), 4, 9, 8)
CASES["conv2d_1x1"] = layer(lambda: nn.Conv2d(4, 8, 1), 4, 5, 5)
CASES["conv2d_even_same"] = layer(lambda: nn.Conv2d(4, 8, 4, padding="same"), 4, 8, 8)

# Pooling.
for _kind in ("max", "avg"):
    for _rank in (1, 2, 3):
        _pool = getattr(F, f"{_kind}_pool{_rank}d")
        for _name, _settings in {
            "": {},
            "_stride": {"stride": 1},
            "_padding": {"stride": 2, "padding": 1},
            "_ceil": {"stride": 2, "ceil_mode": True},
        }.items():
            CASES[f"{_kind}_pool{_rank}d{_name}"] = of(
                lambda x, p=_pool, s=_settings: p(x, 3 if s else 2, **s),
                *{1: (4, 8), 2: (4, 8, 9), 3: (2, 4, 6, 5)}[_rank],
            )
CASES["max_pool2d_dilation"] = of(lambda x: F.max_pool2d(x, 2, dilation=2), 4, 9, 9)
CASES["max_pool2d_dilation_stride"] = of(lambda x: F.max_pool2d(x, 3, stride=1, dilation=2), 4, 9, 9)
CASES["max_pool2d_default_ceil"] = of(lambda x: F.max_pool2d(x, 2, ceil_mode=True), 4, 7, 9)
CASES["max_pool2d_oblong"] = of(lambda x: F.max_pool2d(x, (2, 3), stride=(1, 2), padding=(0, 1)), 4, 8, 9)
CASES["max_pool2d_indices"] = of(lambda x: F.max_pool2d(x, 2, return_indices=True)[0], 4, 8, 8)
CASES["avg_pool2d_no_count"] = of(lambda x: F.avg_pool2d(x, 3, 2, padding=1, count_include_pad=False), 4, 8, 8)
CASES["avg_pool2d_divisor"] = of(lambda x: F.avg_pool2d(x, 2, divisor_override=3), 4, 8, 8)
CASES["avg_pool2d_global"] = of(lambda x: F.avg_pool2d(x, 8), 4, 8, 8)
CASES["adaptive_avg_pool1d"] = of(lambda x: F.adaptive_avg_pool1d(x, 2), 4, 8)
CASES["adaptive_avg_pool2d_1"] = of(lambda x: F.adaptive_avg_pool2d(x, 1), 4, 8, 8)
CASES["adaptive_avg_pool2d"] = of(lambda x: F.adaptive_avg_pool2d(x, (2, 4)), 4, 8, 8)
CASES["adaptive_avg_pool2d_uneven"] = of(lambda x: F.adaptive_avg_pool2d(x, 3), 4, 8, 8)
CASES["adaptive_max_pool1d"] = of(lambda x: F.adaptive_max_pool1d(x, 2), 4, 8)
CASES["adaptive_max_pool2d"] = of(lambda x: F.adaptive_max_pool2d(x, 2), 4, 8, 8)
CASES["lp_pool2d"] = of(lambda x: F.lp_pool2d(x.abs() + 1, 2, 2), 4, 8, 8)
CASES["batch_norm_then_max_pool"] = layer(
    lambda: Applied(lambda x, n: F.max_pool2d(n(x), 2), nn.BatchNorm2d(4)), 4, 8, 8
)

# Norms.
for _rank, _shape in {1: (4, 5), 2: (4, 5, 6), 3: (4, 3, 4, 5)}.items():
    _norm = getattr(nn, f"BatchNorm{_rank}d")
    CASES[f"batch_norm{_rank}d"] = layer(lambda n=_norm: n(4), *_shape)
    CASES[f"batch_norm{_rank}d_plain"] = layer(lambda n=_norm: n(4, affine=False), *_shape)
    CASES[f"batch_norm{_rank}d_untracked"] = layer(lambda n=_norm: n(4, track_running_stats=False), *_shape)
    CASES[f"batch_norm{_rank}d_evaluates"] = layer(lambda n=_norm: n(4), *_shape, evaluates=True)
    CASES[f"batch_norm{_rank}d_frozen"] = layer(lambda n=_norm: Frozen(n(4)), *_shape)
    _norm = getattr(nn, f"InstanceNorm{_rank}d")
    CASES[f"instance_norm{_rank}d"] = layer(lambda n=_norm: n(4), *_shape)
    CASES[f"instance_norm{_rank}d_affine"] = layer(lambda n=_norm: n(4, affine=True), *_shape)
    CASES[f"group_norm_rank{_rank + 2}"] = layer(lambda: nn.GroupNorm(2, 4), *_shape)
    CASES[f"group_norm_rank{_rank + 2}_plain"] = layer(lambda: nn.GroupNorm(2, 4, affine=False), *_shape)
CASES["batch_norm1d_of_rows"] = layer(lambda: nn.BatchNorm1d(6), 6)
CASES["batch_norm1d_momentum"] = layer(lambda: nn.BatchNorm1d(6, momentum=0.3, eps=1e-3), 6)
CASES["group_norm_rank2"] = layer(lambda: nn.GroupNorm(2, 6), 6)
CASES["group_norm_one"] = layer(lambda: nn.GroupNorm(1, 4), 4, 5, 6)
CASES["group_norm_all"] = layer(lambda: nn.GroupNorm(4, 4), 4, 5, 6)
CASES["layer_norm"] = layer(lambda: nn.LayerNorm(6), 3, 6)
CASES["layer_norm_two"] = layer(lambda: nn.LayerNorm((3, 6)), 3, 6)
CASES["layer_norm_plain"] = layer(lambda: nn.LayerNorm(6, elementwise_affine=False), 3, 6)
CASES["layer_norm_no_bias"] = layer(lambda: nn.LayerNorm(6, bias=False), 3, 6)
CASES["rms_norm"] = layer(lambda: nn.RMSNorm(6), 3, 6)
CASES["rms_norm_plain"] = layer(lambda: nn.RMSNorm(6, elementwise_affine=False), 3, 6)
CASES["local_response_norm"] = layer(lambda: nn.LocalResponseNorm(2), 4, 5, 5)
CASES["normalize"] = of(lambda x: F.normalize(x, dim=-1))
CASES["cosine_similarity"] = two(lambda x, y: F.cosine_similarity(x, y), (6,), (6,))
CASES["weight_norm"] = layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), 6)
CASES["spectral_norm_frozen"] = layer(
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), 6, evaluates=True
)


class Frozen(nn.Module):
    """A norm that keeps its statistics while the rest trains."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.norm(x)


# Activations.
for _name in [
    "relu",
    "relu6",
    "silu",
    "gelu",
    "mish",
    "tanh",
    "sigmoid",
    "logsigmoid",
    "softplus",
    "softsign",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "hardshrink",
    "softshrink",
    "tanhshrink",
    "threshold",
]:
    _function = getattr(F, _name)
    CASES[_name] = of(
        (lambda x, f=_function: f(x, 0.1, 20.0)) if _name == "threshold" else lambda x, f=_function: f(x * 3)
    )
CASES["gelu_tanh"] = of(lambda x: F.gelu(x, approximate="tanh"))
CASES["prelu"] = layer(lambda: nn.PReLU(4), 4, 5)
CASES["glu"] = of(lambda x: F.glu(x, -1))
CASES["softmax"] = of(lambda x: F.softmax(x, 1), 4, 5)
CASES["softmin"] = of(lambda x: F.softmin(x, -1), 4, 5)
CASES["log_softmax"] = of(lambda x: F.log_softmax(x, -1), 4, 5)
CASES["logsumexp"] = of(lambda x: torch.logsumexp(x, -1), 4, 5)
CASES["dropout_evaluates"] = layer(lambda: nn.Dropout(0.5), 6, evaluates=True)
CASES["dropout_zero"] = layer(lambda: nn.Dropout(0.0), 6)

# Losses. The model returns them, and the step takes their mean.
for _name in [
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
]:
    _loss = getattr(F, _name)
    CASES[_name] = two(lambda x, y, f=_loss: f(x, y.sign() if "margin" in f.__name__ else y), (6,), (6,))
CASES["binary_cross_entropy"] = two(lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), (6,), (6,))
CASES["bce_pos_weight"] = two(
    lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=torch.full_like(x[0], 2.0)), (6,), (6,)
)
CASES["kl_div"] = two(lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"), (6,), (6,))
CASES["kl_div_log"] = two(
    lambda x, y: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="batchmean", log_target=True), (6,), (6,)
)
CASES["cross_entropy"] = two(lambda x, y: F.cross_entropy(x, y.long()), (6,), (), "int32")
CASES["cross_entropy_int64"] = two(lambda x, y: F.cross_entropy(x, y), (6,), (), "int64")
CASES["cross_entropy_smooth"] = two(lambda x, y: F.cross_entropy(x, y.long(), label_smoothing=0.1), (6,), (), "int32")
CASES["cross_entropy_ignore"] = two(lambda x, y: F.cross_entropy(x, y.long(), ignore_index=2), (6,), (), "int32")
CASES["cross_entropy_weight"] = two(
    lambda x, y: F.cross_entropy(x, y.long(), weight=torch.arange(1.0, 7.0, device=x.device)), (6,), (), "int32"
)
CASES["cross_entropy_images"] = two(lambda x, y: F.cross_entropy(x, y.long()), (5, 4, 3), (4, 3), "int32")
CASES["cross_entropy_sum"] = two(lambda x, y: F.cross_entropy(x, y.long(), reduction="sum"), (6,), (), "int32")
CASES["cross_entropy_none"] = two(lambda x, y: F.cross_entropy(x, y.long(), reduction="none"), (6,), (), "int32")
CASES["cross_entropy_probabilities"] = two(lambda x, y: F.cross_entropy(x, y.softmax(-1)), (6,), (6,))
CASES["nll_loss"] = two(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y.long()), (6,), (), "int32")
CASES["nll_loss_images"] = two(lambda x, y: F.nll_loss(F.log_softmax(x, 1), y.long()), (5, 4, 3), (4, 3), "int32")
CASES["multi_margin_loss"] = two(lambda x, y: F.multi_margin_loss(x, y.long()), (6,), (), "int32")
CASES["hinge_embedding_loss"] = two(lambda x, y: F.hinge_embedding_loss(x, y.sign()), (6,), (6,))
CASES["cosine_embedding_loss"] = two(lambda x, y: F.cosine_embedding_loss(x, y, torch.ones_like(x[:, 0])), (6,), (6,))
CASES["triplet_margin_loss"] = two(lambda x, y: F.triplet_margin_loss(x, y, y.flip(-1)), (6,), (6,))
CASES["poisson_nll_loss"] = two(lambda x, y: F.poisson_nll_loss(x, y.abs()), (6,), (6,))
CASES["gaussian_nll_loss"] = two(lambda x, y: F.gaussian_nll_loss(x, y, torch.ones_like(x)), (6,), (6,))

# Embeddings.
for _type in ("int16", "int32", "int64"):
    CASES[f"embedding_{_type}"] = Case(lambda: nn.Embedding(7, 4), [((3,), _type)])
CASES["embedding_padding"] = Case(lambda: nn.Embedding(7, 4, padding_idx=1), [((3,), "int32")])
CASES["embedding_bag"] = Case(lambda: nn.EmbeddingBag(7, 4, mode="mean"), [((3,), "int32")])
CASES["embedding_tied"] = Case(
    lambda: Applied(lambda x, e: F.linear(e(x), e.weight), nn.Embedding(7, 4)), [((3,), "int32")]
)
CASES["embedding_of_one"] = Case(lambda: nn.Embedding(7, 4), [((), "int32")])

# Types of inputs, which are used as numbers.
for _type in ["uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float64"]:
    CASES[f"input_{_type}"] = Case(lambda: Applied(lambda x, inner: inner(x.float()), nn.Linear(6, 4)), [((6,), _type)])
CASES["input_mask"] = two(lambda x, y: x.masked_fill(y, 0.5), (6,), (6,), "bool")
CASES["input_int_add"] = two(lambda x, y: x + y, (6,), (6,), "int32")
CASES["input_uint8_mask"] = two(lambda x, y: x * (y > 2), (6,), (6,), "uint8")

# Linear layers, products.
CASES["linear"] = layer(lambda: nn.Linear(6, 4), 6)
CASES["linear_rank3"] = layer(lambda: nn.Linear(6, 4), 3, 6)
CASES["linear_rank4"] = layer(lambda: nn.Linear(6, 4, bias=False), 2, 3, 6)
CASES["bilinear"] = Case(lambda: nn.Bilinear(6, 5, 4), [((6,), "float32"), ((5,), "float32")])
CASES["bmm"] = two(torch.bmm, (3, 4), (4, 5))
CASES["matmul_rank4"] = two(lambda x, y: x @ y, (2, 3, 4), (2, 4, 5))
CASES["matmul_broadcast"] = two(lambda x, y: x @ y.unsqueeze(1), (2, 3, 4), (4, 5))
CASES["matmul_vector"] = two(lambda x, y: x @ y[0], (3, 4), (4,))
CASES["baddbmm"] = Case(
    lambda: Applied(lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5, alpha=2.0)),
    [((3, 5), "float32"), ((3, 4), "float32"), ((4, 5), "float32")],
)
for _name, _equation, _first, _second in (
    ("outer", "bi,bj->bij", (3,), (4,)),
    ("rows", "bij,bjk->bik", (3, 4), (4, 5)),
    ("heads", "bqhd,bkhd->bhqk", (3, 2, 4), (5, 2, 4)),
    ("sum", "bij,bij->b", (3, 4), (3, 4)),
    ("transposed", "bij,bkj->bki", (3, 4), (5, 4)),
    ("three", "bijk,bkl->bijl", (2, 3, 4), (4, 5)),
):
    CASES[f"einsum_{_name}"] = two(lambda x, y, e=_equation: torch.einsum(e, x, y), _first, _second)

# Attention, recurrence.
CASES["sdpa"] = of(lambda x: F.scaled_dot_product_attention(x, x, x), 2, 5, 4)
CASES["sdpa_causal"] = of(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), 2, 5, 4)
CASES["multihead_attention"] = layer(
    lambda: Applied(lambda x, a: a(x, x, x, need_weights=False)[0], nn.MultiheadAttention(8, 2, batch_first=True)), 5, 8
)
CASES["multihead_attention_weights"] = layer(
    lambda: Applied(lambda x, a: a(x, x, x)[1], nn.MultiheadAttention(8, 2, batch_first=True)), 5, 8
)
CASES["transformer_layer"] = layer(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 5, 8)
CASES["transformer_layer_first"] = layer(
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"),
    5,
    8,
)
for _name in ("RNNCell", "LSTMCell", "GRUCell"):
    CASES[_name.lower()] = layer(
        lambda n=_name: Applied(lambda x, c: c(x) if n != "LSTMCell" else c(x)[0], getattr(nn, n)(6, 4)), 6
    )
for _name in ("RNN", "LSTM", "GRU"):
    CASES[_name.lower()] = layer(
        lambda n=_name: Applied(lambda x, c: c(x)[0], getattr(nn, n)(6, 4, batch_first=True)), 3, 6
    )

# Shapes, padding, resizing.
for _mode in ("constant", "reflect", "replicate", "circular"):
    CASES[f"pad1d_{_mode}"] = of(lambda x, m=_mode: F.pad(x, (2, 1), mode=m), 4, 6)
    CASES[f"pad2d_{_mode}"] = of(lambda x, m=_mode: F.pad(x, (2, 1, 0, 1), mode=m), 4, 5, 6)
CASES["pad_value"] = of(lambda x: F.pad(x, (2, 1), value=1.5), 4, 6)
CASES["pad_negative"] = of(lambda x: F.pad(x, (-1, 2)), 4, 6)
for _mode in ("nearest", "bilinear", "bicubic", "area"):
    CASES[f"interpolate_{_mode}"] = of(lambda x, m=_mode: F.interpolate(x, scale_factor=2, mode=m), 4, 3, 4)
CASES["interpolate_corners"] = of(lambda x: F.interpolate(x, size=(5, 7), mode="bilinear", align_corners=True), 4, 3, 4)
CASES["interpolate_linear"] = of(lambda x: F.interpolate(x, scale_factor=2, mode="linear"), 4, 5)
CASES["interpolate_nearest1d"] = of(lambda x: F.interpolate(x, scale_factor=2), 4, 5)
CASES["pixel_shuffle"] = of(lambda x: F.pixel_shuffle(x, 2), 4, 3, 4)
CASES["pixel_unshuffle"] = of(lambda x: F.pixel_unshuffle(x, 2), 2, 4, 6)
CASES["unfold"] = of(lambda x: F.unfold(x, 2), 2, 4, 5)
CASES["fold"] = of(lambda x: F.fold(x, (4, 5), 2), 8, 12)
CASES["channel_shuffle"] = of(lambda x: F.channel_shuffle(x, 2), 4, 3, 3)
CASES["tensor_unfold"] = of(lambda x: x.unfold(1, 3, 2), 7)
for _name, _function in {
    "permute": lambda x: x.permute(0, 3, 1, 2),
    "transpose": lambda x: x.transpose(1, 3).contiguous(),
    "flip": lambda x: x.flip(2),
    "flip_two": lambda x: x.flip(1, 3),
    "roll": lambda x: x.roll(1, 2),
    "roll_two": lambda x: x.roll((1, -2), (2, 3)),
    "chunk": lambda x: torch.cat(x.chunk(2, 3)[::-1], 3),
    "split_uneven": lambda x: x.split([1, 3], 3)[1],
    "stack": lambda x: torch.stack([x, x * 2], 2),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "repeat": lambda x: x.repeat(1, 2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "tile": lambda x: x.tile(2, 1),
    "unflatten": lambda x: x.flatten(1).unflatten(1, (6, 4)),
    "squeeze": lambda x: x[:, :1].squeeze(1).unsqueeze(-1),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "slice": lambda x: x[:, :, 1:],
    "slice_step": lambda x: x[:, :, :, ::2],
    "slice_negative": lambda x: x[..., -2:],
    "select": lambda x: x[:, 1],
    "select_last": lambda x: x[..., -1],
    "index_list": lambda x: x[:, :, [2, 0, 0]],
    "index_select": lambda x: x.index_select(3, torch.tensor([1, 3, 1], device=x.device)),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "diagonal": lambda x: x.diagonal(0, 2, 3),
    "movedim": lambda x: x.movedim(1, 3),
    "assign": lambda x: _assign(x),
}.items():
    CASES[_name] = of(_function, 2, 3, 4)


def _assign(x):
    made = torch.zeros_like(x)
    made[:, :, 1] = x[:, :, 0] * 2
    return made


# Picking.
CASES["gather"] = two(lambda x, i: x.gather(1, i.long()), (6,), (4,), "int32")
CASES["gather_rank3"] = two(lambda x, i: x.gather(2, i.long()), (2, 6), (2, 4), "int32")
CASES["scatter"] = two(lambda x, i: torch.zeros_like(x).scatter(1, i.long()[:, :1], x[:, :1]), (6,), (4,), "int32")
CASES["scatter_add"] = two(lambda x, i: torch.zeros_like(x).scatter_add(1, i.long(), x[:, :4]), (6,), (4,), "int32")
CASES["take_along_dim"] = two(lambda x, i: torch.take_along_dim(x, i.long(), 1), (6,), (4,), "int32")
CASES["index_rows"] = two(lambda x, i: x[torch.arange(BATCH, device=x.device), i.long()], (6,), (), "int32")
CASES["where"] = of(lambda x: torch.where(x > 0, x, x * 0.1))
CASES["masked_fill"] = of(lambda x: x.masked_fill(x > 0.5, 0.0))
CASES["one_hot"] = two(lambda x, i: x * F.one_hot(i.long(), 6).to(x.dtype), (6,), (), "int32")
CASES["topk"] = of(lambda x: x.topk(3, -1)[0], 4, 5)
CASES["topk_smallest"] = of(lambda x: x.topk(2, 1, largest=False)[0], 4, 5)
CASES["sort"] = of(lambda x: x.sort(-1)[0], 4, 5)
CASES["sort_descending"] = of(lambda x: x.sort(-1, descending=True)[0], 4, 5)
CASES["argsort"] = of(lambda x: x.argsort(-1).float() * x, 4, 5)
CASES["kthvalue"] = of(lambda x: x.kthvalue(2, -1)[0], 4, 5)
CASES["median"] = of(lambda x: x.median(-1)[0], 4, 5)
CASES["argmax"] = of(lambda x: x.argmax(-1).float().unsqueeze(-1) * x, 4, 5)
CASES["bucketize"] = of(lambda x: torch.bucketize(x.detach(), torch.tensor([0.0, 0.5], device=x.device)).float() * x)

# Reductions, running ones.
for _name, _function in {
    "sum": lambda x: x.sum(2),
    "sum_all": lambda x: x.sum(),
    "mean": lambda x: x.mean((1, 3)),
    "mean_keep": lambda x: x.mean(1, keepdim=True),
    "mean_of_samples": lambda x: x - x.mean(0),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std((1, 2), unbiased=False),
    "prod": lambda x: x.prod(-1),
    "amax": lambda x: x.amax((1, 2)),
    "max": lambda x: x.max(1)[0],
    "min": lambda x: x.min(-1)[0],
    "max_of_all": lambda x: x.max() * x,
    "norm": lambda x: x.norm(dim=-1),
    "norm_1": lambda x: x.norm(p=1, dim=-1),
    "norm_two_dims": lambda x: x.norm(dim=(1, 2)),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum_last": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "cummax": lambda x: x.cummax(-1)[0],
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "any": lambda x: (x > 1).any(-1, keepdim=True).float() * x,
    "all": lambda x: (x > -1).all(-1, keepdim=True).float() * x,
}.items():
    CASES[f"reduce_{_name}"] = of(_function, 2, 3, 4)

# Elements.
for _name, _function in {
    "exp": torch.exp,
    "log": lambda x: x.abs().add(0.5).log(),
    "log2": lambda x: x.abs().add(0.5).log2(),
    "log1p": lambda x: x.abs().log1p(),
    "expm1": torch.expm1,
    "sqrt": lambda x: x.abs().add(0.5).sqrt(),
    "rsqrt": lambda x: x.abs().add(0.5).rsqrt(),
    "pow": lambda x: x.abs().add(0.5) ** 1.7,
    "square": lambda x: x.square(),
    "reciprocal": lambda x: 1 / (x.abs() + 0.5),
    "abs": lambda x: x.abs() * x.sign(),
    "sin": lambda x: x.sin() + x.cos(),
    "tan": lambda x: (x * 0.3).tan(),
    "asin": lambda x: (x * 0.2).asin(),
    "atan": torch.atan,
    "atan2": lambda x: torch.atan2(x, x.flip(-1) + 3),
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfinv": lambda x: (x * 0.2).erfinv(),
    "lgamma": lambda x: (x.abs() + 1).lgamma(),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "maximum": lambda x: torch.maximum(x, x.flip(-1)),
    "minimum": lambda x: torch.minimum(x, x.flip(-1)),
    "floor": lambda x: x.floor() * x,
    "round": lambda x: (x * 3).round() * x,
    "trunc": lambda x: (x * 3).trunc() * x,
    "frac": lambda x: (x * 3).frac(),
    "remainder": lambda x: x % 0.7,
    "fmod": lambda x: torch.fmod(x, 0.7),
    "floor_divide": lambda x: (x // 0.7) * x,
    "lerp": lambda x: torch.lerp(x, x.flip(-1), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "nan_to_num": lambda x: x.nan_to_num(),
    "isnan": lambda x: x.isnan().float() + x,
    "heaviside": lambda x: torch.heaviside(x, torch.zeros_like(x)) * x,
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(-1)),
    "logit": lambda x: x.sigmoid().logit(),
    "hypot": lambda x: torch.hypot(x, x + 2),
    "logical": lambda x: ((x > 0) & ~(x > 1) | (x < -1) ^ (x > 2)).float() * x,
    "equal": lambda x: (x == x.flip(-1)).float() + x,
    "integers": lambda x: (x * 3).int().float() * x,
    "integer_division": lambda x: ((x * 9).int() // 2).float() * x,
    "integer_cut": lambda x: torch.div((x * 9).int(), 2, rounding_mode="trunc").float() * x,
    "integer_floor": lambda x: torch.div((x * 9).int(), 2, rounding_mode="floor").float() * x,
    "integer_remainder": lambda x: ((x * 9).int() % 4).float() * x,
    "division_cut": lambda x: torch.div(x.detach(), 0.7, rounding_mode="trunc") * x,
    "division_floor": lambda x: torch.div(x.detach(), 0.7, rounding_mode="floor") * x,
    "floor_divide_constant": lambda x: (x.detach() // 0.7) * x,
    "double": lambda x: x.double().sin().float(),
    "half": lambda x: x.half().float(),
    "cdist": lambda x: torch.cdist(x.unsqueeze(1), x.unsqueeze(1) + 1),
}.items():
    CASES[f"elements_{_name}"] = of(_function)

# Steps that train nothing, and outputs.
CASES["forward_linear"] = layer(lambda: nn.Linear(6, 4), 6, trains=False, evaluates=True)
CASES["forward_linear_outputs"] = layer(lambda: nn.Linear(6, 4), 6, trains=False, evaluates=True, shows=True)
CASES["forward_conv_outputs"] = layer(lambda: nn.Conv2d(4, 8, 3), 4, 6, 6, trains=False, evaluates=True, shows=True)
CASES["forward_batch_norm"] = layer(lambda: nn.BatchNorm2d(4), 4, 5, 6, trains=False, evaluates=True, shows=True)
CASES["forward_in_training"] = layer(lambda: nn.BatchNorm2d(4), 4, 5, 6, trains=False)
CASES["forward_no_weights"] = of(lambda x: x * 2 + 1, trains=False, evaluates=True, shows=True)
CASES["forward_argmax"] = layer(
    lambda: Applied(lambda x, inner: inner(x).argmax(-1), nn.Linear(6, 4)), 6, trains=False, evaluates=True, shows=True
)
CASES["train_outputs"] = layer(lambda: nn.Linear(6, 4), 6, shows=True)
CASES["train_outputs_images"] = layer(lambda: nn.Conv2d(4, 8, 3), 4, 6, 6, shows=True)


class Residual(nn.Module):
    """A small residual network, as people write it."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.short = nn.Sequential(nn.Conv2d(4, 8, 1, stride=1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        made = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return self.head(F.adaptive_avg_pool2d(F.relu(made + self.short(x)), 1).flatten(1))


class Variational(nn.Module):
    """An autoencoder of images, without noise."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.Sigmoid())

    def forward(self, x):
        return self.up(self.down(x))


CASES["model_residual"] = layer(Residual, 4, 8, 8)
CASES["model_autoencoder"] = layer(Variational, 4, 8, 8)
CASES["model_unet"] = layer(
    lambda: Applied(
        lambda x, a, b, c: c(torch.cat([a(x), F.interpolate(b(F.max_pool2d(a(x), 2)), scale_factor=2)], 1)),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Conv2d(8, 2, 1),
    ),
    4,
    8,
    8,
)
CASES["model_conv1d_sequence"] = layer(
    lambda: nn.Sequential(
        nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(32, 3)
    ),
    4,
    8,
)


def draw(case, number):
    """The inputs of a batch, as arrays."""
    draws = np.random.RandomState(number)
    arrays = []
    for shape, dtype in case.inputs:
        if dtype == "bool":
            arrays.append(draws.randint(0, 2, (BATCH, *shape)).astype(bool))
        elif "int" in dtype:
            arrays.append(draws.randint(0, case.high, (BATCH, *shape)).astype(dtype))
        else:
            arrays.append(draws.normal(0, 1, (BATCH, *shape)).astype("f"))
    return arrays


def batches(name):
    """The input_fn: the batches of a case. Here, since dill does not write all of what is in the script itself."""
    case = CASES[name]
    return [
        [
            torch.from_numpy(array).to(getattr(torch, dtype))
            for array, (_, dtype) in zip(draw(case, n), case.inputs, strict=True)
        ]
        for n in range(STEPS)
    ]
