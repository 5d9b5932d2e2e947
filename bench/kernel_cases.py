"""The calls that a decode step of each preset makes of each operation: shapes, data, bytes, and what is asked of them.

Cases that read the same data form a group. Data come from a seed; nothing here times anything.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.traffic import mixed_lengths
from llmjax.model.checkpoint.presets import preset_config
from llmjax.scheduling.buckets import MIN_ROW_BUCKET
from pallas_kernels.dispatch import Operation
from pallas_kernels.fused_layer import FUSED_LAYER, MEETINGS, LayerParams, NextParams
from pallas_kernels.matmul import DENSE, GATED_DENSE, RESIDUAL_DENSE
from pallas_kernels.paged_attention import PAGED_ATTENTION
from pallas_kernels.quantized_pages import QuantizedPages, quantize_heads
from pallas_kernels.rope_kv_write import ROPE_KV_WRITE
from pallas_kernels.smoke import Call

L2_IS_COLD = 320_000_000
"""Bytes of different weights or pages that one round of calls reads: several times what the last-level cache holds."""

TOKENS = (32, 1, 256, 8, 64, 128, 16)  # by value: the first ones are timed even when there is little time
PAGE_SIZES = (16, 64, 32)

TRAFFIC_ROWS, TRAFFIC_ROOM = 32, 8192
"""From so many rows on, with room for contexts of so many tokens, decoding attention is timed on lengths as traffic has them."""
SHORT = 256
"""Where contexts of a run of 128 prompt and 128 output tokens end."""
SHORT_ROWS = 128
"""Batches of fewer rows are often short in a room for long ones: there both kinds count."""

LAYER_CALLS = 1 << 14
"""Calls of a layer in a launch, at most: each meets at barriers of its own, zero before it, as in a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of a call.

    Attributes:
        name: for people.
        model: the preset it comes from.
        rows: tokens of the call (rows of the batch, in decoding).
        count: calls of this shape in one step of the model.
        bytes: what a call must read from memory at least.
        flops: what it must multiply and add, where that takes longer than its bytes; 0 where it does not count.
        must, goal: TB/s asked for; None where only the reference is to be beaten.
        peerless: nobody else computes it.
        query: makes what is carried from call to call from a key: the small operand [T, ...], and what a call changes in place.
        arguments: (query, data, turn, round) -> the call. `turn` is one of the group's, `round` an int32 scalar.
        carry: (query, result) -> the query of the next call.
        kept: what of a call's result is kept to the end of a round. What is changed in place cannot be, or it would be copied.
        result: what of that is compared.
    """

    name: str
    operation: Operation
    model: str
    rows: int
    count: int
    bytes: int
    flops: int = 0
    must: float | None = None
    goal: float | None = None
    peerless: bool = False
    query: Callable[[jax.Array], Any]
    arguments: Callable[[Any, Any, Any, jax.Array], Call]
    carry: Callable[[Any, Any], Any] = lambda query, result: query
    kept: Callable[[Any], Any] = lambda result: result
    result: Callable[[Any], Any] = lambda result: result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Cases over the same data.

    Attributes:
        data: makes the large operands from a seed.
        turns: picks from the data what differs between the calls of a round, one entry a call.
        rank: the smaller, the sooner it is timed when there is little time.
    """

    name: str
    cases: tuple[Case, ...]
    data: Callable[[int], Any]
    turns: Callable[[Any], Sequence[Any]]
    rank: int


def dense_groups(model: str, tokens: Sequence[int] = TOKENS) -> Iterator[Group]:
    """The matmuls of a step on their own, each against as many different weights as keep the cache cold."""
    for rank, (part, (out, contracted, bias)) in enumerate(_parts(model).items()):
        out_dtype = jnp.float32 if part == "head" else None

        def arguments(x: jax.Array, turn: dict[str, Any], out_dtype: Any = out_dtype) -> Call:
            return Call((x, turn["w"], turn["bias"]), {"out_dtype": out_dtype})

        yield _matmul_group(DENSE, model, part, out, contracted, out, bias, tokens, arguments, rank)


