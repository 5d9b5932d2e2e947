"""The cases every implementation of paged attention must serve: geometries of real models, batches that hurt.

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
        rows: (sequence length, queries) of each row, in tokens; (0, 0) is a padding row.
        table_pages: columns of the page table; 0 takes as many as the longest row needs.
        pool_pages: pages of a layer; 0 takes what the rows need, the null page, and a tenth more that stay free.
        padded_tokens: entries of q behind the last row.
        layers, layer: the caches hold `layers` layers, of which this is one.
        window, soft_cap, max_queries: as in the operation.
        alibi: whether there are ALiBi slopes. bias_width: distances of a relative bias, 0 for none (`make_biases`).
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    rows: tuple[tuple[int, int], ...]
    decode: bool = False
    table_pages: int = 0
    pool_pages: int = 0
    padded_tokens: int = 0
    layers: int = 1
    layer: int = 0
    window: int = 0
    soft_cap: float = 0.0
    max_queries: int = 0
    alibi: bool = False
    bias_width: int = 0
    dtype: str = "float32"

    @property
    def scale(self) -> float:
        """The usual one over the root of the head dim."""
        return float(self.head_dim) ** -0.5


class Inputs(NamedTuple):
    """Positional arguments of the operation, as NumPy arrays."""

    q: Array
    k_cache: Array
    v_cache: Array
    page_table: Array
    seq_lens: Array
    query_starts: Array


def make_inputs(case: Case, *, poison: float = float("nan"), seed: int = 0) -> tuple[Inputs, int]:
    """Random arguments for a case (caches and q in float32; the caller casts), and the page offset of its layer.

    Pages are dealt out in random order. Everything no row owns is filled with `poison`: the null page, free pages, the slots
    behind each sequence's end, the other layers, and the padding of q.
    """
    random = np.random.default_rng(seed)
    lengths = np.array([length for length, _ in case.rows], np.int32)
    queries = np.array([count for _, count in case.rows], np.int32)
    needed = -(-lengths // case.page_size)
    columns = case.table_pages or max(1, int(needed.max()))
    used = int(needed.sum())
    pages_per_layer = case.pool_pages or 1 + used + used // 10
    ids = 1 + random.permutation(pages_per_layer - 1)[:used].astype(np.int32)

    shape = (case.layers * pages_per_layer, case.num_kv_heads, case.page_size, case.head_dim)
    k_cache, v_cache = np.full(shape, poison, np.float32), np.full(shape, poison, np.float32)
    page_table = np.zeros((len(lengths), columns), np.int32)
    offset = case.layer * pages_per_layer
    for row, length in enumerate(lengths):
        own, ids = ids[: needed[row]], ids[needed[row] :]
        page_table[row, : len(own)] = own
        token = np.arange(length)
        slots = (own[token // case.page_size] + offset, slice(None), token % case.page_size)
        for cache in (k_cache, v_cache):
            cache[slots] = random.standard_normal((length, case.num_kv_heads, case.head_dim))

    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    q = np.full((int(starts[-1]) + case.padded_tokens, case.num_heads, case.head_dim), poison, np.float32)
    q[: starts[-1]] = random.standard_normal((int(starts[-1]), case.num_heads, case.head_dim))
    if case.decode:  # a padding row still has its place in q
        packed, q = q, np.full((len(lengths), *q.shape[1:]), poison, np.float32)
        q[lengths > 0] = packed[: starts[-1]]
        starts = np.arange(len(lengths) + 1, dtype=np.int32)
    return Inputs(q, k_cache, v_cache, page_table, lengths, starts), offset


def make_biases(case: Case, *, seed: int = 0) -> dict[str, Array]:
    """The keyword arguments `alibi_slopes` and `relative_bias` of a case, those that it has."""
    random = np.random.default_rng(seed)
    found = {}
    if case.alibi:
        found["alibi_slopes"] = random.uniform(0.01, 0.3, case.num_heads).astype(np.float32)
    if case.bias_width:
        found["relative_bias"] = random.standard_normal((case.num_heads, case.bias_width)).astype(np.float32)
    return found


# Heads, kv heads, head dim of models in use.
SMOLLM2_135M = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
QWEN2_5_1_5B = {"num_heads": 12, "num_kv_heads": 2, "head_dim": 128}
LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}

# Cases of one shape: only the data differ, so that they share a compiled program.
_DECODE = {**SMOLLM2_135M, "page_size": 16, "decode": True, "table_pages": 64, "pool_pages": 130, "layers": 3, "layer": 1}
_EXTEND = {**SMOLLM2_135M, "page_size": 16, "table_pages": 24, "pool_pages": 80, "layers": 2, "layer": 1}

RAGGED_DECODE = Case(
    name="ragged, with padding rows",
    **_DECODE,
    rows=((1, 1), (16, 1), (0, 0), (17, 1), (300, 1), (127, 1), (128, 1), (129, 1), (0, 0), (0, 0)),
)
RAGGED_EXTEND = Case(
    name="ragged: prefill, decode, chunk on a prefix, padding",
    **_EXTEND,
    rows=((130, 1), (70, 70), (37, 5), (0, 0), (1, 1), (257, 65), (64, 64), (200, 2)),
    padded_tokens=5,
)

DECODE = (
    RAGGED_DECODE,
    Case(name="all rows padding", **_DECODE, rows=((0, 0),) * 10),
    Case(name="1 query on 1000 keys", **_DECODE, rows=((0, 0), (3, 1), (1000, 1), *((0, 0),) * 7)),
    Case(name="window", **_DECODE, rows=((400, 1), (40, 1), (9, 1), (41, 1), *((0, 0),) * 6), window=40),
    Case(name="groups of 6, page 64", **QWEN2_5_1_5B, page_size=64, rows=((64, 1), (65, 1), (191, 1)), decode=True),
    Case(name="bfloat16, page 32", **LLAMA_8B, page_size=32, rows=((200, 1), (31, 1)), decode=True, dtype="bfloat16"),
    Case(
        name="soft cap, multi-query, head dim 80",
        num_heads=4,
        num_kv_heads=1,
        head_dim=80,
        page_size=16,
        rows=((50, 1), (7, 1)),
        decode=True,
        soft_cap=2.0,
    ),
    Case(name="ALiBi", **_DECODE, rows=((300, 1), (1, 1), (0, 0), (65, 1), *((0, 0),) * 6), alibi=True),
    Case(
        name="relative bias, soft cap, window",
        **_DECODE,
        rows=((300, 1), (1, 1), (0, 0), (65, 1), *((0, 0),) * 6),
        bias_width=33,
        soft_cap=2.0,
        window=70,
    ),
)

VERIFY = (
    Case(name="1 to 8 queries", **_EXTEND, rows=((130, 1), (70, 8), (37, 5), (0, 0), (1, 1), (257, 8), (3, 3)), max_queries=8),
    Case(name="at most one, packed", **_EXTEND, rows=((130, 1), (0, 0), (70, 1), (33, 0)), padded_tokens=4, max_queries=1),
    Case(
        name="both biases, window",
        **_EXTEND,
        rows=((130, 4), (70, 3), (2, 2)),
        padded_tokens=2,
        max_queries=4,
        alibi=True,
        bias_width=20,
        window=50,
    ),
)

EXTEND = (
    RAGGED_EXTEND,
    Case(name="one prompt, past tile and chunk", **_EXTEND, rows=((150, 150), *((0, 0),) * 7), padded_tokens=63),
    Case(name="all rows padding", **_EXTEND, rows=((0, 0),) * 8, padded_tokens=213),
    Case(name="decoding rows only", **_EXTEND, rows=((20, 1), (33, 1), *((0, 0),) * 6), padded_tokens=211),
    Case(name="5 queries on 37 keys", **_EXTEND, rows=(*((0, 0),) * 7, (37, 5)), padded_tokens=208),
    Case(name="groups of 6, window", **QWEN2_5_1_5B, page_size=16, rows=((180, 50), (30, 30), (300, 1)), window=33),
    Case(name="bfloat16, page 64", **LLAMA_8B, page_size=64, rows=((90, 90), (70, 3)), dtype="bfloat16"),
    Case(
        name="soft cap, multi-head, head dim 24",
        num_heads=3,
        num_kv_heads=3,
        head_dim=24,
        page_size=16,
        rows=((40, 9), (18, 18)),
        soft_cap=3.0,
    ),
    Case(
        name="head dim 96, page 24",
        num_heads=4,
        num_kv_heads=2,
        head_dim=96,
        page_size=24,
        rows=((170, 20), (24, 24), (25, 1)),
    ),
    Case(
        name="head dim 112, float16",
        num_heads=4,
        num_kv_heads=2,
        head_dim=112,
        page_size=32,
        rows=((33, 32), (31, 31)),
        dtype="float16",
    ),
    Case(
        name="33 heads on 11, pages of one token", num_heads=33, num_kv_heads=11, head_dim=8, page_size=1, rows=((21, 6), (5, 5))
    ),
    Case(name="pages larger than a chunk", num_heads=2, num_kv_heads=2, head_dim=16, page_size=256, rows=((300, 10), (256, 256))),
)
