"""The rows of the table for ATen operations that CIRH has verbatim, made from their schemas.

A row's operands are the schema's tensor arguments in order; all other arguments are attributes of the same names. An
argument that is None has no attribute. There are no devices, layouts and memory formats.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from waferbox.cirh import CirhError
from waferbox.cirh.calls.network import embedding_gradient_in_place
from waferbox.cirh.calls.products import Prepare, by_processor, in_float32
from waferbox.cirh.dialect.elements import element_dtype
from waferbox.cirh.dialect.spec import AttributeSpec, Call, Count, Format, Kind, OperandSpec, OpSpec, Site
from waferbox.cirh.dialect.types import TensorInfo
from waferbox.cirh.table import rules

# Decompositions of matrices, and what is computed with them.
_MATRICES = """
    cholesky cholesky_inverse cholesky_solve linalg_cholesky_ex linalg_inv_ex linalg_lu linalg_lu_factor_ex
    linalg_lu_solve linalg_qr linalg_householder_product linalg_ldl_factor_ex linalg_ldl_solve linalg_matrix_exp
    linalg_solve_triangular lu_unpack ormqr triangular_solve
    _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
"""
# One word per overload, `name` or `name.overload`; adding an operation is adding a word (and its sharding rule in the
# compiler). None of them writes to an argument or draws random numbers; a test looks.
_ALLOWED = """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
    addmm addmv baddbmm bmm mm mv dot
    mean mean.dim var.correction var_mean.correction std.correction
    linalg_vector_norm amax amin any any.dim any.dims all all.dim all.dims argmax argmin max.dim min.dim
    cumsum cumprod logsumexp prod prod.dim_int
    maximum minimum fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar
    xlogy.Tensor addcmul addcdiv lerp.Scalar lerp.Tensor
    select.int slice.Tensor select_backward slice_backward select_scatter slice_scatter
    index_select index_add gather gather_backward scatter.value scatter.src scatter_add index.Tensor index_put
    stack cat split.Tensor split_with_sizes unbind.int flip roll repeat
    arange.start_step eye tril triu constant_pad_nd masked_fill.Scalar masked_fill.Tensor diagonal
    native_dropout_backward
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training
    native_batch_norm_backward
    convolution convolution_backward im2col col2im grid_sampler_2d grid_sampler_2d_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward
    upsample_nearest1d upsample_nearest1d_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    upsample_nearest2d upsample_nearest2d_backward _upsample_nearest_exact2d _upsample_nearest_exact2d_backward
    upsample_nearest3d upsample_nearest3d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward
    upsample_linear1d upsample_linear1d_backward upsample_trilinear3d upsample_trilinear3d_backward
    upsample_bilinear2d upsample_bilinear2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    upsample_bicubic2d upsample_bicubic2d_backward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
    reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward
    reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward
    reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward
    embedding embedding_dense_backward
    silu silu_backward tanh_backward sigmoid_backward softplus softplus_backward elu elu_backward
    leaky_relu leaky_relu_backward hardtanh hardtanh_backward hardswish hardswish_backward
    hardsigmoid hardsigmoid_backward mish log_sigmoid_forward log_sigmoid_backward threshold_backward gelu gelu_backward
    clamp clamp.Tensor clamp_min clamp_max
    log1p log2 log10 expm1 exp2 erfc tan sinh cosh asin acos atan trunc frac round.decimals
    nan_to_num isnan isinf isfinite sgn signbit
    logical_and logical_or logical_not logical_xor
    bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    div.Tensor_mode div.Scalar_mode floor_divide where.ScalarSelf where.ScalarOther where.Scalar
    topk sort sort.stable kthvalue median median.dim nanmedian nanmedian.dim mode cummax cummin logcumsumexp
    fmax fmin lgamma digamma polygamma erfinv asinh acosh atanh copysign.Tensor nextafter igamma igammac
    _standard_gamma_grad _dirichlet_grad
    special_ndtri special_log_ndtr special_erfcx special_i0e special_i1 special_i1e i0 special_zeta special_xlog1py
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_t.n_scalar special_chebyshev_polynomial_u special_chebyshev_polynomial_u.n_scalar
    special_chebyshev_polynomial_v special_chebyshev_polynomial_v.n_scalar special_chebyshev_polynomial_w
    special_chebyshev_polynomial_w.n_scalar special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_t.n_scalar special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_u.n_scalar special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_v.n_scalar special_shifted_chebyshev_polynomial_w
    special_shifted_chebyshev_polynomial_w.n_scalar special_hermite_polynomial_h special_hermite_polynomial_h.n_scalar
    special_hermite_polynomial_he special_hermite_polynomial_he.n_scalar special_laguerre_polynomial_l
    special_laguerre_polynomial_l.n_scalar special_legendre_polynomial_p special_legendre_polynomial_p.n_scalar
    scatter_reduce.two index_reduce bucketize.Tensor searchsorted.Tensor
    hypot angle softshrink_backward hardshrink_backward grid_sampler_3d grid_sampler_3d_backward
