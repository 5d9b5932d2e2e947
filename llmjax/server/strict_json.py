"""Strict JSON: UTF-8, no duplicate keys, no NaN, and a clear refusal of anything hostile. Knows nothing of requests."""

from __future__ import annotations

import collections
import json
from typing import Any

from llmjax.errors import RequestError


def load_json(data: bytes | str) -> Any:
    """Parse one JSON value. Raises `RequestError` with the place of the mistake, also for deep nesting and endless numbers."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RequestError:
        raise
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 at byte {error.start}: send JSON encoded as UTF-8") from None
    except json.JSONDecodeError as error:
        raise RequestError(f"not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise RequestError("not valid JSON: nested too deeply") from None
    except ValueError:  # int() refuses more than 4300 digits
        raise RequestError("not valid JSON: a number has too many digits") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise RequestError(f"not valid JSON: the key {twice!a:.80} appears twice", printable(twice))
    return out


def _no_constant(name: str) -> Any:
    raise RequestError(f"not valid JSON: {name} is not a JSON number")


def printable(text: str) -> str:
    """ASCII of at most 80 characters, for putting a client's own words into a message."""
    return text.encode("ascii", "backslashreplace").decode()[:80]


def kind(value: Any) -> str:
    """A JSON value's type in words: "a list", "null", ..."""
    names: dict[type, str] = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)
