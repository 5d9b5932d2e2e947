"""The calls that a prefill of each preset makes of attention, over pages and over contiguous keys, and variants of one of them.

What counts here is multiplications: a case has FLOPs beside its bytes. Data come from a seed; nothing here times anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel_cases import PAGE_SIZES, Case, Group
from llmjax.model.checkpoint.presets import preset_config
from pallas_kernels.flash_attention import FLASH_ATTENTION
from pallas_kernels.flash_attention.xla import Biases, Rows
from pallas_kernels.paged_attention import PAGED_ATTENTION
from pallas_kernels.smoke import Call

TURNS = 2
"""Different keys and values: they are read once a call and hardly count."""

CONTEXT = 8192  # what a row of the page table has room for

# Queries of one prompt, and the keys in front of them.
CHUNKS = ((2048, 0), (8192, 0), (512, 3584), (1024, 7168), (256, 1792), (4096, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashCase(Case):
    """A case over contiguous keys.

    Attributes:
        window: as in the operation. biased: whether anything depends on distances.
    """

    window: int = 0
    biased: bool = False


def paged_groups(model: str) -> Iterator[Group]:
    """Chunks of one prompt as the engine computes them, beside rows that are padding."""
    config = preset_config(model)
    dtype = jnp.dtype(config.dtype)
    rows = 64
    rank = 0
    for page in PAGE_SIZES:
        for tokens, prefix in CHUNKS:
            length, width = tokens + prefix, CONTEXT // page
            pages = 1 + width

            def data(seed: int, page: int = page, length: int = length, pages: int = pages) -> dict[str, jax.Array]:
                random = np.random.default_rng(seed)
                table = np.zeros((rows, pages - 1), np.int32)
                used = -(-length // page)
                table[0, :used] = 1 + random.permutation(pages - 1)[:used]
                owned = np.zeros((pages, page), bool)
                owned[table[0, :used]] = (np.arange(used * page) < length).reshape(used, page)
                keep = jnp.tile(jnp.asarray(owned), (TURNS, 1))[:, None, :, None]
                shape = (TURNS * pages, config.num_kv_heads, page, config.head_dim)
                keys = jax.random.split(jax.random.key(seed))
                k, v = (jnp.where(keep, jax.random.normal(key, shape, dtype), jnp.nan).astype(dtype) for key in keys)
                return {"k": k, "v": v, "table": jnp.asarray(table)}

            def arguments(
                q: jax.Array, data: dict[str, jax.Array], turn: int, _: jax.Array, length: int = length, pages: int = pages
            ) -> Call:
                lengths = jnp.zeros((rows,), jnp.int32).at[0].set(length)
                starts = jnp.full((rows + 1,), len(q), jnp.int32).at[0].set(0)
                args = (q, data["k"], data["v"], data["table"], lengths, starts)
                scale = float(config.head_dim) ** -0.5
                offset = jnp.int32(turn * pages)
                return Call(args, {"page_offset": offset, "scale": scale, "window": 0, "soft_cap": 0.0, "decode": False})

            case = Case(
                name=f"{tokens} queries on {prefix} more keys, page {page}",
                operation=PAGED_ATTENTION,
                model=model,
                rows=tokens,
                count=config.num_layers,
                bytes=_bytes(model, tokens, length),
                flops=_flops(model, tokens, prefix),
                query=_query(model, tokens),
                arguments=arguments,
            )
            name = f"{model} prefill {case.name}"
            yield Group(name=name, cases=(case,), data=data, turns=lambda _: range(TURNS), rank=rank)
            rank += 1


def contiguous_groups(model: str) -> Iterator[Group]:
    """One causal prompt over contiguous keys: the model's heads, then variants of them."""
    config = preset_config(model)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "multi-head": {"kv_heads": heads},
        "multi-query": {"kv_heads": 1},
        "window 1024": {"window": 1024},
        "ALiBi": {"slopes": True},
        "relative bias of 128": {"bias": 128},
    }
    for rank, (name, tokens) in enumerate((name, tokens) for tokens in (8192, 2048) for name in variants):
        yield _contiguous_group(model, name, tokens, rank, **{"kv_heads": kv_heads} | variants[name])


def _contiguous_group(
    model: str, name: str, tokens: int, rank: int, *, kv_heads: int, window: int = 0, slopes: bool = False, bias: int = 0
) -> Group:
    config = preset_config(model)
    dtype = jnp.dtype(config.dtype)

    def data(seed: int) -> dict[str, jax.Array | None]:
        keys = jax.random.split(jax.random.key(seed), 4)
        shape = (TURNS, tokens, kv_heads, config.head_dim)
        return {
            "k": jax.random.normal(keys[0], shape, dtype),
            "v": jax.random.normal(keys[1], shape, dtype),
            "slopes": jax.random.uniform(keys[2], (config.num_heads,), jnp.float32, 0.01, 0.3) if slopes else None,
            "bias": jax.random.normal(keys[3], (config.num_heads, bias), jnp.float32) if bias else None,
        }

    def arguments(q: jax.Array, data: dict[str, jax.Array | None], turn: int, _: jax.Array) -> Call:
        k, v = data["k"], data["v"]
        assert k is not None
        assert v is not None
        starts = jnp.array([0, tokens], jnp.int32)
        rows = Rows(starts, starts, jnp.int32(window))
        options = {"causal": True, "scale": float(config.head_dim) ** -0.5, "soft_cap": 0.0, "return_lse": False}
        return Call((q, k[turn], v[turn], Biases(data["slopes"], data["bias"], None), rows), options)

    case = FlashCase(
        name=f"{name}, {tokens} tokens",
        operation=FLASH_ATTENTION,
        model=model,
        rows=tokens,
        count=config.num_layers,
        bytes=_bytes(model, tokens, tokens, kv_heads),
        flops=_flops(model, tokens, 0, window),
        query=_query(model, tokens),
        arguments=arguments,
        window=window,
        biased=slopes or bias > 0,
    )
    return Group(name=f"{model} flash {case.name}", cases=(case,), data=data, turns=lambda _: range(TURNS), rank=rank)


def _query(model: str, tokens: int) -> Callable[[jax.Array], jax.Array]:
    config = preset_config(model)
    return lambda key: jax.random.normal(key, (tokens, config.num_heads, config.head_dim), jnp.dtype(config.dtype))


def _bytes(model: str, tokens: int, length: int, kv_heads: int = 0) -> int:
    """Queries, results, keys and values, each once."""
    config = preset_config(model)
    heads = 2 * tokens * config.num_heads + 2 * length * (kv_heads or config.num_kv_heads)
    return heads * config.head_dim * jnp.dtype(config.dtype).itemsize


def _flops(model: str, tokens: int, prefix: int, window: int = 0) -> int:
    """Two products of each query with each key that it sees."""
    config = preset_config(model)
    seen = prefix + 1 + np.arange(tokens, dtype=np.int64)
    seen = np.minimum(seen, window) if window else seen
    return 4 * config.num_heads * config.head_dim * int(seen.sum())


FLASH_GROUPS: dict[str, Callable[[str], Iterator[Group]]] = {
    FLASH_ATTENTION.name: contiguous_groups,
    "paged_prefill": paged_groups,
}
