"""`OutputLengths`: how many tokens a request will probably give, learned from those that have ended.

A guess only: it chooses a lane and is charged to it, and never ends an output. Knows no requests, lanes or clock.
"""

from __future__ import annotations

import bisect
from collections import deque

QUANTILE = 0.75
"""Of the latest outputs of the class. Above the middle, because a long output in the short lane costs more than the reverse."""
WINDOW = 128
"""Outputs of a class that are remembered: the guess follows traffic that changes."""
ENOUGH = 8
"""Outputs of a class before it is trusted."""
PRIOR = 256
"""The guess before that, or the limit if it is lower."""


class OutputLengths:
    """A running quantile for each class: prompts and limits of the same power of two belong together."""

    def __init__(self) -> None:
        self._classes: dict[tuple[int, int], tuple[deque[int], list[int]]] = {}  # by age, and sorted

    def expect(self, prompt_tokens: int, limit: int) -> int:
        """New tokens to expect of a prompt of `prompt_tokens` tokens that may give `limit`; never more than that."""
        _, lengths = self._classes.get(_class(prompt_tokens, limit), ((), ()))
        if len(lengths) < ENOUGH:
            return min(limit, PRIOR)
        return min(limit, lengths[int(QUANTILE * (len(lengths) - 1))])

    def learn(self, prompt_tokens: int, limit: int, output_tokens: int) -> None:
        """A request has ended by itself (a stop, or its limit) after `output_tokens`."""
        by_age, lengths = self._classes.setdefault(_class(prompt_tokens, limit), (deque(), []))
        by_age.append(output_tokens)
        bisect.insort(lengths, output_tokens)
        if len(by_age) > WINDOW:
            del lengths[bisect.bisect_left(lengths, by_age.popleft())]


def _class(prompt_tokens: int, limit: int) -> tuple[int, int]:
    return prompt_tokens.bit_length(), limit.bit_length()
