"""Buckets: the few static sizes programs are compiled for, and which one a launch takes.

A launch of n rows (or tokens) runs in the smallest bucket that holds n and is padded to it. Decode programs number row
buckets x {1, K steps}, and extend programs and those that score prompts token buckets each, so the limits below keep the sum at
18: with the two small programs beside them an engine compiles twenty at most. Knows numbers only.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

MAX_ROW_BUCKETS = 5
MAX_TOKEN_BUCKETS = 4
MIN_ROW_BUCKET = 8
"""A smaller batch costs about the same: weights are read once either way, kernels work on 8 tokens at least, and a row that is
not there has no context to read. Only a single row of a long context gains something, if its attention may be cut into as many
pieces as the device takes."""
NOTHING_GAINED = 16
"""As many rows take what twice as many do (8B on an H200: 4.73 and 4.71 ms a step, 8 rows 4.43), and two more programs compile
for seconds at a cold start."""
MIN_TOKEN_BUCKET = 16
"""A smaller launch costs the same: the weights are read once either way, and a matmul tile has at least 16 rows."""
FEW_TOKENS = 256
"""A launch of fewer tokens costs about what one of so many does: it waits for the weights."""


def choose_row_buckets(max_sequences: int) -> tuple[int, ...]:
    """At most five rising batch sizes up to `max_sequences`: powers of two from 8 on, evenly spaced in the exponent (256: 8 32 64
    128 256), without `NOTHING_GAINED`, and a single row where these are fewer than five (64: 1 8 32 64; 8: 1 8).
    """
    first, last = math.log2(MIN_ROW_BUCKET), math.log2(max(max_sequences, MIN_ROW_BUCKET))
    gaps = MAX_ROW_BUCKETS - 1
    powers = {2 ** math.ceil(first + (last - first) * i / gaps) for i in range(gaps)}
    sizes = {*(p for p in powers if p < max_sequences and p != NOTHING_GAINED), max_sequences}
    if len(sizes) < MAX_ROW_BUCKETS:
        sizes.add(1)
    return tuple(sorted(sizes))


def choose_token_buckets(max_tokens_per_step: int) -> tuple[int, ...]:
    """At most four rising token counts up to `max_tokens_per_step`, each about a quarter of the next, but `FEW_TOKENS` instead of
    a quarter that is smaller (2048: 64 256 512 2048): many prompts are about as long, and less saves little.
    """
    buckets = [max_tokens_per_step]
    while len(buckets) < MAX_TOKEN_BUCKETS and buckets[0] > MIN_TOKEN_BUCKET:
        smaller = 2 ** math.ceil(math.log2(buckets[0] / 4))
        if len(buckets) > 1 and smaller < FEW_TOKENS < buckets[0]:
            smaller = FEW_TOKENS
        buckets.insert(0, max(smaller, MIN_TOKEN_BUCKET))
    return tuple(buckets)


def pick(buckets: Sequence[int], n: int) -> int:
    """The smallest of the rising `buckets` that holds `n`, which must be between 1 and the last bucket."""
    assert 1 <= n <= buckets[-1], f"{n} is outside 1..{buckets[-1]}"
    return buckets[bisect.bisect_left(buckets, n)]
