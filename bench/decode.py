"""Decode steps through the whole engine, beside the same step's matmuls and attention timed apart.

    python -m bench.decode --preset llama-8b --batches 1,8,32,64,128,256 --json out.json
    python -m bench.decode --preset llama-8b --quantize w8a16 --json int8.json

- params: MiB of the parameters and their share of the same model's unquantised, beside what the device has in use;
- step: (time of 128 output tokens - time of 1) / 127, greedy, end of sequence ignored, token ids as prompts, all requests
  at once: what vLLM was measured by.
- steady: median time of the launches in which every row decodes, a step of them.
- host: processor time of the engine's thread for a step of those launches; what it waits for the device does not count.
- matmuls, attention: those of one step, each timed in a program of its own at the run's mean context;
  efficiency = (matmuls + attention) / steady.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.rows import Rows
from llmjax.engine.config import EngineConfig
from llmjax.engine.llm import LLM
from llmjax.model.checkpoint.load import LoadedModel, load_model
from llmjax.model.checkpoint.presets import preset_config
from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import KVCache
from llmjax.model.layers import abstract_params
from llmjax.model.mixed_layer import multiply
from llmjax.model.quantization import SCHEMES
from llmjax.quantization.quantize import plan_quantization
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.buckets import MAX_ROW_BUCKETS, MIN_ROW_BUCKET
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention

VLLM_STEP_MS = {  # one H200, 128 output tokens (bench/results/README.md): rows and tokens of a prompt
    "llama-8b": {
        (1, 128): 4.79, (8, 128): 4.79, (32, 128): 5.18, (64, 128): 5.87, (128, 128): 7.09, (256, 128): 10.63,
        (1, 8000): 4.99, (32, 4096): 9.19,
    },
    "qwen2.5-1.5b": {(1, 128): 2.31, (8, 128): 2.25, (32, 128): 2.09, (64, 128): 3.56, (128, 128): 4.18, (256, 128): 4.74},
}  # fmt: skip


def main() -> None:
    args = _arguments()
    batches = args.batches
    prompts = list(zip(batches, args.prompt * (len(batches) if len(args.prompt) == 1 else 1), strict=True))
    rows = Rows(args.json)
    started = time.perf_counter()
    plan = None if args.quantize is None else plan_quantization(preset_config(args.preset), args.quantize)
    loaded = load_model(random=args.preset, dtype=args.dtype, scale=0.001, quantization=plan)
    jax.block_until_ready(loaded.params)
    rows.add(load_seconds=time.perf_counter() - started, quantize=args.quantize, **_sizes(loaded))
    context = max(args.prompt) + args.output
    config = EngineConfig(
        max_context=context,
        page_size=args.page_size,
        kv_cache_dtype=args.kv_dtype,
        kv_cache_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
        max_sequences=max(batches),
        max_tokens_per_step=args.tokens_per_step,
        prefill_chunk=args.tokens_per_step,
        decode_steps=args.decode_steps,
        row_buckets=_row_buckets(set(batches)),
        compile_cache=args.compile_cache,
        prefix_cache=False,  # the same prompts again must cost what they did
    )
    started = time.perf_counter()
    llm = LLM(loaded, engine_config=config)
    programs = [dataclasses.asdict(program) for program in llm.engine.programs]
    rows.add(ready_seconds=time.perf_counter() - started, programs=programs)
    for batch, prompt in prompts:
        step = _step_ms(llm, batch, prompt, args.output)
        steady, host = _steady_ms(llm, batch, prompt, args.output)
        parts = {} if args.no_parts or args.kv_dtype else _parts_ms(llm, batch, prompt, args.output, args.page_size)
        total = sum(parts.values())
        rows.add(
            preset=args.preset, quantize=args.quantize, kv_dtype=args.kv_dtype, batch=batch, prompt=prompt, step_ms=step,
            steady_ms=steady, host_ms=host, tokens_per_second=batch / step * 1e3,
            **{f"{name}_ms": value for name, value in parts.items()},
            efficiency=total / steady if parts else None,
            vllm_ms=VLLM_STEP_MS.get(args.preset, {}).get((batch, prompt)),
        )  # fmt: skip
    rows.add(compiles_after_ready=llm.engine.runner.compiles_after_ready)
    rows.close(
        ["batch", "step_ms", "steady_ms", "host_ms", "tokens_per_second", "matmuls_ms", "attention_ms", "efficiency", "vllm_ms"]
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt", type=_numbers, default=[128], help="tokens, one number or one for each batch")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--decode-steps", type=int, default=8)
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--dtype")
    parser.add_argument("--quantize", choices=SCHEMES, help="linears in int8; the weights are made so on the device")
    parser.add_argument("--kv-dtype", choices=["int8"], help="of keys and values; the parts are not timed then")
    parser.add_argument("--compile-cache")
    parser.add_argument("--no-parts", action="store_true")
    parser.add_argument("--json")
    return parser.parse_args()


def _sizes(loaded: LoadedModel) -> dict[str, float | None]:
    """MiB of the parameters, their share of those of the same model unquantised, and MiB that the device has in use."""

    def of(tree: Any) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    plain = abstract_params(loaded.config)
    in_use = (jax.devices()[0].memory_stats() or {}).get("bytes_in_use")
    return {
        "params_mib": of(loaded.params) / 2**20,
        "of_unquantised": of(loaded.params) / of(plain),
        "device_mib": None if in_use is None else in_use / 2**20,
    }


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _row_buckets(batches: set[int]) -> tuple[int, ...]:
    """A program for each batch, as far as there may be so many; the smallest share one then."""
    if len(batches) > MAX_ROW_BUCKETS:
        batches = {max(batch, MIN_ROW_BUCKET) for batch in batches}
    return tuple(sorted(batches))


def _step_ms(llm: LLM, batch: int, prompt: int, output: int) -> float:
    def seconds(output: int) -> float:
        prompts = _prompts(llm, batch, prompt)
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True))
        return time.perf_counter() - started

    seconds(2)
    short = min(seconds(1) for _ in range(3))
    long = min(seconds(output) for _ in range(2))
    return (long - short) / (output - 1) * 1e3


def _steady_ms(llm: LLM, batch: int, prompt: int, output: int) -> tuple[float, float]:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    for tokens in _prompts(llm, batch, prompt):
        llm.engine.add_request(tokens, params)
    steps = llm.engine.config.decode_steps
    times, before = [], np.array([time.perf_counter(), time.thread_time()])
    while llm.engine.has_unfinished:
        new = sum(len(news.new_token_ids[0]) for news in llm.engine.step(closed=True))
        now = np.array([time.perf_counter(), time.thread_time()])
        if new == batch * steps:
            times.append((now - before) / steps * 1e3)
        before = now
    steady, host = np.median(times, axis=0)
    return float(steady), float(host)


def _prompts(llm: LLM, batch: int, prompt: int) -> list[list[int]]:
    random = np.random.default_rng(batch)
    return [[int(i) for i in random.integers(0, llm.engine.model_config.num_tokens, prompt)] for _ in range(batch)]


def _parts_ms(llm: LLM, batch: int, prompt: int, output: int, page_size: int) -> dict[str, float]:
    engine = llm.engine
    config, params = engine.model_config, engine.runner.params
    assert isinstance(config, ModelConfig)
    hidden = jnp.ones((batch, config.hidden_size), jnp.dtype(config.dtype))

    @jax.jit
    def matmuls(params: Any, x: jax.Array) -> jax.Array:
        def product(x: jax.Array, linear: Any, out_dtype: Any = None) -> jax.Array:
            return multiply(x, linear["weight"], None, quantization=config.quantization, out_dtype=out_dtype)

        for index in range(config.num_layers):
            attention, mlp = params["layers"][index]["attention"], params["layers"][index]["mlp"]
            qkv = product(x, attention["qkv"])
            x = product(qkv[:, : config.num_heads * config.head_dim], attention["out"])
            gate_up = product(x, mlp["gate_up"])
            x = product(gate_up[:, : config.mlp_size], mlp["down"])
        return product(x, params["embed"] if config.tie_embeddings else params["lm_head"], jnp.float32).max(-1)

    width = -(-(prompt + output) // page_size)
    pages = batch * width + 1
    shape = (config.num_layers * pages, config.num_kv_heads, page_size, config.head_dim)
    cache = KVCache(jnp.ones(shape, hidden.dtype), jnp.ones(shape, hidden.dtype))
    table = jnp.arange(1, pages, dtype=jnp.int32).reshape(batch, width)
    lengths = jnp.full((batch,), prompt + output // 2, jnp.int32)  # the mean of the run
    q = jnp.ones((batch, config.num_heads, config.head_dim), hidden.dtype)
    kv = jnp.ones((batch, config.num_kv_heads, config.head_dim), hidden.dtype)

    def attention(cache: KVCache, q: jax.Array) -> tuple[KVCache, jax.Array]:
        position = lengths - 1
        page = jnp.take_along_axis(table, (position // page_size)[:, None], 1)[:, 0]
        for index in range(config.num_layers):
            offset = jnp.int32(index * pages)
            cache = KVCache(*write_kv(cache.k, cache.v, kv, kv, page + offset, position % page_size))
            q = paged_attention(
                q, cache.k, cache.v, table, lengths, jnp.arange(batch + 1, dtype=jnp.int32),
                page_offset=offset, scale=config.head_dim**-0.5, window=0, decode=True,
            )  # fmt: skip
        return cache, q

    step = jax.jit(attention, donate_argnums=0)
    state = [cache]

    def run_attention() -> Any:
        state[0], out = step(state[0], q)
        return out

    return {"matmuls": _time_ms(lambda: matmuls(params, hidden)), "attention": _time_ms(run_attention)}


def _time_ms(run: Any, repeats: int = 20) -> float:
    """Median over three rounds of the mean of `repeats` launches in a row."""
    jax.block_until_ready(run())
    rounds = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(repeats):
            out = run()
        jax.block_until_ready(out)
        rounds.append((time.perf_counter() - started) / repeats * 1e3)
    return float(np.median(rounds))


if __name__ == "__main__":
    main()
