"""The table of operations, with the prepared torch calls and inferred types of its rows."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Final

import torch
from xdsl.ir import Operation, SSAValue

from waferbox.cirh import CirhError
from waferbox.cirh.dialect.attributes import MAXIMUM_LIST, AttrValue, ConstantAttr, attrs
from waferbox.cirh.dialect.elements import element_dtype
from waferbox.cirh.dialect.operations import Const
from waferbox.cirh.dialect.spec import Call, Count, Kind, OpSpec, Site, Typed
from waferbox.cirh.dialect.types import AnyTensorType, TensorInfo, info, tensor_type, type_text
from waferbox.cirh.table import aten as table_aten
from waferbox.cirh.table import rows, rows_vendor

# --- Element types of operands ----------------------------------------------------------------------------------------
#
# torch's kernels refuse combinations of element types that its meta kernels accept.


# How many operands of a norm, the first ones, are its input or that input's gradient. With halves there, the other
# operands may be float32.
_NORMALISED = {
    "aten.native_layer_norm": 1,
    "aten.native_layer_norm_backward": 2,
    "aten._native_batch_norm_legit_functional": 1,
    "aten._native_batch_norm_legit.no_stats": 1,
    "aten._native_batch_norm_legit_no_training": 1,
    "aten.native_batch_norm_backward": 2,
}
_HALVES = (torch.float16, torch.bfloat16)
# Operations whose prepared call checks the type of each operand.
_CHECKED = frozenset({"cirh.AttentionGrad", "cirh.LinearCrossEntropyGrad"})
# The index of the operand with class numbers.
_LABELS = {
    "aten.nll_loss_forward": 1,
    "aten.nll_loss2d_forward": 1,
    "aten.nll_loss_backward": 2,
    "aten.nll_loss2d_backward": 2,
}
_CLASS_NUMBERS = (torch.int64, torch.uint8)


def check_operand_types(site: Site) -> None:
    """Raises CirhError for operands of an operation, not element by element, whose types do not fit together."""
    floats = {operand.dtype for operand in site.operands if operand.dtype.is_floating_point}
    if len(floats) > 1 and site.name not in _CHECKED and not _is_norm_of_halves(site):
        listed = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
        raise CirhError(f"{site.name}: operands of different types ({listed}); cast them to one first")
    named = site.get("input_dtype")
    if named is not None and element_dtype(named) is not site.operands[0].dtype:
        raise CirhError(f"{site.name}: the gradient of {named} is not {site.operands[0].dtype}; cast it first")
    labels = _LABELS.get(site.name)
    if labels is not None and labels < len(site.operands) and site.operands[labels].dtype not in _CLASS_NUMBERS:
        raise CirhError(f"{site.name}: class numbers are int64, not {site.operands[labels].dtype}; cast them first")


def _is_norm_of_halves(site: Site) -> bool:
    """Whether a norm has a half-precision input, and all its other operands are float32."""
    first = _NORMALISED.get(site.name, 0)
    data, others = ({operand.dtype for operand in part} for part in (site.operands[:first], site.operands[first:]))
    return len(data) == 1 and data.issubset(_HALVES) and others == {torch.float32}


# --- The table --------------------------------------------------------------------------------------------------------


# Exceptions that torch raises on meta tensors for arguments that do not fit together.
TORCH_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AssertionError, ArithmeticError)
SEGMENTS = "operand_segments"
_ALL_SEGMENTS: Final = (SEGMENTS, "operand_segment_sizes")  # as the vendor's release 2.7 writes them
REFUSED: Final = rows_vendor.REFUSED
# Operations whose results are their operands.
ANNOTATIONS: Final = frozenset(f"cirh.{name}" for name in rows_vendor.ANNOTATIONS)
ROWS: Final[Mapping[str, OpSpec]] = {**rows.ROWS, **rows_vendor.ROWS}
# The type of a result that a mask switches off (convolution_backward): it has no element, and must not be read.
_ABSENT = TensorInfo((0,), torch.float32)

_TYPES: Mapping[Kind, tuple[type, ...]] = {
    Kind.BOOL: (bool,),
    Kind.INT: (int,),
    Kind.FLOAT: (float, int),
    Kind.NUMBER: (bool, int, float),
    Kind.STRING: (str,),
    Kind.DTYPE: (str,),
    Kind.INTS: (list, tuple),
    Kind.BOOLS: (list, tuple),
    Kind.FLOATS: (list, tuple),
}
_ITEMS: Mapping[Kind, type] = {Kind.INTS: int, Kind.BOOLS: bool, Kind.FLOATS: float}


def spec(name: str) -> OpSpec:
    """The row of an operation. Raises CirhError for an unknown name."""
    row = ROWS.get(name)
    if row is not None:
        return row
    if name.startswith("aten."):
        return table_aten.row(name)
    if name in REFUSED:
        raise CirhError(f"{name} is an operation of the vendor's that is not executed here; write it with others")
    raise CirhError(f"unknown operation {name}")


def names() -> Iterable[str]:
    """The names of all operations but Const."""
    yield from ROWS
    yield from sorted(f"aten.{name}" for name in table_aten.ALLOWED)


def _check_attributes(row: OpSpec, attributes: Mapping[str, AttrValue]) -> None:
    known = {attribute.name: attribute for attribute in row.attributes}
    for name, value in attributes.items():
        if name in _ALL_SEGMENTS:
            continue
        attribute = known.pop(name, None)
        if attribute is None:
            raise CirhError(f"{row.name} has no attribute {name!r}")
        ok = isinstance(value, _TYPES[attribute.kind])
        # A bool is an int in Python, but a kind of its own here.
        if attribute.kind in (Kind.INT, Kind.FLOAT) and isinstance(value, bool):
            ok = False
        if ok and attribute.kind in _ITEMS:
            item_type = _ITEMS[attribute.kind]
            assert isinstance(value, Sequence)
            ok = all(type(item) is item_type for item in value)
        if not ok:
            raise CirhError(f"{row.name}: attribute {name} = {value!r} is not a {attribute.kind.value}")
    missing = [attribute.name for attribute in known.values() if attribute.required]
    if missing:
        raise CirhError(f"{row.name}: attribute {missing[0]!r} is missing")


# By the name of an operation and the number of its operands, where its attributes say nothing about them. Lists of more
# operands are not kept, as their number is any.
_FEW_OPERANDS = 16
_KNOWN_SEGMENTS: dict[tuple[str, int], tuple[int, ...]] = {}


def _segments(row: OpSpec, operands: int, attributes: Mapping[str, AttrValue]) -> tuple[int, ...]:
    """The number of operands that stand for each tensor argument."""
    given = next((attributes[name] for name in _ALL_SEGMENTS if name in attributes), None)
    if given is None:
        known = _KNOWN_SEGMENTS.get((row.name, operands))
        if known is not None:
            return known
        counts = [s.count for s in row.operands]
        lists = counts.count(Count.LIST)
        # Beside a list, optional arguments are left out.
        plain = {Count.ONE: 1, Count.OPTIONAL: 0, Count.LIST: operands - counts.count(Count.ONE) if lists == 1 else 1}
        segments = tuple(plain[count] for count in counts)
        if not lists:
            # Optional arguments at the end may be left out.
            segments = tuple(int(position < operands) for position in range(len(row.operands)))
    elif isinstance(given, (list, tuple)):
        segments = tuple(int(item) for item in given)
        if not any(segments[len(row.operands) :]):
            segments = segments[: len(row.operands)]  # the vendor's have more arguments, which may be left out
    else:
        raise CirhError(f"{row.name}: {SEGMENTS} is a list of numbers")
    if len(segments) == len(row.operands) and sum(segments) == operands:
        limits = {Count.ONE: (1, 1), Count.OPTIONAL: (0, 1), Count.LIST: (0, operands)}
        if all(limits[s.count][0] <= n <= limits[s.count][1] for s, n in zip(row.operands, segments, strict=True)):
            if given is None and operands <= _FEW_OPERANDS:
                _KNOWN_SEGMENTS[row.name, operands] = segments
            return segments
    names = ", ".join(s.name for s in row.operands)
    raise CirhError(f"{row.name} takes {names or 'no operands'}; {operands} operands are given")


def _statics(row: OpSpec, operands: Sequence[SSAValue]) -> tuple[ConstantAttr, ...]:
    constants = []
    for operand_spec, operand in zip(row.operands, operands, strict=False):
        if operand_spec.static:
            if not isinstance(operand.owner, Const):
                raise CirhError(f"{row.name}: {operand_spec.name} must be a constant")
            if prod(info(operand).shape) > MAXIMUM_LIST:
                raise CirhError(f"{row.name}: {operand_spec.name} is {type_text(operand)}")
            constants.append(operand.owner.value)
    return tuple(constants)


def make_site(
    name: str,
    operands: Sequence[SSAValue],
    attributes: Mapping[str, AttrValue],
    types: Sequence[AnyTensorType] | None = None,
) -> Site:
    """The site of an operation. Raises CirhError for operands or attributes that it cannot have."""
    row = spec(name)
    _check_attributes(row, attributes)
    segments = _segments(row, len(operands), attributes)
    if row.typed is Typed.REQUIRED and types is None:
        raise CirhError(f"{name}: its result type must be given (types=[...])")
    return Site(
        name=name,
        operands=tuple(info(operand) for operand in operands),
        attributes=tuple(
            sorted(
                (k, tuple(v) if isinstance(v, (list, tuple)) else v)
                for k, v in attributes.items()
                if k not in _ALL_SEGMENTS
            )
        ),
        results=tuple(info(type) for type in types) if types is not None and row.typed is not Typed.NEVER else (),
        statics=_statics(row, operands),
        segments=segments,
    )


def site_of(op: Operation) -> Site:
    """The site of an existing operation."""
    types: list[AnyTensorType] = [result.type for result in op.results]  # type: ignore[misc]
    return make_site(op.name, op.operands, attrs(op), types)


def runtime_operands(op: Operation) -> list[SSAValue]:
    """The operands of the prepared call, which are all but the static ones."""
    row = spec(op.name)
    if not any(operand.static for operand in row.operands):
        return list(op.operands)
    # Static operands come before optional ones.
    return [v for s, v in zip(row.operands, op.operands, strict=False) if not s.static]


def build(op: Operation) -> Call:
    """The prepared torch call of an operation, for `runtime_operands(op)`."""
    return spec(op.name).prepare(site_of(op))


def _metas(row: OpSpec, site: Site) -> list[torch.Tensor]:
    static = [s.static for s in row.operands] if len(row.operands) == len(site.operands) else []
    kept = [o for i, o in enumerate(site.operands) if not (static and static[i])]
    return [torch.empty(o.shape, dtype=o.dtype, device="meta") for o in kept]


@lru_cache(maxsize=1 << 16)
def infer(site: Site) -> tuple[TensorInfo, ...]:
    """The types of a site's results, by a rule or from its call on meta tensors. Raises CirhError if it fails."""
    row = spec(site.name)
    if row.pointwise:
        return _infer_pointwise(row, site)
    check_operand_types(site)
    call = row.prepare(site)
    outcome = row.rule(site) if row.rule is not None else None
    if outcome is None:
        outcome = table_aten.corrected_results(site, _run(row, site, call, _metas(row, site)))
    for result in outcome:
        tensor_type(*result)  # raises CirhError for a tensor that is too large
    return outcome


