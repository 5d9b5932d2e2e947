"""Read single values out of an untrusted config dict. Host only.

A value of the wrong kind is an `UnsupportedModelError` that names the key, before any size is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llmjax.errors import UnsupportedModelError

_MAX_SIZE = 2**31 - 1
_REQUIRED: Any = object()


def whole(config: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, where: str = "config.json") -> int:
    """A whole number from 1 to 2**31 - 1. A missing or null key gives `default`, or is an error without one."""
    value = config.get(key)
    if value is None:
        if default is _REQUIRED:
            raise UnsupportedModelError(f"{where}: {key} is missing")
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
        raise UnsupportedModelError(f"{where}: {key} must be a whole number of at least 1, got {value!r}")
    return value


def number(config: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, where: str = "config.json") -> float:
    """A positive finite number. A missing or null key gives `default`, or is an error without one."""
    value = config.get(key)
    if value is None:
        if default is _REQUIRED:
            raise UnsupportedModelError(f"{where}: {key} is missing")
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < math.inf:
        raise UnsupportedModelError(f"{where}: {key} must be a positive number, got {value!r}")
    return float(value)


def optional_number(config: Mapping[str, Any], key: str, *, where: str = "config.json") -> float | None:
    """A positive finite number, or None when missing or null."""
    return None if config.get(key) is None else number(config, key, where=where)


def flag(config: Mapping[str, Any], key: str, default: bool, *, where: str = "config.json") -> bool:
    """True or false; a missing or null key gives `default`."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UnsupportedModelError(f"{where}: {key} must be true or false, got {value!r}")
    return value