def residual_groups(model: str, tokens: Sequence[int] = TOKENS) -> Iterator[Group]:
    """The matmuls that end in the residual stream, with its addition."""

    def arguments(x: jax.Array, turn: dict[str, Any]) -> Call:
        return Call((x, turn["w"], turn["residual"][: len(x)], turn["bias"]), {})

    for rank, part in enumerate(("down", "out")):
        out, contracted, bias = _parts(model)[part]
        yield _matmul_group(RESIDUAL_DENSE, model, part, out, contracted, out, bias, tokens, arguments, rank)


def gated_groups(model: str, tokens: Sequence[int] = TOKENS) -> Iterator[Group]:
    """Gate and up with the activation."""
    activation = preset_config(model).activation

    def arguments(x: jax.Array, turn: dict[str, Any]) -> Call:
        return Call((x, turn["w"], activation), {})

    out, contracted, bias = _parts(model)["gate_up"]
    if not bias:
        yield _matmul_group(GATED_DENSE, model, "gate_up", out, contracted, out // 2, bias, tokens, arguments, 0)


def _parts(model: str) -> dict[str, tuple[int, int, bool]]:
    """Rows, columns and bias of each weight."""
    config = preset_config(model)
    q, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    return {
        "gate_up": (2 * config.mlp_size, hidden, config.mlp_bias),
        "down": (hidden, config.mlp_size, config.mlp_bias),
        "qkv": (q + 2 * kv, hidden, config.qkv_bias),
        "out": (hidden, q, config.output_bias),
        "head": (config.vocab_size, hidden, False),
    }


def _matmul_group(
    operation: Operation,
    model: str,
    part: str,
    out: int,
    contracted: int,
    columns: int,
    bias: bool,
    tokens: Sequence[int],
    arguments: Callable[[jax.Array, dict[str, Any]], Call],
    rank: int,
) -> Group:
    """Cases of one weight; `columns` of the result, `arguments` from the small operand and a weight with what goes with it."""
    config = preset_config(model)
    dtype = jnp.dtype(config.dtype)
    size = out * contracted * dtype.itemsize
    copies = max(2, -(-L2_IS_COLD // size))
    large = size > 100_000_000

    def data(seed: int) -> list[dict[str, jax.Array | None]]:
        def one(key: jax.Array) -> dict[str, jax.Array | None]:
            w = jax.random.normal(key, (out, contracted), dtype) * dtype.type(contracted**-0.5)
            added = jax.random.normal(jax.random.fold_in(key, 1), (out,), dtype) if bias else None
            residual = jax.random.normal(jax.random.fold_in(key, 2), (max(tokens), columns), dtype)
            return {"w": w, "bias": added, "residual": residual if operation is RESIDUAL_DENSE else None}

        return [one(key) for key in jax.random.split(jax.random.key(seed), copies)]

    cases = tuple(
        Case(
            name=f"{part} {out}x{contracted}, {n} tokens",
            operation=operation,
            model=model,
            rows=n,
            count=1 if part == "head" else config.num_layers,
            bytes=size + n * contracted * dtype.itemsize + n * columns * (4 if part == "head" else dtype.itemsize),
            goal=(3.9 if large else 3.2) if model == "llama-8b" and n <= 128 else None,
            query=lambda key, n=n: jax.random.normal(key, (n, contracted), dtype),
            arguments=lambda x, _, turn, __: arguments(x, turn),
        )
        for n in tokens
    )
    return Group(name=f"{model} {operation.name} {part}", cases=cases, data=data, turns=lambda weights: weights, rank=rank)


def attention_groups(model: str, page_sizes: Sequence[int] = PAGE_SIZES) -> Iterator[Group]:
    """Decoding attention: the shapes asked for, the decode table's, and what else a table must know to serve all sizes; behind
    them the same over int8 pages."""
    asked = {(128, 2048): (3.3, 3.6), (32, 2048): (2.8, 3.2), (8, 8192): (2.8, 3.2)} if model == "llama-8b" else {}
    shapes = (
        (128, 2048), (32, 2048), (8, 8192), (32, 256), (256, 256), (1, 8192), (1, 256), (8, 256), (64, 256), (128, 256),
        (32, 4096), (1, 2048), (8, 2048), (64, 2048), (256, 2048), (32, 8192), (64, 8192), (128, 8192), (256, 8192),
    )  # fmt: skip
    for rank, (page_size, (rows, context)) in enumerate(itertools.product(page_sizes, shapes)):
        must, goal = asked.get((rows, context), (None, None))
        first = (rows, context) == (128, 2048)  # asked for with every page size
        yield _attention_group(model, rows, context, page_size, must, goal, 0 if first else rank, int8=False)
        yield _attention_group(model, rows, context, page_size, None, None, len(shapes) * len(page_sizes) + rank, int8=True)


def traffic_lengths(rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Contexts of rows that decode in the documented mixed trace, each somewhere in its output: [rows], 16 to 4095."""
    random = np.random.default_rng(0)
    prompts, outputs = (lengths.draw(random, rows) for lengths in mixed_lengths(1))
    return (prompts + random.uniform(0, 1, rows) * outputs).astype(np.int32)


def _attention_group(
    model: str, rows: int, context: int, page_size: int, must: float | None, goal: float | None, rank: int, *, int8: bool
) -> Group:
    config = preset_config(model)
    dtype = jnp.dtype(config.dtype)
    # Short contexts as in a run of 128 prompt and 128 output tokens; long ones full, as they are quoted; where many rows have
    # room for long ones, those of traffic.
    lengths, kind = np.full(rows, context, np.int32), ""
    end = min(context, SHORT)
    short = np.linspace(end // 2 + 1, end, rows + 2)[1:-1].round().astype(np.int32)
    if context <= SHORT:
        lengths = short
    elif rows >= TRAFFIC_ROWS and context == TRAFFIC_ROOM:
        lengths, kind = traffic_lengths(rows), "traffic in "
    head = config.head_dim + 4 if int8 else config.head_dim * dtype.itemsize  # its scale, if it has one
    token_bytes = 2 * config.num_kv_heads * head
    size = int(lengths.sum()) * token_bytes
    width = -(-context // page_size)
    needed = -(-lengths // page_size)
    taken = int(needed.sum())
    pages = 1 + taken + taken // 10  # the null page, and a tenth that nobody owns
    layers = max(2, -(-L2_IS_COLD // size))
    unrolled = min(layers, 16)

    @functools.partial(jax.jit, static_argnames="shape")
    def cache(key: jax.Array, keep: jax.Array, shape: tuple[int, ...]) -> jax.Array | QuantizedPages:
        values = jax.random.normal(key, shape, dtype)
        if not int8:
            return jnp.where(keep, values, jnp.nan).astype(dtype)
        qvalue, scale = quantize_heads(values, None)
        return QuantizedPages(jnp.where(keep, qvalue, -128).astype(jnp.int8), jnp.where(keep[..., 0], scale, jnp.nan))

    def data(seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        table = np.zeros((rows, width), np.int32)
        table[np.arange(width) < needed[:, None]] = 1 + random.permutation(pages - 1)[:taken]
        used = np.arange(width * page_size).reshape(width, page_size) < lengths[:, None, None]
        owned = np.zeros((pages, page_size), bool)
        owned[table[table > 0]] = used[table > 0]
        keep = jnp.tile(jnp.asarray(owned), (layers, 1))[:, None, :, None]
        shape = (layers * pages, config.num_kv_heads, page_size, config.head_dim)
        k, v = (cache(key, keep, shape) for key in jax.random.split(jax.random.key(seed)))
        return {
            "k": k, "v": v, "table": jnp.asarray(table), "lengths": jnp.asarray(lengths),
            "starts": jnp.arange(rows + 1, dtype=jnp.int32),
        }  # fmt: skip

    def arguments(q: jax.Array, data: dict[str, Any], turn: int, round: jax.Array, *, most: np.ndarray[Any, Any]) -> Call:
        layer = (round * unrolled + turn) % layers
        lengths = jnp.minimum(data["lengths"], jnp.asarray(most))
        args = (q, data["k"], data["v"], data["table"], lengths, data["starts"])
        scale = float(config.head_dim) ** -0.5
        return Call(args, {"page_offset": layer * pages, "scale": scale, "window": 0, "soft_cap": 0.0, "decode": True})

    def case(most: np.ndarray[Any, Any] = lengths, only: str = "") -> Case:
        return Case(
            name=name + only,
            operation=PAGED_ATTENTION,
            model=model,
            rows=rows,
            count=0 if only else config.num_layers,
            bytes=int(np.minimum(lengths, most).sum()) * token_bytes,
            must=None if only else must,
            goal=None if only else goal,
            peerless=int8,
            query=lambda key: jax.random.normal(key, (rows, config.num_heads, config.head_dim), dtype),
            arguments=functools.partial(arguments, most=most),
        )

    def part(live: int) -> Case:
        return case(np.where(np.arange(rows) < live, lengths, 0), f", {live} of them")

    name = f"{rows} rows x {kind}{context}, page {page_size}{', int8' * int8}"
    cases = [case()]
    if rows == MIN_ROW_BUCKET:  # the smallest batch that programs are made for serves a single row too
        cases.append(part(1))
    if context == TRAFFIC_ROOM and rows < SHORT_ROWS:
        cases.append(case(short, ", short"))
    if kind:  # padded: the longest row, which few CTAs read, is what all wait for
        cases.append(part(rows * 3 // 8))
    return Group(name=f"{model} attention {name}", cases=tuple(cases), data=data, turns=lambda _: range(unrolled), rank=rank)


def layer_groups(model: str, tokens: Sequence[int] = (8, 32, 64, 16)) -> Iterator[Group]:
    """A layer from one attention to the next, in the middle of the model and at its end."""
    config = preset_config(model)
    dtype = jnp.dtype(config.dtype)
    sizes = {name: (out, contracted) for name, (out, contracted, _) in _parts(model).items() if name != "head"}
    (hidden, q), (qkv, _) = sizes["out"], sizes["qkv"]
    for rank, last in enumerate((False, True)):
        read = sum(n * k for name, (n, k) in sizes.items() if not (last and name == "qkv")) * dtype.itemsize
        copies = max(2, -(-L2_IS_COLD // read))

        def data(seed: int, copies: int = copies) -> Any:
            def weights(key: jax.Array) -> dict[str, jax.Array]:
                keys = jax.random.split(key, len(sizes))
                return {
                    name: jax.random.normal(one, shape, dtype) * dtype.type(shape[1] ** -0.5)
                    for one, (name, shape) in zip(keys, sizes.items(), strict=True)
                }

            key, norm_key, residual_key = jax.random.split(jax.random.key(seed), 3)
            residual = jax.random.normal(residual_key, (64, hidden), dtype)
            norm = jax.random.uniform(norm_key, (hidden,), jnp.float32, 0.5, 1.5)
            return [(weights(one), residual, norm) for one in jax.random.split(key, copies)]

        def query(key: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
            return jax.random.normal(key, (n, q), dtype), jnp.zeros((MEETINGS * LAYER_CALLS,), jnp.int32)

        def arguments(query: Any, _: Any, turn: Any, round: jax.Array, last: bool = last, copies: int = copies) -> Call:
            x, meetings = query
            index, (w, residual, norm) = turn
            bias = jnp.ones((qkv,), dtype) if config.qkv_bias else None
            params = LayerParams(w["out"], None, norm, w["gate_up"], None, w["down"], None)
            following = None if last else NextParams(norm, w["qkv"], bias)
            args = (x, residual, meetings, jnp.int32(round * copies + index), params, following)
            return Call(args, {"activation": config.activation, "eps": config.norm_eps})

        cases = tuple(
            Case(
                name=f"{'last layer' if last else 'layer'}, {n} tokens",
                operation=FUSED_LAYER,
                model=model,
                rows=n,
                count=1 if last else config.num_layers - 1,
                bytes=read,
                query=functools.partial(query, n=n),
                arguments=arguments,
                carry=lambda query, result: (query[0], result[2]),
                kept=lambda result: result[:2],
                result=lambda result, n=n: [part[:n] for part in result if part is not None],
            )
            for n in tokens
        )
        name = f"{model} {'last layer' if last else 'layer'}"
        yield Group(name=name, cases=cases, data=data, turns=lambda weights: list(enumerate(weights)), rank=rank)


def rope_groups(model: str, tokens: Sequence[int] = TOKENS) -> Iterator[Group]:
    """From q, k and v to queries and cache, each token on a page of its own, with a cache of several layers written in turn.

    Of the results only the queries are compared: the caches are written in place.
    """
    config = preset_config(model)
    dtype = jnp.dtype(config.dtype)
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    page_size, layers = 16, 8
    for rank, n in enumerate(tokens):

        def data(seed: int, n: int = n) -> dict[str, jax.Array | None]:
            random = np.random.default_rng(seed)
            angles = random.uniform(0, 6, (n, dim // 2))
            weight = jnp.asarray(random.uniform(0.5, 1.5, dim), jnp.float32) if config.qk_norm else None
            return {
                "cos": jnp.asarray(np.cos(angles), jnp.float32), "sin": jnp.asarray(np.sin(angles), jnp.float32),
                "pages": jnp.asarray(1 + random.permutation(n), jnp.int32),
                "offsets": jnp.asarray(random.integers(0, page_size, n), jnp.int32), "norm": weight,
            }  # fmt: skip

        def query(key: jax.Array, n: int = n) -> tuple[jax.Array, jax.Array, jax.Array]:
            shape = (layers * (n + 1), kv_heads, page_size, dim)
            qkv = jax.random.normal(key, (n, (heads + 2 * kv_heads) * dim), dtype)
            return qkv, jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)

        def arguments(query: Any, data: dict[str, jax.Array | None], turn: int, _: jax.Array, n: int = n) -> Call:
            args = (*query, data["cos"], data["sin"], data["pages"], data["offsets"], data["norm"], data["norm"])
            return Call(args, {"page_offset": jnp.int32(turn * (n + 1)), "eps": config.norm_eps})

        case = Case(
            name=f"{n} tokens",
            operation=ROPE_KV_WRITE,
            model=model,
            rows=n,
            count=config.num_layers,
            bytes=n * (2 * (heads + 2 * kv_heads) * dim * dtype.itemsize + dim * 4),  # read and written, and cos and sin
            query=query,
            arguments=arguments,
            carry=lambda query, result: (query[0], *result[1:]),
            kept=lambda result: result[0],
        )
        name = f"{model} {ROPE_KV_WRITE.name} {case.name}"
        yield Group(name=name, cases=(case,), data=data, turns=lambda _: range(layers), rank=rank)


GROUPS: dict[str, Callable[[str], Iterator[Group]]] = {
    DENSE.name: dense_groups,
    RESIDUAL_DENSE.name: residual_groups,
    GATED_DENSE.name: gated_groups,
    PAGED_ATTENTION.name: attention_groups,
    FUSED_LAYER.name: layer_groups,
    ROPE_KV_WRITE.name: rope_groups,
}
