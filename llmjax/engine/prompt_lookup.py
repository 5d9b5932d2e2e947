"""`PromptLookup`: prompt lookup on the host, token by token, for rows whose drafts the host makes. `ngram` is the device's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PromptLookup:
    """The tokens of one text so far, and what followed its last ones where they stood before.

    Args:
        size: tokens that it can come to have, drafts included.
    """

    def __init__(self, size: int) -> None:
        self._ids = np.zeros(size, np.int32)
        self._count = 0

    def __len__(self) -> int:
        """Tokens so far."""
        return self._count

    def add(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        self._ids[self._count : self._count + len(tokens)] = tokens
        self._count += len(tokens)

    def next(self, drafts: Sequence[int], *, shortest: int, longest: int) -> int | None:
        """What followed the last tokens, were the text to go on with `drafts`; None where they did not occur before.

        The most last tokens that occurred before count, `longest` at most and `shortest` at least; of several places the latest.
        Looks at every token once.
        """
        end = self._count + len(drafts)
        self._ids[self._count : end] = drafts
        ids = self._ids[:end]
        places = np.flatnonzero(ids[:-1] == ids[-1])
        found = places if shortest == 1 else places[:0]
        for back in range(1, longest):
            places = places[places >= back]
            places = places[ids[places - back] == ids[end - 1 - back]]
            if not len(places):
                break
            if back + 1 >= shortest:
                found = places
        return int(ids[found[-1] + 1]) if len(found) else None
