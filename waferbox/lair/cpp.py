"""C++ from LAIR. All names in the source are made here from numbers."""

import math
from collections.abc import Mapping, Sequence

import torch

from waferbox.lair.loop_program import Argument, LoopKernel, Result, Statement

# Halves are computed in float, and rounded after each operation, as torch does.
_TYPES: Mapping[torch.dtype, str] = {
    torch.bool: "bool",
    torch.int8: "int8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
    torch.uint8: "uint8_t",
    torch.float16: "float",
    torch.bfloat16: "float",
    torch.float32: "float",
    torch.float64: "double",
}
_HALVES: Mapping[torch.dtype, str] = {torch.float16: "half", torch.bfloat16: "bfloat"}

_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "and": "&",
    "or": "|",
    "xor": "^",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
}
_CALLS = {
    "sqrt": "std::sqrt",
    "abs": "std::abs",
    "floor": "std::floor",
    "ceil": "std::ceil",
    "round": "std::nearbyint",
    "trunc": "std::trunc",
    "exp": "std::exp",
    "expm1": "std::expm1",
    "log": "std::log",
    "log1p": "std::log1p",
    "tanh": "std::tanh",
    "sin": "std::sin",
    "cos": "std::cos",
    "pow": "std::pow",
    "atan2": "std::atan2",
}

_HEAD = """\
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {
inline float load_bfloat(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}
inline uint16_t store_bfloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return value != value ? uint16_t(0x7fc0) : uint16_t(rounded);
}
inline float round_bfloat(float value) { return load_bfloat(store_bfloat(value)); }
inline float load_half(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return float(value);
}
inline uint16_t store_half(float value) {
  const _Float16 half = _Float16(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline float round_half(float value) { return float(_Float16(value)); }
}
"""


def source_of(kernels: Sequence[LoopKernel]) -> str:
    """The source of one translation unit, with kernel i as `extern "C" void kernel_i(int64_t n, void* const* buffers)`.

    The buffers are those of the arguments, followed by those of the results.
    """
    return "\n".join([_HEAD, *(_function(kernel, number) for number, kernel in enumerate(kernels))])


def _function(kernel: LoopKernel, number: int) -> str:
    lines = [f'extern "C" void kernel_{number}(int64_t n, void* const* buffers) {{', "  (void)n;"]
    buffers: list[Argument | Result] = [*kernel.arguments, *kernel.results]
    for index, buffer in enumerate(buffers):
        constant = "const " if index < len(kernel.arguments) else ""
        kind = _stored(buffer.dtype)
        lines.append(f"  {constant}{kind}* b{index} = static_cast<{constant}{kind}*>(buffers[{index}]);")
    for index, argument in enumerate(kernel.arguments):
        if not argument.whole:
            lines.append(f"  const {_TYPES[argument.dtype]} v{argument.value} = {_load(argument.dtype, f'*b{index}')};")
    dtypes = {a.value: a.dtype for a in kernel.arguments} | {s.value: s.dtype for s in (*kernel.once, *kernel.loop)}
    lines += [f"  {_statement(statement, dtypes)}" for statement in kernel.once]
    if any(buffer.whole for buffer in buffers):
        # A result may share an argument's buffer element for element, so no iteration depends on another.
        lines += ["#pragma GCC ivdep", "  for (int64_t i = 0; i < n; ++i) {"]
        for index, argument in enumerate(kernel.arguments):
            if argument.whole:
                load = _load(argument.dtype, f"b{index}[i]")
                lines.append(f"    const {_TYPES[argument.dtype]} v{argument.value} = {load};")
        lines += [f"    {_statement(statement, dtypes)}" for statement in kernel.loop]
        lines += [f"    {line}" for line in _stores(kernel, whole=True)]
        lines.append("  }")
    lines += [f"  {line}" for line in _stores(kernel, whole=False)]
    return "\n".join([*lines, "}", ""])


def _stores(kernel: LoopKernel, *, whole: bool) -> list[str]:
    lines = []
    for index, result in enumerate(kernel.results, start=len(kernel.arguments)):
        if result.whole is whole:
            half = _HALVES.get(result.dtype)
            value = f"store_{half}(v{result.value})" if half else f"v{result.value}"
            lines.append(f"{f'b{index}[i]' if whole else f'*b{index}'} = {value};")
    return lines


def _stored(dtype: torch.dtype) -> str:
    return "uint16_t" if dtype in _HALVES else _TYPES[dtype]


def _load(dtype: torch.dtype, source: str) -> str:
    half = _HALVES.get(dtype)
    return f"load_{half}({source})" if half else source


def _statement(statement: Statement, dtypes: Mapping[int, torch.dtype]) -> str:
    kind = _TYPES[statement.dtype]
    value = _expression(statement, dtypes)
    half = _HALVES.get(statement.dtype)
    rounded = f"round_{half}({value})" if half else f"{kind}({value})"
    return f"const {kind} v{statement.value} = {rounded};"


def _expression(statement: Statement, dtypes: Mapping[int, torch.dtype]) -> str:
    opcode = statement.opcode
    names = [f"v{operand}" for operand in statement.operands]
    if opcode == "const":
        assert statement.literal is not None
        return _literal(statement.literal, statement.dtype)
    if opcode in _INFIX:
        return f"{names[0]} {_INFIX[opcode]} {names[1]}"
    if opcode in _CALLS:
        return f"{_CALLS[opcode]}({', '.join(names)})"
    x = names[0]
    match opcode:
        case "neg":
            return f"-{x}"
        case "not":
            return f"!{x}" if dtypes[statement.operands[0]] is torch.bool else f"~{x}"
        case "reciprocal":
            return f"{_one(statement.dtype)} / {x}"
        case "rsqrt":
            return f"{_one(statement.dtype)} / std::sqrt({x})"
        case "isnan":
            return f"{x} != {x}"
        case "sign":
            return f"({x} > 0) - ({x} < 0)"
        case "maximum" | "minimum":
            # The result is NaN if either operand is.
            sign = ">" if opcode == "maximum" else "<"
            return f"({x} {sign} {names[1]} || {x} != {x}) ? {x} : {names[1]}"
        case "select":
            return f"{x} ? {names[1]} : {names[2]}"
        case "cast":
            return f"{x} != 0" if statement.dtype is torch.bool else x
    raise AssertionError(f"no C++ for {opcode}")


def _one(dtype: torch.dtype) -> str:
    return "1.0" if dtype is torch.float64 else "1.0f"


def _literal(number: float | int | bool, dtype: torch.dtype) -> str:
    if isinstance(number, bool):
        return "true" if number else "false"
    if isinstance(number, int):
        # C++ has no literal for the least integer.
        return f"(-INT64_C({-number - 1}) - 1)" if number < 0 else f"INT64_C({number})"
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    return f"{number.hex()}{'' if dtype is torch.float64 else 'f'}"
