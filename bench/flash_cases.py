"""The calls that a prefill of each preset makes of attention, over pages and over contiguous keys, and variants of one of them.

What counts here is multiplications: a case has FLOPs beside its bytes. Data come from a seed; nothing here times anything.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel_cases import PAGE_SIZES, Case, Group, traffic_lengths
from llmjax.model.checkpoint.presets import preset_config
from llmjax.model.config import ModelConfig
from pallas_kernels.flash_attention import FLASH_ATTENTION
from pallas_kernels.flash_attention.xla import Biases, Rows
from pallas_kernels.paged_attention import PAGED_ATTENTION
from pallas_kernels.smoke import Call

TURNS = 2
"""Different keys and values: they are read once a call and hardly count."""

CONTEXT = 8192  # what a row of the page table has room for

# Queries of one prompt, and the keys in front of them.
CHUNKS = ((2048, 0), (8192, 0), (512, 3584), (1024, 7168), (256, 1792), (4096, 0))

# Launches of so many tokens and rows; the last rows have these prompts, the others decode.
ROWS = 256
MIXED = {512: (257,), 2048: (30, 60, 110, 190, 330, 420, 666)}


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of causal attention: kv heads, and what its scores get."""

    kv_heads: int
    window: int = 0
    slopes: bool = False
    bias: int = 0

    def options(self, heads: int, seed: int) -> dict[str, Any]:
        """The arguments of `flash_attention` that it takes."""
        keys = jax.random.split(jax.random.key(seed))
        found: dict[str, Any] = {"window": self.window} if self.window else {}
        if self.slopes:
            found["alibi_slopes"] = jax.random.uniform(keys[0], (heads,), jnp.float32, 0.01, 0.3)
        if self.bias:
            found["relative_bias"] = jax.random.normal(keys[1], (heads, self.bias), jnp.float32)
        return found


