"""What flash attention saves: a forward of long sequences, and each form of attention by itself, beside naive attention.

    python -m bench.attention_forms --preset llama-8b --json out.json

Naive attention makes the matrix of scores, [heads, queries, keys] in float32, and its softmax; flash attention is the one that
the device's table chooses. Random weights and operands, one sequence, causal.

- A forward, all layers up to the logits of the last token: milliseconds, and the bytes that the program takes beside its
  operands and results (temporaries, as XLA has planned them).
- Forms of attention: the same of one call, its error against float64 over some queries, and how many times plain causal
  attention's time it takes. A field report of such kernels told of a forward 18 % shorter, more beyond 1k tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ablation import Layout, Operations, State, operations, step
from bench.flash_cases import forms
from bench.rows import Rows
from llmjax.model.checkpoint.load import load_model
from llmjax.model.config import ModelConfig
from pallas_kernels.flash_attention import flash_attention

REPORTED = "-18 % a forward, more beyond 1k tokens"
LAUNCHES = 5
QUERIES = 32
"""So many queries, the first and the last among them, are computed in float64."""

Attention = Callable[..., jax.Array]  # (q, k, v, **form) -> [T, N, H]


def biased_scores(np_: Any, scores: Any, positions: Any, keys: int, **options: Any) -> Any:
    """Scores [N, Q, S] of queries at `positions` with their form's biases, -inf where a key is not seen; `np_` is jnp or np."""
    distance = positions[:, None] - np_.arange(keys)
    if "alibi_slopes" in options:
        scores = scores - options["alibi_slopes"][:, None, None] * abs(distance)
    if "relative_bias" in options:
        table = options["relative_bias"]
        scores = scores + table[:, np_.clip(distance, 0, table.shape[1] - 1)]
    seen = (distance >= 0) & (distance < options.get("window", keys))
    return np_.where(seen, scores, -np_.inf)


def naive_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    """Causal attention by a matrix of all scores: float32, weights rounded to the values' dtype."""
    tokens, heads, size = q.shape
    queries = q.reshape(tokens, k.shape[1], -1, size)
    scores = jnp.einsum("tkgh,skh->kgts", queries, k, preferred_element_type=jnp.float32) * size**-0.5
    scores = biased_scores(jnp, scores.reshape(heads, tokens, -1), jnp.arange(tokens), len(k), **options)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(k.shape[1], -1, tokens, len(k))
    out = jnp.einsum("kgts,skh->tkgh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape).astype(q.dtype)


ATTENTIONS: dict[str, Attention] = {"flash": flash_attention, "naive": naive_attention}


def exact(q: jax.Array, k: jax.Array, v: jax.Array, positions: np.ndarray, **options: Any) -> np.ndarray:
    """Attention of the queries at `positions` in float64: [Q, N, H]."""
    queries, keys, values = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q[positions], k, v))
    keys, values = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (keys, values))
    wide = {name: value if isinstance(value, int) else np.asarray(value, np.float64) for name, value in options.items()}
    scores = np.einsum("qnh,snh->nqs", queries, keys, optimize=True) * q.shape[2] ** -0.5
    scores = biased_scores(np, scores, positions, len(k), **wide)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(np.einsum("nqs,snh->qnh", weights / weights.sum(axis=-1, keepdims=True), values, optimize=True))


# -- a forward


def one_sequence(attention: Attention) -> Layout:
    """No cache: keys and values are the layer's own."""

    def attend(q: Any, k: Any, v: Any, lengths: Any, layer: Any, *, scale: float, implementation: str | None) -> jax.Array:
        assert implementation is None
        return attention(q, k, v)

    return Layout(lambda config: None, lambda k_cache, v_cache, k, v, positions, layer: (k, v), attend)


def forward(config: ModelConfig, attention: Attention, params: Any, tokens: jax.Array) -> jax.Array:
    """The likeliest token behind the sequence, [1]."""
    ops: Operations = operations(config, one_sequence(attention), None, None)
    last = dataclasses.replace(ops, choose=lambda x, w: ops.choose(x[-1:], w))
    return step(last, params, State(tokens, jnp.arange(len(tokens), dtype=jnp.int32), None, None)).tokens


def measured(function: Callable[..., jax.Array], *args: Any, calls: int = 1) -> tuple[jax.Array, float, float]:
    """The result, median milliseconds of a call in launches of `calls` one after the other, and temporary MiB."""
    executable = jax.jit(function).lower(*args).compile()
    out = jax.block_until_ready(executable(*args))
    times = []
    for _ in range(LAUNCHES):
        started = time.perf_counter()
        for _ in range(calls):
            out = executable(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - started) * 1e3 / calls)
    return out, statistics.median(times), executable.memory_analysis().temp_size_in_bytes / 2**20


def forwards(config: ModelConfig, params: Any, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each length: both attentions, and what flash attention saves."""
    for length in lengths:
        tokens = jax.random.randint(jax.random.key(length), (length,), 0, config.num_tokens)
        row: dict[str, Any] = {"of": "forward", "tokens": length}
        for kind, attention in ATTENTIONS.items():
            _, ms, mib = measured(functools.partial(forward, config, attention), params, tokens)
            row |= {f"{kind}_ms": ms, f"{kind}_mib": mib}
        yield row | {"saves_percent": (1 - row["flash_ms"] / row["naive_ms"]) * 100, "reported": REPORTED}


# -- one call


def of_forms(config: ModelConfig, lengths: Sequence[int], calls: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each length and form."""
    dtype, heads = jnp.dtype(config.dtype), config.num_heads
    for length in lengths:
        plain = math.nan
        for name, form in forms(config).items():
            keys = jax.random.split(jax.random.key(seed), 3)
            shapes = [(length, count, config.head_dim) for count in (heads, form.kv_heads, form.kv_heads)]
            q, k, v = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
            options = form.options(heads, seed + 1)
            positions = np.unique(np.linspace(0, length - 1, QUERIES).round().astype(np.int64))
            expected = exact(q, k, v, positions, **options)
            row: dict[str, Any] = {"of": name, "tokens": length}
            for kind, attention in ATTENTIONS.items():
                out, ms, mib = measured(functools.partial(attention, **options), q, k, v, calls=calls)
                error = abs(np.asarray(out[positions].astype(jnp.float32)) - expected).max()
                row |= {f"{kind}_ms": ms, f"{kind}_mib": mib, f"{kind}_error": float(error)}
            plain = row["flash_ms"] if name == "plain" else plain
            yield row | {"of_plain": row["flash_ms"] / plain}


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    rows = Rows(args.json)
    seed = int(np.random.SeedSequence().generate_state(1)[0] >> 1) if args.seed is None else args.seed
    rows.add(seed=seed, preset=args.preset)
    loaded = load_model(random=args.preset, scale=0.001)
    if loaded.config.qk_norm or any(loaded.config.sliding_windows):
        raise SystemExit(f"{args.preset} has norms on queries or windows, which this forward leaves out")
    for row in of_forms(loaded.config, args.form_tokens, args.calls, seed):
        rows.add(**row)
    for row in forwards(loaded.config, loaded.params, args.tokens):
        rows.add(**row)
    columns = [f"{kind}_{figure}" for figure in ("ms", "mib", "error") for kind in ATTENTIONS]
    rows.close(["of", "tokens", *columns, "of_plain", "saves_percent"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--tokens", type=numbers, default=[1024, 4096, 8192], help="lengths of the forwards, comma between them")
    parser.add_argument("--form-tokens", type=numbers, default=[2048, 8192], help="lengths of the calls")
    parser.add_argument("--calls", type=int, default=20, help="calls of attention in a timed group")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