"""
ALLOWED = frozenset([*_ALLOWED.split(), *_MATRICES.split()])

# Element-by-element operations that lack torch's tag for them.
_UNTAGGED_POINTWISE = frozenset({"masked_fill.Scalar", "masked_fill.Tensor", "_standard_gamma_grad", "_dirichlet_grad"})
_PRODUCTS = frozenset(["addmm", "addmv", "baddbmm", "bmm", "mm", "mv", "dot", "convolution", "convolution_backward"])
_MATRIX_PRODUCTS = frozenset(["addmm", "mm"])
# Their kernels take it for granted that operands lie in memory in order, and go wrong, or refuse, if not: torch calls
# them behind .contiguous(), which is no operation here. The last bits of what is computed with matrices depend on it.
_ORDERED_IN_MEMORY = frozenset(
    {
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "nll_loss2d_backward",
        "adaptive_max_pool3d_backward",
        *_MATRICES.split(),
    }
)
_FACTORIES = frozenset({"arange.start_step", "eye"})
_IGNORED_TYPES = ("Device", "Layout", "MemoryFormat")
_IGNORED_NAMES = ("pin_memory",)
_KINDS = {
    "bool": Kind.BOOL,
    "int": Kind.INT,
    "SymInt": Kind.INT,
    "float": Kind.FLOAT,
    "number": Kind.NUMBER,
    "Scalar": Kind.NUMBER,
    "str": Kind.STRING,
    "List[int]": Kind.INTS,
    "List[SymInt]": Kind.INTS,
    "List[bool]": Kind.BOOLS,
}
_COUNTS = {
    "Tensor": Count.ONE,
    "Optional[Tensor]": Count.OPTIONAL,
    "List[Tensor]": Count.LIST,
    "List[Optional[Tensor]]": Count.LIST,  # index: all positions must be given, from the first dimension on
}


class _Argument(NamedTuple):
    """An argument of an ATen schema."""

    name: str
    operand: Count | None  # of a tensor argument
    is_dtype: bool
    keyword: bool
    default: Any
    has_default: bool


def _parse_name(name: str) -> tuple[str, str]:
    base, _, overload = name.removeprefix("aten.").partition(".")
    return base, overload or "default"


def _is_out_variant(candidate: Any, schema: Any) -> bool:
    """Whether `candidate` is the same call with one tensor to write to as its last argument."""
    arguments = candidate.arguments
    return (
        len(arguments) == len(schema.arguments) + 1
        and arguments[-1].is_out
        and all(
            a.name == b.name and str(a.type) == str(b.type)
            for a, b in zip(arguments[:-1], schema.arguments, strict=True)
        )
    )


def _out_variant(packet: Any, schema: Any) -> Callable[..., Any] | None:
    # A loss with a reduction first resizes `out` to its input's size, which a buffer of fixed size cannot take.
    if len(schema.returns) != 1 or any(argument.name == "reduction" for argument in schema.arguments):
        return None
    for overload in packet.overloads():
        function = getattr(packet, overload)
        if _is_out_variant(function._schema, schema):
            name = function._schema.arguments[-1].name
            if name == "out":
                return function
            return lambda *tensors, out, **rest: function(*tensors, **rest, **{name: out})
    return None


def _fast(base: str, arguments: list[_Argument]) -> Callable[..., Any] | None:
    """The same operation as a builtin function, whose call is faster, if only its tensors are positional."""
    if any(argument.operand is not Count.ONE for argument in arguments):
        return None
    function: Callable[..., Any] | None = getattr(torch._C._VariableFunctions, base, None)
    return function


@cache
def row(name: str) -> OpSpec:
    """The row of `aten.<name>[.<overload>]`. Raises CirhError for an operation that is not allowed."""
    if name.removeprefix("aten.") not in ALLOWED:
        raise CirhError(f"unknown operation {name}")
    base, overload = _parse_name(name)
    packet = getattr(torch.ops.aten, base)
    function = getattr(packet, overload)
    schema = function._schema
    ordered = base in _ORDERED_IN_MEMORY
    call = partial(_call_in_order, function) if ordered else function
    out = None if ordered else _out_variant(packet, schema)
    assert not schema.is_mutable, f"{name} writes to its arguments"
    operands: list[OperandSpec] = []
    attributes: list[AttributeSpec] = []
    arguments: list[_Argument] = []
    for argument in schema.arguments:
        text = str(argument.type)
        inner = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
        if _real_type(argument) in _IGNORED_TYPES or argument.name in _IGNORED_NAMES:
            continue
        operand = _COUNTS.get(text)
        is_dtype = _real_type(argument) == "ScalarType"
        default = argument.default_value if argument.has_default_value() else None
        optional = text.startswith("Optional[") or argument.has_default_value()
        arguments.append(
            _Argument(argument.name, operand, is_dtype, argument.kwarg_only, default, argument.has_default_value())
        )
        if operand is not None:
            operands.append(OperandSpec(argument.name, operand))
        else:
            kind = Kind.DTYPE if is_dtype else _KINDS[inner]
            attributes.append(AttributeSpec(argument.name, kind, not optional))
    pointwise = torch.Tag.pointwise in function.tags or base in _UNTAGGED_POINTWISE
    listed = any(str(r.type).startswith("List") for r in schema.returns)
    prepare: Prepare = partial(_prepare, call, None if ordered else _fast(base, arguments), out, tuple(arguments))
    if base == "embedding_dense_backward":
        prepare = partial(embedding_gradient_in_place, prepare)
    if base in _MATRIX_PRODUCTS:
        prepare = by_processor(prepare)
    return OpSpec(
        name=name,
        operands=tuple(operands),
        results=None if listed else len(schema.returns),
        format=Format.FUNCTIONAL,
        attributes=tuple(attributes),
        prepare=in_float32(prepare) if base in _PRODUCTS else prepare,
        pointwise=pointwise and bool(operands),
        rule=rules.ATEN.get(name),
        factory=base in {_parse_name(f)[0] for f in _FACTORIES},
    )


def _real_type(argument: Any) -> str:
    """The type in the schema's text: by its type object, a ScalarType, Layout or MemoryFormat is an `int`."""
    return str(argument.real_type).removeprefix("Optional[").removesuffix("]")


