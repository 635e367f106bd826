"""The table of lowerings: ATen overload -> rule.

An operation that is not here is lowered verbatim if CIRH's table has it under its ATen name, and is an error otherwise.
Composite operations (cross entropy, layer norm, mean) are kept whole: the compiler decomposes them where it must.
"""

from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from cstorch.lowering.attention import attention, attention_backward, safe_softmax
from cstorch.lowering.constants import arange, filled, filled_with
from cstorch.lowering.context import Rule
from cstorch.lowering.images import batch_norm_inference, channel_shuffle, pixel_shuffle, pixel_unshuffle
from cstorch.lowering.indexing import index, index_put
from cstorch.lowering.norms import in_float32, norm
from cstorch.lowering.pointwise import (
    binary,
    clamp,
    compare,
    divide,
    gelu,
    is_nan,
    logical,
    masked_fill,
    relu_backward,
    reverse_subtract,
    select,
    unary,
)
from cstorch.lowering.random_numbers import (
    bernoulli,
    dropout,
    exponential,
    integers,
    normal,
    permutation,
    uniform,
)
from cstorch.lowering.reductions import mask_from_topk, matmul, position, reduce, softmax, vector_norm
from cstorch.lowering.shapes import (
    as_strided,
    as_strided_scatter,
    cast,
    concat,
    copy,
    expand,
    identity,
    permute,
    repeat,
    reshape,
    slice_,
    split,
    stack,
    transpose,
)
from cstorch.lowering.verbatim import with_class_numbers

aten = torch.ops.aten

# All overloads of a name follow one rule.
_NAMES: Mapping[str, Rule] = {
    # The same value.
    "detach": identity,
    "alias": identity,
    "clone": identity,
    "lift_fresh": identity,
    "lift_fresh_copy": identity,
    # Element by element.
    "add": binary("cirh.Add"),
    "sub": binary("cirh.Sub"),
    "rsub": reverse_subtract,
    "mul": binary("cirh.Mul"),
    "pow": binary("cirh.Pow"),
    "atan2": binary("cirh.Atan2"),
    "xlogy": binary("aten.xlogy.Tensor"),
    "maximum": binary("aten.maximum"),
    "minimum": binary("aten.minimum"),
    "bitwise_and": binary("cirh.And"),
    "bitwise_or": binary("cirh.Or"),
    "bitwise_xor": binary("cirh.Xor"),
    "logical_and": logical("cirh.And"),
    "logical_or": logical("cirh.Or"),
    "logical_xor": logical("cirh.Xor"),
    "logical_not": logical("cirh.Not"),
    "bitwise_not": unary("cirh.Not"),
    "eq": compare("EQ"),
    "ne": compare("NE"),
    "lt": compare("LT"),
    "le": compare("LE"),
    "gt": compare("GT"),
    "ge": compare("GE"),
    "isnan": is_nan,
    "masked_fill": masked_fill,
    "clamp": clamp,
    "clamp_min": clamp,
    "clamp_max": clamp,
    "tanh": unary("cirh.Tanh"),
    "relu": unary("cirh.Relu"),
    "sqrt": unary("cirh.Sqrt"),
    "rsqrt": unary("cirh.Rsqrt"),
    "exp": unary("cirh.Exp"),
    "log": unary("cirh.Log"),
    "sigmoid": unary("cirh.Sigmoid"),
    "abs": unary("cirh.Abs"),
    "neg": unary("cirh.Neg"),
    "cos": unary("cirh.Cos"),
    "sin": unary("cirh.Sin"),
    "floor": unary("cirh.Floor"),
    "ceil": unary("cirh.Ceil"),
    "sign": unary("cirh.Sign"),
    "sgn": unary("cirh.Sign"),
    "erf": unary("cirh.Erf"),
    "reciprocal": unary("cirh.Reciprocal"),
    "threshold_backward": relu_backward,
    "gelu": gelu("cirh.Gelu"),
    "gelu_backward": gelu("cirh.GeluGrad"),
    "_to_copy": cast,
    "copy": copy,
    # Shapes.
    "view": reshape,
    "_unsafe_view": reshape,
    "_reshape_alias": reshape,
    "unsqueeze": reshape,
    "squeeze": reshape,
    "t": transpose,
    "transpose": transpose,
    "permute": permute,
    "expand": expand,
    "split": split,
    "split_with_sizes": split,
    "cat": concat,
    "stack": stack,
    "index": index,
    "index_put": index_put,
    "repeat": repeat,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "channel_shuffle": channel_shuffle,
    "native_layer_norm": norm,
    "native_layer_norm_backward": norm,
    "native_group_norm": norm,
    "native_group_norm_backward": norm,
    "_native_batch_norm_legit": norm,
    "_native_batch_norm_legit_functional": norm,
    "_native_batch_norm_legit_no_training": in_float32(batch_norm_inference),
    "native_batch_norm_backward": norm,
    "as_strided": as_strided,
    "as_strided_scatter": as_strided_scatter,
    # Reductions and products.
    "sum": reduce("ADD"),
    "amax": reduce("MAX"),
    "amin": reduce("MIN"),
    "argmax": position("ARGMAX"),
    "argmin": position("ARGMIN"),
    "norm": vector_norm,
    "nll_loss_forward": with_class_numbers,
    "nll_loss_backward": with_class_numbers,
    "nll_loss2d_forward": with_class_numbers,
    "nll_loss2d_backward": with_class_numbers,
    "_softmax": softmax,
    "_safe_softmax": safe_softmax,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "mm": matmul,
    "cstorch::mask_from_topk": mask_from_topk,
    # Constants.
    "zeros": filled(0),
    "zeros_like": filled(0),
    "new_zeros": filled(0),
    "zero": filled(0),
    "empty": filled(0),
    "empty_like": filled(0),
    "empty_strided": filled(0),
    "empty_permuted": filled(0),
    "_efficientzerotensor": filled(0),
    "new_empty": filled(0),
    "new_empty_strided": filled(0),
    "ones": filled(1),
    "ones_like": filled(1),
    "new_ones": filled(1),
    "full": filled_with("fill_value"),
    "full_like": filled_with("fill_value"),
    "new_full": filled_with("fill_value"),
    "fill": filled_with("value"),
    "scalar_tensor": filled_with("s"),
    "arange": arange,
    # Random numbers.
    "native_dropout": dropout,
    "bernoulli": bernoulli,
    "rand": uniform,
    "rand_like": uniform,
    "uniform": uniform,
    "randn": normal,
    "randn_like": normal,
    "normal": normal,
    "normal_functional": normal,
    "randint": integers,
    "randint_like": integers,
    "random": integers,
    "randperm": permutation,
    "exponential": exponential,
}

# Overloads of one name that differ.
_OVERLOADS: Mapping[OpOverload, Rule] = {
    aten.div.Tensor: binary("cirh.Div"),
    aten.div.Scalar: binary("cirh.Div"),
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.round.default: unary("cirh.Round"),
    aten.where.self: select,
    aten.slice.Tensor: slice_,
    aten.max.default: reduce("MAX"),
    aten.min.default: reduce("MIN"),
}


def rule_for(func: OpOverload) -> Rule | None:
    """The rule of an overload, if it has one of its own."""
    return _OVERLOADS.get(func) or _NAMES.get(func._schema.name.removeprefix("aten::"))
