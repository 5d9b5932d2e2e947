"""The tables that vLLM was measured by, on our engine: prefill, the mixed trace offline, and the open loop.

    python -m bench.peer_tables --preset llama-8b --rows 256 --tables prefill,mixed --tokens-per-step 8192 --json out.json
    python -m bench.peer_tables --preset llama-8b --rows 256 --tables open --json out.json
    python -m bench.peer_tables --preset llama-8b --rows 256 --tables mixed,open --lanes short:640:3,long --prefix-cache
    python -m bench.peer_tables --preset llama-8b --rows 256 --tables prefill,mixed --quantize w8a8 --kv-dtype int8
    python -m bench.peer_tables --preset tiny --rows 8 --scale 32 --requests 24    # a CPU

- prefill: prompt tokens a second until all first tokens are out, `requests` prompts of `prompt` tokens at once;
- mixed: 512 requests of the documented trace at once; output tokens, all tokens and requests a second;
- open: Poisson arrivals of 160 of them at 8, 16 and 32 a second; milliseconds, P50, P90 and P99. `itl` is the gap between two
  events, `itl_token` that gap divided by the event's tokens: vLLM's events hold one token each, and its column is beside both.

Token ids as prompts, greedy, end of sequence ignored, one queue without a prefix cache. With `--lanes short:640:3,long` and
`--prefix-cache` it must be no worse, although no prompt begins like another. vLLM: one H200 (bench/results/README.md), through
its engine without HTTP, of these very requests, in bfloat16 whatever `--quantize` says. `--scale` divides all lengths, for a CPU;
then no vLLM stands beside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.rows import Rows
from bench.traffic import TINY, mixed_lengths, read_lanes
from llmjax.engine.config import EngineConfig
from llmjax.engine.llm import LLM
from llmjax.loadtest import arrivals
from llmjax.loadtest.driver import drive
from llmjax.loadtest.measure import Figures, ServiceLevels, measure
from llmjax.loadtest.target import EngineTarget
from llmjax.loadtest.workload import Synthetic
from llmjax.model.checkpoint.load import load_model
from llmjax.model.checkpoint.presets import preset_config
from llmjax.model.quantization import SCHEMES
from llmjax.quantization.quantize import plan_quantization
from llmjax.sampling_params import SamplingParams

CONTEXT = 8448
PREFILL = ((512, 1), (512, 32), (2048, 1), (2048, 8), (8192, 1), (8192, 4))  # tokens of a prompt, requests
RATES = (8.0, 16.0, 32.0)
LATENCIES = ("ttft", "tpot", "itl", "itl_token", "e2e")

VLLM_PREFILL = {  # tokens a second
    "llama-8b": (31925, 42932, 38750, 42044, 37664, 38162),
    "qwen2.5-1.5b": (65964, 181489, 74371, 178249, 160036, 166890),
}
VLLM_MIXED = {("llama-8b", 256): 6335, ("llama-8b", 64): 3913, ("qwen2.5-1.5b", 256): 16461}  # output tokens a second
VLLM_OPEN = {  # ms: P50, P90, P99 at 8, 16 and 32 requests a second; time to first token, a token, between tokens, end to end
    "llama-8b": {
        8.0: ((23.6, 50.8, 80.9), (5.46, 6.00, 7.18), (5.09, 5.52, 18.9), (712, 2016, 3697)),
        16.0: ((25.9, 58.6, 78.4), (6.34, 7.43, 9.31), (5.39, 6.42, 34.1), (836, 2277, 4183)),
        32.0: ((33.4, 59.1, 99.7), (7.97, 9.62, 11.1), (5.92, 12.7, 28.2), (1046, 2608, 4792)),
    },
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = _arguments(argv)
    rows = Rows(args.json)
    llm = _llm(args)
    trace = Synthetic(*mixed_lengths(args.scale))
    if "prefill" in args.tables:
        for row in _prefill(llm, args):
            rows.add(**row)
    for number, load in enumerate(_loads(args)):
        count = len(load.times) or args.requests
        requests = trace.requests(args.requests, llm.engine.model_config.num_tokens, variant=number)[:count]
        figures = measure(drive(EngineTarget(llm.engine), requests, load), ServiceLevels())
        rows.add(
            load=load.name,
            rows=args.rows,
            lanes=args.lanes,
            prefix_cache=args.prefix_cache,
            quantize=args.quantize,
            kv_dtype=args.kv_dtype,
            completed=figures.completed,
            failed=figures.failed,
            **_rates(figures, args, load),
        )
        for row in _latencies(figures, args, load):
            rows.add(**row)
    rows.add(compiles_after_ready=llm.engine.runner.compiles_after_ready)
    rows.close(["what", "ours", "vllm", "of_vllm"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="llama-8b", help="or tiny")
    parser.add_argument("--tables", type=names, default=["prefill", "mixed", "open"])
    parser.add_argument("--rates", type=lambda text: tuple(map(float, names(text))), default=RATES)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512, help="of the mixed trace")
    parser.add_argument("--open-requests", type=int, default=160)
    parser.add_argument("--scale", type=int, default=1, help="what all lengths are divided by")
    parser.add_argument("--tokens-per-step", type=int)
    parser.add_argument("--prefill-chunk", type=int)
    parser.add_argument("--decode-steps", type=int)
    parser.add_argument("--lanes", default="all", help="name:max_tokens:weight, the last takes the rest")
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--dtype")
    parser.add_argument("--quantize", choices=SCHEMES, help="linears in int8; the weights are made so on the device")
    parser.add_argument("--kv-dtype", choices=["int8"], help="of keys and values")
    parser.add_argument("--compile-cache")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def _llm(args: argparse.Namespace) -> LLM:
    model = TINY if args.preset == "tiny" else preset_config(args.preset)
    plan = None if args.quantize is None else plan_quantization(model, args.quantize)
    loaded = load_model(random=model, dtype=args.dtype, scale=0.001, quantization=plan)
    chunk = args.prefill_chunk or args.tokens_per_step or EngineConfig.prefill_chunk
    config = EngineConfig(
        max_context=CONTEXT // args.scale,
        kv_cache_dtype=args.kv_dtype,
        kv_cache_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
        max_sequences=args.rows,
        max_tokens_per_step=args.tokens_per_step,
        prefill_chunk=chunk,
        decode_steps=args.decode_steps,
        compile_cache=args.compile_cache,
        lanes=read_lanes(args.lanes, args.scale),
        prefix_cache=args.prefix_cache,
    )
    return LLM(loaded, engine_config=config)


def _prefill(llm: LLM, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(3)
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for index, (length, count) in enumerate(PREFILL):
        length = max(1, length // args.scale)
        seconds = []
        for _ in range(4):  # the first is not counted
            prompts = random.integers(0, llm.engine.model_config.num_tokens, (count, length)).tolist()
            started = time.perf_counter()
            llm.generate(prompts, one)
            seconds.append(time.perf_counter() - started)
        vllm = VLLM_PREFILL.get(args.preset, ())[index : index + 1] if args.scale == 1 else ()
        ours = count * length / statistics.median(seconds[1:])
        yield _row(f"prefill {length} x {count}, tokens/s", ours, *vllm)


def _loads(args: argparse.Namespace) -> Iterator[arrivals.Load]:
    if "mixed" in args.tables:
        yield arrivals.closed_loop(args.requests)  # as many clients as requests: all at once
    if "open" in args.tables:
        for rate in args.rates:
            yield arrivals.poisson(rate, args.open_requests)


def _rates(figures: Figures, args: argparse.Namespace, load: arrivals.Load) -> dict[str, Any]:
    throughput = {"total_tokens_per_second": figures.total_tokens_per_second, "requests_per_second": figures.requests_per_second}
    if load.times:
        return {"output_tokens_per_second": figures.output_tokens_per_second, **throughput}
    vllm = VLLM_MIXED.get((args.preset, args.rows)) if args.scale == 1 else None
    return throughput | _row(f"mixed, {args.rows} rows, output tokens/s", figures.output_tokens_per_second, vllm)


def _latencies(figures: Figures, args: argparse.Namespace, load: arrivals.Load) -> Iterator[dict[str, Any]]:
    if not load.times:
        return
    known = dict(zip(("ttft", "tpot", "itl", "e2e"), VLLM_OPEN.get(args.preset, {}).get(load.level, ()), strict=False))
    known["itl_token"] = known.get("itl", ())
    for name in LATENCIES:
        found = figures.latencies[name]
        for index, percentile in enumerate(("p50", "p90", "p99")):
            seconds = getattr(found, percentile)
            if seconds is not None:
                vllm = known.get(name, ())[index : index + 1] if args.scale == 1 else ()
                yield _row(f"{load.name} {name} {percentile}, ms", seconds * 1e3, *vllm)


def _row(what: str, ours: float, vllm: float | None = None) -> dict[str, Any]:
    """A figure, the peer's, and the share of ours in it."""
    return {"what": what, "ours": ours, "vllm": vllm, "of_vllm": ours / vllm if vllm else None}


if __name__ == "__main__":
    main()