def _call_in_order(function: Callable[..., Any], *tensors: Any, **named: Any) -> Any:
    ordered = {name: _in_order(value) for name, value in named.items()}
    return function(*map(_in_order, tensors), **ordered)


def _in_order(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _prepare(
    function: Callable[..., Any],
    fast: Callable[..., Any] | None,
    out: Callable[..., Any] | None,
    arguments: tuple[_Argument, ...],
    site: Site,
) -> Call:
    given = dict(site.attributes)
    rest: dict[str, Any] = {}
    for argument in arguments:
        if argument.operand is None and argument.name in given:
            value: Any = given[argument.name]
            rest[argument.name] = element_dtype(value) if argument.is_dtype else value
        elif argument.operand is None and not argument.has_default:
            rest[argument.name] = None
    tensors = [a for a in arguments if a.operand is not None]
    if all(a.operand is Count.ONE for a in tensors) and arguments[: len(tensors)] == tuple(tensors):
        chosen = fast if fast is not None and not rest else function
        return _bind(chosen, out, rest)
    return Call(_gather_arguments(function, tensors, site.segments, rest))


def _bind(function: Callable[..., Any], out: Callable[..., Any] | None, rest: dict[str, Any]) -> Call:
    if not rest:
        return Call(function, out)
    return Call(partial(function, **rest), partial(out, **rest) if out is not None else None)


def _gather_arguments(
    function: Callable[..., Any], tensors: list[_Argument], segments: tuple[int, ...], rest: dict[str, Any]
) -> Callable[..., Any]:
    """A function of the operands that calls `function` with all arguments by name."""
    single: list[tuple[str, int]] = []
    lists: list[tuple[str, slice]] = []
    start = 0
    for argument, count in zip(tensors, segments, strict=True):
        if argument.operand is Count.LIST:
            lists.append((argument.name, slice(start, start + count)))
        elif count:
            single.append((argument.name, start))
        elif not argument.has_default:
            rest = {**rest, argument.name: None}
        start += count

    def call(*operands: Any, **more: Any) -> Any:
        named = {name: operands[at] for name, at in single}
        for name, part in lists:
            named[name] = list(operands[part])
        return function(**named, **rest, **more)

    return call


_BATCH_NORMS = frozenset(
    {
        "aten._native_batch_norm_legit_functional",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_no_training",
    }
)


def corrected_results(site: Site, inferred: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
    """The result types of torch's CPU kernel, where its meta kernel disagrees with that."""
    is_batch_norm = site.name in _BATCH_NORMS
    dtype = site.operands[0].dtype if site.operands else None
    if dtype is not None and dtype.itemsize == 2 and (is_batch_norm or site.name == "aten.native_layer_norm"):
        mixed = any(operand.dtype is not dtype for operand in site.operands)
        statistics = torch.float32 if mixed else dtype
        inferred = (inferred[0], *(TensorInfo(result.shape, statistics) for result in inferred[1:]))
    if is_batch_norm and not site.get("training", False):
        # In evaluation mode the kernel saves no statistics.
        saved = tuple(TensorInfo((0,), result.dtype) for result in inferred[1:3])
        inferred = (inferred[0], *saved, *inferred[3:])
    return inferred
