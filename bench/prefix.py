"""Time to the first token of requests that share a system prompt: computed for each, and found in the prefix cache.

    python -m bench.prefix --preset llama-8b --requests 64 --shared 2000 --json out.json
    python -m bench.prefix --preset tiny --tokens-per-step 512 --prefill-chunk 256    # a CPU

Two engines over the same weights, one after the other, with the cache off and on. All requests come in the same moment: `shared`
equal tokens, then `own` tokens of each. With the cache on, another request has computed the shared tokens before (`warm`), or
none has (`cold`): then the requests of the first launches compute them. TTFT is from the first call of `add_request` until `step`
returned a request's first token.

`equal_outputs` counts the requests whose greedy tokens are those of the run without the cache: all of them in float32, and with
`--deterministic`. In bfloat16 another cut of the prompt may round a near tie otherwise.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import numpy as np

from bench.rows import Rows
from bench.traffic import TINY
from llmjax.engine.config import EngineConfig
from llmjax.engine.llm import LLM
from llmjax.model.checkpoint.load import LoadedModel, load_model
from llmjax.sampling_params import SamplingParams

Run = tuple[list[float], list[list[int]], int]  # TTFT in ms and tokens of each request, prompt tokens found


def main(argv: list[str] | None = None) -> None:
    args = _arguments(argv)
    rows = Rows(args.json)
    random_weights = TINY if args.preset == "tiny" else args.preset
    loaded = load_model(path=args.model, random=None if args.model else random_weights, dtype=args.dtype)
    random = np.random.default_rng(args.seed)
    size = loaded.config.num_tokens
    shared = random.integers(0, size, args.shared).tolist()
    prompts = [[*shared, *random.integers(0, size, args.own).tolist()] for _ in range(args.requests)]
    runs: dict[str, Run] = {}
    for name, prefix_cache in (("off", False), ("cold", True)):
        llm = _engine(loaded, args, prefix_cache)
        # Random tokens first: the first launches of a process are slower than all later ones.
        _measure(llm, [random.integers(0, size, args.shared + args.own).tolist() for _ in range(4)], args)
        runs[name] = _measure(llm, prompts, args)
        if prefix_cache:
            runs["warm"] = _measure(llm, prompts, args, shared)
        del llm
        gc.collect()  # the next engine takes what is free
    for name, (ttft, tokens, found) in runs.items():
        rows.add(
            run=name, requests=args.requests, shared=args.shared, own=args.own,
            ttft_mean_ms=statistics.fmean(ttft), ttft_p50_ms=float(np.percentile(ttft, 50)),
            ttft_p95_ms=float(np.percentile(ttft, 95)),
            times_better=statistics.fmean(runs["off"][0]) / statistics.fmean(ttft),
            hit_rate=found / sum(map(len, prompts)),
            equal_outputs=sum(one == other for one, other in zip(tokens, runs["off"][1], strict=True)),
        )  # fmt: skip
    rows.close(["run", "requests", "ttft_mean_ms", "ttft_p50_ms", "ttft_p95_ms", "times_better", "hit_rate", "equal_outputs"])


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="llama-8b", help="or tiny")
    parser.add_argument("--model", help="a path; else random weights of the preset")
    parser.add_argument("--dtype")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--shared", type=int, default=2000)
    parser.add_argument("--own", type=int, default=50)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--compile-cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    return parser.parse_args(argv)


def _engine(loaded: LoadedModel, args: argparse.Namespace, prefix_cache: bool) -> LLM:
    config = EngineConfig(
        max_context=args.shared + args.own + args.output,
        page_size=args.page_size,
        kv_cache_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
        max_sequences=args.requests,
        max_tokens_per_step=max(args.tokens_per_step, args.requests),
        prefill_chunk=args.prefill_chunk,
        deterministic=args.deterministic,
        compile_cache=args.compile_cache,
        prefix_cache=prefix_cache,
    )
    return LLM(loaded, engine_config=config)


def _measure(llm: LLM, prompts: list[list[int]], args: argparse.Namespace, before: list[int] | None = None) -> Run:
    """The requests at once; `before` is computed first, into a cache that was emptied."""
    engine = llm.engine
    engine.scheduler.forget_prefixes()
    params = SamplingParams(max_tokens=args.output, temperature=0.0, ignore_eos=True)
    if before is not None:
        llm.generate([[*before, 0]], params)
    found = engine.stats.prompt_tokens_cached
    started = time.perf_counter()
    names = [engine.add_request(prompt, params) for prompt in prompts]
    first: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            if output.new_token_ids[0]:
                first.setdefault(output.request_id, (time.perf_counter() - started) * 1e3)
            if output.finished:
                tokens[output.request_id] = output.outputs[0].token_ids
    assert engine.runner.compiles_after_ready == 0
    return [first[name] for name in names], [tokens[name] for name in names], engine.stats.prompt_tokens_cached - found


if __name__ == "__main__":
    main()
