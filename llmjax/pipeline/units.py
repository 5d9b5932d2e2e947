"""Sizes, durations and shares as people write them. A bare number is refused: nobody knows whether 256 means bytes or MiB."""

from __future__ import annotations

import math
import re

SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
DURATIONS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) ?([A-Za-z%]*)")


def parse_size(value: object) -> int:
    """Bytes in ``256MiB``, ``1.5 GB``. Raises `ValueError` that says which units there are."""
    number, unit = _quantity(value, "a size", "256MiB", SIZES)
    size = round(number * SIZES[unit])
    if size < 1:
        raise ValueError(f"expected a size above zero, got '{value}'")
    return size


def parse_duration(value: object) -> float:
    """Seconds in ``500ms``, ``30s``, ``5m``, ``1h``, ``2d``. Raises `ValueError` that says which units there are."""
    number, unit = _quantity(value, "a duration", "30s", DURATIONS)
    return number * DURATIONS[unit]


def parse_share(value: object) -> float:
    """A share above 0 and at most 1, from ``90%`` or ``0.9``. Raises `ValueError` otherwise."""
    share: float
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value.strip())) is not None and match[2] == "%":
        share = float(match[1]) / 100
    elif isinstance(value, int | float) and not isinstance(value, bool):
        share = float(value)
    else:
        raise ValueError(f"expected a share such as 90% or 0.9, got {_shown(value)}")
    if not (math.isfinite(share) and 0.0 < share <= 1.0):
        hint = f"; write {share:g}%" if 1.0 < share <= 100.0 and not isinstance(value, str) else ""
        raise ValueError(f"expected a share above 0 and at most 1 (100%), got {_shown(value)}{hint}")
    return share


def format_size(size: int) -> str:
    """The shortest exact way to write `size` bytes that `parse_size` reads back."""
    for unit in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "KB"):
        if size % SIZES[unit] == 0:
            return f"{size // SIZES[unit]}{unit}"
    return f"{size / 1024!r}KiB"


def format_duration(seconds: float) -> str:
    """The shortest way to write `seconds` that `parse_duration` reads back."""
    if seconds == 0:
        return "0s"
    for unit in ("d", "h", "m", "s"):
        number = seconds / DURATIONS[unit]
        if number >= 1 and number == int(number):
            return f"{int(number)}{unit}"
    return f"{seconds:g}s" if seconds >= 1 else f"{seconds * 1000:g}ms"


def format_share(share: float) -> str:
    """`share` in percent."""
    return f"{share * 100:.10g}%"


def _quantity(value: object, what: str, example: str, units: dict[str, int] | dict[str, float]) -> tuple[float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f"{value} has no unit; write {what} as {example} (units: {', '.join(units)})")
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected {what} such as {example}, got {_shown(value)}")
    if not match[2]:
        raise ValueError(f"'{value}' has no unit; write {what} as {example} (units: {', '.join(units)})")
    if match[2] not in units:
        close = [unit for unit in units if unit.lower() == match[2].lower()]
        hint = f"; did you mean {close[0]}" if close else f"; units: {', '.join(units)}"
        raise ValueError(f"unknown unit '{match[2]}' in '{value}'{hint}")
    return float(match[1]), match[2]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
