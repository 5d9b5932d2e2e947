"""Which tokens end a sequence, collected from whatever a model's files say. Host only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llmjax.errors import ModelError


def collect_eos_ids(values: Iterable[tuple[str, Any]], vocab_size: int) -> tuple[int, ...]:
    """Ids in the order they are first named, each once.

    Args:
        values: (where it was found, id or list of ids or None).
        vocab_size: ids outside 0..vocab_size-1 (some files say -1) end nothing and are left out.

    Raises `ModelError` naming the place for anything that is not a whole number.
    """
    found: dict[int, None] = {}
    for where, value in values:
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ModelError(f"{where}: eos_token_id must be a token id or a list of them, got {value!r:.80}")
            if 0 <= token < vocab_size:
                found[token] = None
    return tuple(found)
