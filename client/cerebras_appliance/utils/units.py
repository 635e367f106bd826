"""Amounts of bytes in other units."""

_DECIMAL = {unit: 10 ** (3 * power) for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))}
_BINARY = {unit: 2 ** (10 * power) for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))}


def convert_byte_unit(num: float, tgt_unit: str, /, src_unit: str = "B", precision: int = 0) -> int | float:
    """Returns an amount of bytes in another unit; an int if it has no digits after the point.

    Args:
        num: The amount.
        tgt_unit: The unit of the result: B, KB, KiB, MB, MiB, ... PB, PiB.
        src_unit: The unit of `num`.
        precision: The number of digits after the point.

    Raises:
        ValueError: A unit is unknown, or `precision` is negative.
    """
    if precision < 0:
        raise ValueError(f"precision must be at least 0, got {precision}")
    amount = round(num * _bytes_in(src_unit) / _bytes_in(tgt_unit), precision)
    return int(amount) if precision == 0 else amount


def bytes_to_human(num: float, /, fmt: str = "{value:.1f}{unit}", log_base: int = 2) -> str:
    """Returns an amount of bytes in the largest unit of which it has at least one.

    Args:
        num: The amount in bytes.
        fmt: A format of `value` and `unit`.
        log_base: 2 for KiB and its relatives, 10 for KB and its relatives.

    Raises:
        ValueError: `log_base` is neither.
    """
    if log_base not in (2, 10):
        raise ValueError(f"log_base must be 2 or 10, got {log_base}")
    units = _BINARY if log_base == 2 else _DECIMAL
    unit = max((unit for unit in units if num >= units[unit]), key=units.__getitem__, default="B")
    return fmt.format(value=num / units[unit], unit=unit)


def _bytes_in(unit: str) -> int:
    size = _DECIMAL.get(unit) or _BINARY.get(unit)
    if size is None:
        raise ValueError(f"a unit of bytes is one of {', '.join({**_DECIMAL, **_BINARY})}, not {unit!r}")
    return size
