"""Whether an output has run into a loop: "!!!!", one sentence over and over. Host only, over token ids."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PIECE = 64
"""Tokens of the longest piece whose repetition is looked for."""
REPEATS = 4
"""Times that a piece stands at the end of a loop."""
LOOP_TOKENS = 16
"""Tokens that the repetitions cover at least: a shorter run may well be meant."""
NGRAM = 4
DISTINCT = 0.4
"""Share of n-grams that are the first of their kind, below which a long output is a loop even if its pieces differ a little."""
NGRAM_TOKENS = 48
"""Tokens from which on that share is looked at."""


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether an output ends in a piece said over and over (the last time it may be cut), or has hardly an n-gram said once."""
    if any(_covered(tokens, piece) >= max(LOOP_TOKENS, REPEATS * piece) for piece in range(1, LONGEST_PIECE + 1)):
        return True
    return len(tokens) >= NGRAM_TOKENS and distinct_share(tokens) < DISTINCT


def distinct_share(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Different n-grams by n-grams; 1 for an output too short to have one."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _covered(tokens: Sequence[int], piece: int) -> int:
    """Tokens at the end that repeat with this period."""
    run = 0
    while run + piece < len(tokens) and tokens[-1 - run] == tokens[-1 - run - piece]:
        run += 1
    return run + piece if run else 0
