"""Read one JSON object from a file of a checkpoint. Host only; every failure is a `ModelError` that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmjax.errors import ModelError

_MAX_BYTES = 256 << 20


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in `path`; ModelError if it cannot be read, is too large, or is not a JSON object in UTF-8."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelError(f"{path}: larger than {_MAX_BYTES >> 20} MiB; that is no configuration file")
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot read it: {error.strerror or error}") from None
    return parse_json_object(data, path)


def parse_json_object(data: bytes, path: Path) -> dict[str, Any]:
    """The object in `data`, which came from `path`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value