def forms(config: ModelConfig) -> dict[str, Form]:
    """The model's own heads first; the others differ from it in one thing each."""
    plain = Form(config.num_kv_heads)
    return {
        "plain": plain,
        "multi-head": Form(config.num_heads),
        "multi-query": Form(1),
        "window 1024": dataclasses.replace(plain, window=1024),
        "ALiBi": dataclasses.replace(plain, slopes=True),
        "relative bias of 128": dataclasses.replace(plain, bias=128),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashCase(Case):
    """A case over contiguous keys.

    Attributes:
        window: as in the operation. biased: whether anything depends on distances.
    """

    window: int = 0
    biased: bool = False


def paged_groups(model: str) -> Iterator[Group]:
    """Chunks of one prompt as the engine computes them, beside rows that are padding; and launches beside rows that decode."""
    for rank, (page, (tokens, prefix)) in enumerate(itertools.product(PAGE_SIZES, CHUNKS)):
        name = f"{tokens} queries on {prefix} more keys, page {page}"
        yield _paged_group(model, name, page, [(tokens, prefix)], 64, rank)
    for tokens, prompts in MIXED.items():
        decoding = min(ROWS - len(prompts), tokens - sum(prompts))
        chunks = [(1, prefix) for prefix in traffic_lengths(decoding).tolist()] + [(prompt, 0) for prompt in prompts]
        name = f"{decoding} decoding rows and prompts of {sum(prompts)}, page 16"
        yield _paged_group(model, name, 16, chunks, ROWS, rank=1)


def _paged_group(model: str, name: str, page: int, chunks: Sequence[tuple[int, int]], rows: int, rank: int) -> Group:
    """One launch: of each chunk its queries and the keys in front of them; padding up to `rows`."""
    config = preset_config(model)
    dtype = jnp.dtype(config.dtype)
    width = CONTEXT // page
    tokens = sum(queries for queries, _ in chunks)
    lengths = np.zeros(rows, np.int32)
    lengths[: len(chunks)] = [sum(chunk) for chunk in chunks]
    starts = np.full(rows + 1, tokens, np.int32)
    starts[: len(chunks)] = np.cumsum([0, *(queries for queries, _ in chunks[:-1])])
    used = -(-lengths // page)
    pages = 1 + max(int(used.sum()), width)

    def data(seed: int) -> dict[str, jax.Array]:
        ids = 1 + np.random.default_rng(seed).permutation(pages - 1)
        table, owned, taken = np.zeros((rows, width), np.int32), np.zeros((pages, page), bool), 0
        for row, (length, count) in enumerate(zip(lengths, used, strict=True)):
            table[row, :count] = ids[taken : taken + count]
            owned[table[row, :count]] = (np.arange(count * page) < length).reshape(count, page)
            taken += count
        keep = jnp.tile(jnp.asarray(owned), (TURNS, 1))[:, None, :, None]
        shape = (TURNS * pages, config.num_kv_heads, page, config.head_dim)
        keys = jax.random.split(jax.random.key(seed))
        k, v = (jnp.where(keep, jax.random.normal(key, shape, dtype), jnp.nan).astype(dtype) for key in keys)
        return {"k": k, "v": v, "table": jnp.asarray(table)}

    def arguments(q: jax.Array, data: dict[str, jax.Array], turn: int, _: jax.Array) -> Call:
        args = (q, data["k"], data["v"], data["table"], jnp.asarray(lengths), jnp.asarray(starts))
        options = {"scale": float(config.head_dim) ** -0.5, "window": 0, "soft_cap": 0.0, "decode": False}
        return Call(args, {"page_offset": jnp.int32(turn * pages), **options})

    case = Case(
        name=name,
        operation=PAGED_ATTENTION,
        model=model,
        rows=tokens,
        count=config.num_layers,
        bytes=_bytes(model, tokens, int(lengths.sum())),
        flops=sum(_flops(model, *chunk) for chunk in chunks),
        query=_query(model, tokens),
        arguments=arguments,
    )
    return Group(name=f"{model} prefill {name}", cases=(case,), data=data, turns=lambda _: range(TURNS), rank=rank)


def contiguous_groups(model: str) -> Iterator[Group]:
    """One causal prompt over contiguous keys: the model's heads, then variants of them."""
    found = forms(preset_config(model))
    for rank, (name, tokens) in enumerate((name, tokens) for tokens in (8192, 2048) for name in found):
        yield _contiguous_group(model, name, tokens, rank, found[name])


def _contiguous_group(model: str, name: str, tokens: int, rank: int, form: Form) -> Group:
    config = preset_config(model)
    dtype = jnp.dtype(config.dtype)

    def data(seed: int) -> dict[str, jax.Array | None]:
        keys = jax.random.split(jax.random.key(seed))
        shape = (TURNS, tokens, form.kv_heads, config.head_dim)
        options = form.options(config.num_heads, seed + 1)
        return {
            "k": jax.random.normal(keys[0], shape, dtype),
            "v": jax.random.normal(keys[1], shape, dtype),
            "slopes": options.get("alibi_slopes"),
            "bias": options.get("relative_bias"),
        }

    def arguments(q: jax.Array, data: dict[str, jax.Array | None], turn: int, _: jax.Array) -> Call:
        k, v = data["k"], data["v"]
        assert k is not None
        assert v is not None
        starts = jnp.array([0, tokens], jnp.int32)
        rows = Rows(starts, starts, jnp.int32(form.window))
        options = {"causal": True, "scale": float(config.head_dim) ** -0.5, "soft_cap": 0.0, "return_lse": False}
        return Call((q, k[turn], v[turn], Biases(data["slopes"], data["bias"], None), rows), options)

    case = FlashCase(
        name=f"{name}, {tokens} tokens",
        operation=FLASH_ATTENTION,
        model=model,
        rows=tokens,
        count=config.num_layers,
        bytes=_bytes(model, tokens, tokens, form.kv_heads),
        flops=_flops(model, tokens, 0, form.window),
        query=_query(model, tokens),
        arguments=arguments,
        window=form.window,
        biased=form.slopes or form.bias > 0,
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
