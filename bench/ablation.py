"""What each technique of the static decode step is worth: a whole step of a preset, timed with and without it.

    python -m bench.ablation --preset llama-8b --rows 32 --context 2048 --json out.json

`all_percent`: how much longer or shorter the step with everything is.

Steps of random weights with greedy sampling, the rows' lengths spread evenly from an eighth of the context to all of it. Each
line takes one thing away from the step that has them all:

- pages: instead, each row has the whole context reserved, and attention reads it through XLA (`contiguous`); and with the
  same pages, attention through the reference (`reference attention`);
- tuned kernels: the reference of every operation (`reference operations`);
- fusion: residual, norm, rotation, activation and product stand alone in the program; a barrier behind each keeps XLA from
  joining two (`unfused`);
- capture: the one program is launched without CUDA graphs (`no graphs`), or each operation is a program of its own that the
  host launches (`op by op`);
- several steps a launch: one (`one step a launch`).

Beside them what two field reports told of their own systems: paging 10 to 15 % of a step, fusion and capture together 30 % of the
fixed cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.rows import Rows
from llmjax.model.checkpoint.load import load_model
from llmjax.model.config import ModelConfig
from llmjax.model.rope import cos_sin
from pallas_kernels.dispatch import REFERENCE
from pallas_kernels.fused_norm import residual_rms_norm, rms_norm
from pallas_kernels.gated_activation import gated
from pallas_kernels.gated_activation.xla import ACTIVATIONS
from pallas_kernels.kv_write import write_kv
from pallas_kernels.matmul import dense
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_kv_write import apply_rope

REPORTED = {"contiguous": "-10 to -15 % a step", "unfused": "-30 % fixed cost, with capture", "op by op": "-30 %, with fusion"}
LAUNCHES = 5


class State(NamedTuple):
    """What a step takes donated and returns: the rows' latest tokens, their lengths, and the caches."""

    tokens: jax.Array
    lengths: jax.Array
    k: Any
    v: Any


@dataclasses.dataclass(frozen=True)
class Operations:
    """The operations of a step, each a function of arrays; `write` and `attend` own the layout of the caches."""

    embed: Callable[..., Any]
    rotate: Callable[..., Any]
    norm: Callable[..., Any]
    matmul: Callable[..., Any]
    split: Callable[..., Any]
    write: Callable[..., Any]
    attend: Callable[..., Any]
    gate: Callable[..., Any]
    choose: Callable[..., Any]