def _run(row: OpSpec, site: Site, call: Call, operands: list[torch.Tensor]) -> tuple[TensorInfo, ...]:
    try:
        with torch.no_grad():
            results = call.function(*operands, **({"device": "meta"} if row.factory else {}))
    except TORCH_ERRORS as error:
        raise CirhError(f"{site.name}: {str(error).partition(chr(10))[0] or type(error).__name__}") from None
    listed = (results,) if isinstance(results, torch.Tensor) else tuple(results)
    return tuple(_ABSENT if result is None else TensorInfo(tuple(result.shape), result.dtype) for result in listed)


def _infer_pointwise(row: OpSpec, site: Site) -> tuple[TensorInfo, ...]:
    """The type of a pointwise result: the shape of the operands with dimensions, and the type of a single element."""
    shapes = {operand.shape for operand in site.operands if operand.shape}
    mixed = shapes and any(operand.shape == () for operand in site.operands)
    if len(shapes) > 1 or (mixed and site.name.startswith("cirh.") and site.name != "cirh.Clamp"):
        listed = ", ".join(type_text(tensor_type(*operand)) for operand in site.operands)
        raise CirhError(f"{site.name}: operands of different shapes ({listed}); broadcast them first")
    shape = shapes.pop() if shapes else ()
    # Where element types differ, torch lets a tensor of rank 0 count less than others.
    one = (1,) if shape else ()
    elements = Site(
        name=site.name,
        operands=tuple(TensorInfo((1,) if operand.shape else (), operand.dtype) for operand in site.operands),
        attributes=site.attributes,
        results=tuple(TensorInfo(one, result.dtype) for result in site.results),
        segments=site.segments,
    )
    if row.typed is Typed.REQUIRED and site.result.shape != shape:
        raise CirhError(f"{site.name}: {list(shape)} cannot become {list(site.result.shape)}")
    return tuple(TensorInfo(shape, result.dtype) for result in _element_types(elements))


@lru_cache(maxsize=1 << 14)
def _element_types(site: Site) -> tuple[TensorInfo, ...]:
    """The result types of a pointwise operation on single elements, which is run on the CPU."""
    row = spec(site.name)
    samples = [torch.ones(operand.shape, dtype=operand.dtype) for operand in site.operands]
    return _run(row, site, row.prepare(site), samples)


def result_types(site: Site) -> list[AnyTensorType]:
    """The result types of a site. Raises CirhError if given types are not those of the operation."""
    results = infer(site)
    if site.results and site.results != results:
        given = ", ".join(type_text(tensor_type(*r)) for r in site.results)
        made = ", ".join(type_text(tensor_type(*r)) for r in results)
        raise CirhError(f"{site.name}: makes {made}, not {given}")
    return [tensor_type(*result) for result in results]
