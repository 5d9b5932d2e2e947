"""The cases every implementation of flash attention must serve: geometries of real models, batches that hurt.

Data only, plus the inputs made from it; used by tests and benchmarks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of the operation.

    Attributes:
        rows: (keys, queries) of each row.
        padded_tokens, padded_keys: entries of q, and of k and v, behind the last row.
        causal, window, soft_cap: as in the operation.
        alibi: whether there are slopes. bias_width: of a relative bias, 0 for none. masks: M of a mask, 0 for none.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: tuple[tuple[int, int], ...]
    padded_tokens: int = 0
    padded_keys: int = 0
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    alibi: bool = False
    bias_width: int = 0
    masks: int = 0
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        """The usual one over the root of the head dim."""
        return float(self.head_dim) ** -0.5

    @property
    def options(self) -> dict[str, Any]:
        """The static keyword arguments, and the window."""
        return {"causal": self.causal, "scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}


class Inputs(NamedTuple):
    """Positional arguments of the operation, as NumPy arrays."""

    q: Array
    k: Array
    v: Array
    query_starts: Array
    key_starts: Array


def make_inputs(case: Case, *, poison: float = float("nan"), seed: int = 0) -> Inputs:
    """Random arguments for a case in float32; the caller casts. What no row owns is filled with `poison`."""
    random = np.random.default_rng(seed)
    starts = [np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32) for sizes in np.reshape(case.rows, (-1, 2)).T]

    def filled(size: int, padding: int, heads: int) -> Array:
        own = random.standard_normal((size, heads, case.head_dim))
        return np.concatenate([own, np.full((padding, heads, case.head_dim), poison)]).astype(np.float32)

    key_starts, query_starts = starts
    q = filled(int(query_starts[-1]), case.padded_tokens, case.num_heads)
    k, v = (filled(int(key_starts[-1]), case.padded_keys, case.num_kv_heads) for _ in range(2))
    return Inputs(q, k, v, query_starts, key_starts)


def make_biases(case: Case, *, seed: int = 0) -> dict[str, Array]:
    """The keyword arguments `alibi_slopes`, `relative_bias` and `mask` of a case, those that it has, in float32.

    A mask hides a tenth of the keys with -inf, and holds NaN wherever no row has both the query and the key.
    """
    random = np.random.default_rng(seed)
    found = {}
    if case.alibi:
        found["alibi_slopes"] = random.uniform(0.01, 0.3, case.num_heads).astype(np.float32)
    if case.bias_width:
        found["relative_bias"] = random.standard_normal((case.num_heads, case.bias_width)).astype(np.float32)
    if case.masks:
        keys, queries = np.sum(case.rows, axis=0)
        mask = np.full((case.masks, queries + case.padded_tokens, keys + case.padded_keys), np.nan, np.float32)
        q = k = 0
        for length, count in case.rows:
            own = random.standard_normal((case.masks, count, length))
            own[random.random(own.shape) < 0.1] = -np.inf
            mask[:, q : q + count, k : k + length] = own
            q, k = q + count, k + length
        found["mask"] = mask
    return found


_SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
_RAGGED = ((70, 70), (0, 0), (200, 33), (1, 1), (129, 2), (64, 64))

CASES = (
    Case(name="ragged, prefixes, padding", **_SMALL, rows=_RAGGED, padded_tokens=5, padded_keys=9),
    Case(name="all rows empty", **_SMALL, rows=((0, 0), (0, 0)), padded_tokens=170, padded_keys=352),
    Case(name="both directions", **_SMALL, rows=_RAGGED, causal=False, padded_tokens=5, padded_keys=9),
    Case(name="window", **_SMALL, rows=_RAGGED, window=20, padded_keys=3),
    Case(
        name="window in both directions, multi-head",
        num_heads=2, num_kv_heads=2, head_dim=80, rows=_RAGGED, causal=False, window=70,
    ),
    Case(name="multi-query, soft cap", num_heads=3, num_kv_heads=1, head_dim=24, rows=((150, 150), (40, 3)), soft_cap=1.5),
    Case(name="ALiBi, past the prefix of a long row", **_SMALL, rows=((300, 7), (90, 90)), alibi=True),
    Case(name="ALiBi in both directions", **_SMALL, rows=((130, 130), (20, 5)), alibi=True, causal=False),
    Case(name="relative bias", **_SMALL, rows=_RAGGED, bias_width=33, padded_tokens=2),
    Case(name="relative bias in both directions", **_SMALL, rows=((130, 130), (20, 5)), bias_width=31, causal=False),
    Case(name="mask for all heads", **_SMALL, rows=_RAGGED, masks=1, padded_tokens=5, padded_keys=2),
    Case(
        name="everything", **_SMALL, rows=_RAGGED, masks=4, alibi=True, bias_width=9, soft_cap=2.0, window=50, padded_tokens=1,
    ),
    Case(name="bfloat16", num_heads=8, num_kv_heads=2, head_dim=64, rows=((150, 150), (70, 5)), dtype="bfloat16"),
    Case(name="more queries than keys", **_SMALL, rows=((3, 70), (40, 90), (30, 30))),
    Case(name="one key", **_SMALL, rows=((1, 1),)),
)  # fmt: skip