def operations(config: ModelConfig, layout: Layout, implementation: str | None, attention: str | None) -> Operations:
    """The operations of a model over a layout of the cache; `attention` is the implementation of that alone."""

    def split(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = _heads(qkv, config)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        return dense(x, w, bias, implementation=implementation)

    return Operations(
        embed=lambda table, tokens: jnp.take(table, tokens, axis=0, mode="clip"),
        rotate=lambda positions: cos_sin(positions, config),
        norm=lambda x, stream, weight: residual_rms_norm(x, stream, weight, config.norm_eps, implementation=implementation),
        matmul=matmul,
        split=split,
        write=layout.write,
        attend=functools.partial(layout.attend, scale=config.head_dim**-0.5, implementation=attention or implementation),
        gate=lambda x: gated(x, config.activation, implementation=implementation),
        choose=lambda x, w: jnp.argmax(dense(x, w, out_dtype=jnp.float32, implementation=implementation), -1).astype(jnp.int32),
    )


def in_pieces(config: ModelConfig, ops: Operations, wrap: Callable[..., Callable[..., Any]]) -> Operations:
    """The same computation in the smallest pieces that have a name, each of them wrapped."""
    heads = wrap(lambda qkv: _heads(qkv, config))
    rotated = wrap(apply_rope)
    added = wrap(lambda x, stream: stream + x)
    normed = wrap(lambda stream, weight: rms_norm(stream, weight, config.norm_eps))
    halves = wrap(lambda x: tuple(jnp.split(x, 2, axis=-1)))
    activated = wrap(lambda x: ACTIVATIONS[config.activation](x.astype(jnp.float32)).astype(x.dtype))
    product = wrap(lambda one, other: one * other)

    def split(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = heads(qkv)
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def norm(x: jax.Array, stream: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        stream = added(x, stream)
        return normed(stream, weight), stream

    def gate(x: jax.Array) -> jax.Array:
        left, right = halves(x)
        return product(activated(left), right)

    return Operations(
        embed=wrap(ops.embed),
        rotate=wrap(ops.rotate),
        norm=norm,
        matmul=wrap(ops.matmul),
        split=split,
        write=wrap(ops.write),
        attend=wrap(ops.attend),
        gate=gate,
        choose=wrap(ops.choose),
    )


def alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A piece that XLA joins with no other of the program."""
    return lambda *args: lax.optimization_barrier(function(*args))


def launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A piece as a program of its own. Donates what has the caches' names: else each write would copy them."""
    return jax.jit(function, donate_argnames=("k_cache", "v_cache") if "k_cache" in signature(function).parameters else ())


def _heads(qkv: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q, k, v = jnp.split(qkv, [q_size, q_size + kv_size], axis=-1)
    return tuple(part.reshape(part.shape[0], -1, config.head_dim) for part in (q, k, v))


class Layout(NamedTuple):
    """Where keys and values lie.

    Attributes:
        make: (config) -> the cache of keys, or of values.
        write: (k cache, v cache, k, v, positions, layer) -> the caches.
        attend: (q, k cache, v cache, lengths, layer, *, scale, implementation) -> [T, N, H].
    """

    make: Callable[[ModelConfig], Any]
    write: Callable[..., Any]
    attend: Callable[..., Any]


def paged(rows: int, context: int, page_size: int) -> Layout:
    """Pages in a random order, one array for all layers."""
    width = -(-context // page_size)
    pages = 1 + rows * width
    table = jnp.asarray(1 + np.random.default_rng(0).permutation(rows * width).reshape(rows, width), jnp.int32)

    def make(config: ModelConfig) -> jax.Array:
        return jnp.zeros((config.num_layers * pages, config.num_kv_heads, page_size, config.head_dim), config.dtype)

    def write(k_cache: Any, v_cache: Any, k: jax.Array, v: jax.Array, positions: jax.Array, layer: Any) -> Any:
        page = jnp.take_along_axis(table, (positions // page_size)[:, None], axis=1)[:, 0]
        return write_kv(k_cache, v_cache, k, v, page + layer * pages, positions % page_size)

    def attend(q: Any, k: Any, v: Any, lengths: Any, layer: Any, *, scale: float, implementation: str | None) -> jax.Array:
        starts = jnp.arange(rows + 1, dtype=jnp.int32)
        return paged_attention(
            q, k, v, table, lengths, starts, page_offset=layer * pages, scale=scale, decode=True, implementation=implementation
        )

    return Layout(make, write, attend)


def contiguous(rows: int, context: int) -> Layout:
    """The whole context reserved for each row, an array [R, K, S, H] a layer; attention reads all of it."""

    def make(config: ModelConfig) -> list[jax.Array]:
        shape = (rows, config.num_kv_heads, context, config.head_dim)
        return [jnp.zeros(shape, config.dtype) for _ in range(config.num_layers)]

    def write(k_cache: Any, v_cache: Any, k: jax.Array, v: jax.Array, positions: jax.Array, layer: int) -> Any:
        def put(cache: list[jax.Array], new: jax.Array) -> list[jax.Array]:
            return [*cache[:layer], cache[layer].at[jnp.arange(rows), :, positions].set(new), *cache[layer + 1 :]]

        return put(k_cache, k), put(v_cache, v)

    def attend(q: Any, k: Any, v: Any, lengths: Any, layer: int, *, scale: float, implementation: str | None) -> jax.Array:
        assert implementation in (None, REFERENCE)
        keys, values = k[layer], v[layer]
        queries = q.reshape(rows, keys.shape[1], -1, q.shape[2])
        scores = jnp.einsum("bkgh,bksh->bkgs", queries, keys, preferred_element_type=jnp.float32) * scale
        scores = jnp.where(jnp.arange(context) < lengths[:, None, None, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        out = jnp.einsum("bkgs,bksh->bkgh", weights, values, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype)

    return Layout(make, write, attend)


def step(ops: Operations, params: Any, state: State) -> State:
    """One decode step of all rows. The new token's keys and values are written before attention reads them."""
    positions = state.lengths
    cos, sin = ops.rotate(positions)
    x = ops.embed(params["embed"]["weight"], state.tokens)
    stream, k, v = jnp.zeros_like(x), state.k, state.v
    for index in range(len(params["layers"])):
        layer = params["layers"][index]
        x, stream = ops.norm(x, stream, layer["attention_norm"]["weight"])
        q, new_k, new_v = ops.split(_linear(ops, x, layer["attention"]["qkv"]), cos, sin)
        k, v = ops.write(k, v, new_k, new_v, positions, index)
        attended = ops.attend(q, k, v, positions + 1, index)
        x = _linear(ops, attended.reshape(attended.shape[0], -1), layer["attention"]["out"])
        x, stream = ops.norm(x, stream, layer["mlp_norm"]["weight"])
        x = _linear(ops, ops.gate(_linear(ops, x, layer["mlp"]["gate_up"])), layer["mlp"]["down"])
    x, _ = ops.norm(x, stream, params["final_norm"]["weight"])
    head = params["lm_head"] if "lm_head" in params else params["embed"]
    return State(ops.choose(x, head["weight"]), state.lengths, k, v)  # lengths stay: each step costs the same


def _linear(ops: Operations, x: jax.Array, layer: Any) -> jax.Array:
    return ops.matmul(x, layer["weight"], layer.get("bias"))


def compiled(ops: Operations, params: Any, state: State, *, steps: int, graphs: bool = True) -> Callable[[State], State]:
    """`steps` decode steps as one program; the state is donated."""

    def run(params: Any, state: State) -> State:
        if steps == 1:
            return step(ops, params, state)
        return lax.fori_loop(0, steps, lambda _, state: step(ops, params, state), state)

    options = None if graphs else {"xla_gpu_enable_command_buffer": ""}
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, state))
    executable = jax.jit(run, donate_argnums=1).lower(*shapes).compile(compiler_options=options)
    return lambda state: executable(params, state)


def variants(config: ModelConfig, params: Any, args: argparse.Namespace) -> dict[str, Callable[[], tuple[State, Any, int]]]:
    """Name -> what makes a state, a launch of it, and the steps of a launch; the first has everything."""
    pages, whole = paged(args.rows, args.context, args.page_size), contiguous(args.rows, args.context)
    many = args.steps

    def build(layout: Layout, *, steps: int = many, graphs: bool = True, wrap: Any = None, **names: Any) -> Any:
        def make() -> tuple[State, Any, int]:
            ops = operations(config, layout, names.get("implementation"), names.get("attention"))
            state = initial_state(config, layout, args)
            if wrap is launched:
                return state, functools.partial(step, in_pieces(config, ops, launched), params), 1
            if wrap is not None:
                ops = in_pieces(config, ops, wrap)
            return state, compiled(ops, params, state, steps=steps, graphs=graphs), steps

        return make

    return {
        "all": build(pages),
        "contiguous": build(whole, attention=REFERENCE),
        "reference attention": build(pages, attention=REFERENCE),
        "reference operations": build(pages, implementation=REFERENCE),
        "unfused": build(pages, wrap=alone),
        "one step a launch": build(pages, steps=1),
        "no graphs": build(pages, steps=1, graphs=False),
        "op by op": build(pages, wrap=launched),
    }


def initial_state(config: ModelConfig, layout: Layout, args: argparse.Namespace) -> State:
    """Rows of different lengths on caches of zeros: what is in them costs the same."""
    lengths = np.linspace(args.context // 8, args.context - 1, args.rows).round().astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, config.num_tokens, args.rows).astype(np.int32)
    make = jax.jit(lambda: (layout.make(config), layout.make(config)))
    return State(jnp.asarray(tokens), jnp.asarray(lengths), *make())


def step_ms(launch: Callable[[State], State], state: State, steps: int, launches: int) -> tuple[float, float, State]:
    """Median milliseconds of a step over some groups of launches, (slowest - fastest) / median, and the last state."""
    for _ in range(2):
        state = jax.block_until_ready(launch(state))
    times = []
    for _ in range(LAUNCHES):
        started = time.perf_counter()
        for _ in range(launches):
            state = launch(state)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - started) / (launches * steps) * 1e3)
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median, state


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    rows = Rows(args.json)
    loaded = load_model(random=args.preset, dtype=args.dtype, scale=0.001)
    config, params = loaded.config, loaded.params
    if config.qk_norm or any(config.sliding_windows):
        raise SystemExit(f"{args.preset} has norms on queries or windows, which this step leaves out")
    whole: float | None = None
    for name, make in variants(config, params, args).items():
        if args.only and name not in ("all", *args.only):
            continue
        try:
            state, launch, steps = make()
            ms, spread, _ = step_ms(launch, state, steps, max(1, args.launches // steps))
        except (RuntimeError, ValueError) as error:  # out of memory, most likely: the others may fit
            rows.add(without=name, problem=str(error).splitlines()[0][:200])
            continue
        if whole is None:
            whole = ms
        rows.add(
            without="(nothing)" if name == "all" else name, step_ms=ms, spread=spread, all_percent=(whole / ms - 1) * 100,
            reported=REPORTED.get(name), preset=args.preset, rows=args.rows, context=args.context,
        )  # fmt: skip
    rows.close(["without", "step_ms", "spread", "all_percent", "reported"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--dtype")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048, help="tokens reserved for a row where there are no pages")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8, help="steps a launch")
    parser.add_argument("--launches", type=int, default=16, help="steps in each of the timed groups")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names, comma between them")
    parser.add_argument("--json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
