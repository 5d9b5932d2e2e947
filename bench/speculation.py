"""What speculative decoding is worth on a card: real shapes, random weights, and drafts that are accepted at a given rate.

    python -m bench.speculation --target qwen2.5-1.5b --json out.json
    python -m bench.speculation --target llama-8b --json out.json
    python -m bench.speculation --target tiny --batches 1,4 --output 32    # a CPU

Random models never agree, so the verdict is given: `--rates` of the drafts are accepted, by a hash of row and position, after
target, draft and verification have computed all they would. Greedy rows have no use for `top_p`, so a request's rate travels
there, and one engine serves every rate.

- plain: speculation switched off in the same engine; steps are those of an engine without it, within noise (`--never-on` builds
  one and prints it too; `--off-only` compares nothing else, and builds that engine before and after);
- always: `tokens` drafts in each round; `expected` is tokens of a round * plain step / round, the tokens as measured. With drafts
  accepted at a rate a, one after the other, they are 1 + a + ... + a**k. `acceptance` is of all drafts, those behind a rejected
  one too. `round_ms` is what the engine takes a round for, `took_ms` what one took: with rows of one rate they should agree;
- adaptive: the engine decides; it should never be below 0.98 of plain;
- mix: a tenth of the requests at a rate of 0.1, the others at 0.8, and the former alone.

tokens a second are those of the whole run less the time to the first tokens, as in `bench.decode`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.rows import Rows
from bench.traffic import TINY
from llmjax.engine import speculative, startup
from llmjax.engine.config import EngineConfig
from llmjax.engine.llm import LLM
from llmjax.engine.sample import Drafts, Sampled, sample
from llmjax.model.checkpoint.load import load_model
from llmjax.model.checkpoint.presets import preset_config
from llmjax.model.config import ModelConfig
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.speculation_config import SpeculationConfig

# What a team would take as a draft: Qwen2.5 0.5B for 1.5B, Llama 3.2 1B for 8B.
DRAFTS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {"hidden_size": 896, "num_layers": 24, "num_heads": 14, "head_dim": 64, "mlp_size": 4864},
    "llama-8b": {"hidden_size": 2048, "num_layers": 16, "head_dim": 64, "mlp_size": 8192, "tie_embeddings": True},
    "tiny": {"num_layers": 1},
}
COLUMNS = [
    "case", "batch", "plain_ms", "never_on_ms", "round_ms", "took_ms", "tokens_a_round", "acceptance", "always", "expected",
    "adaptive", "adaptive_acceptance", "off",
]  # fmt: skip
MIX = (0.1, 0.8)
"""Rates of every tenth request and of the others."""


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    rows = Rows(args.json)
    config = TINY if args.target == "tiny" else preset_config(args.target)
    always = SpeculationConfig(
        method="draft", tokens=args.tokens, adaptive=False, disable_above_batch=max(args.batches), min_acceptance=0.5
    )
    if args.off_only:
        _compare_off(config, args, always, rows)
        return
    never = _plain_steps(config, args, None) if args.never_on else {}
    llm = _build(config, args, always)
    rows.add(programs=len(llm.engine.programs), ready_seconds=llm.engine.startup.elapsed)
    plains = {}
    for batch in args.batches:
        llm.engine.set_policy(speculative=None)
        plains[batch] = plain = _seconds_a_token(llm, [1.0] * batch, args)
        if batch in never:
            rows.add(case="off beside never on", batch=batch, plain_ms=plain * 1e3, never_on_ms=never[batch] * 1e3)
        rows.add(**_case(llm, f"rate {args.rates[0]:g}", [args.rates[0]] * batch, plain, always, args))
    for batch, plain in plains.items():  # what tells most came first: the time may be up
        for rate in args.rates[1:]:
            rows.add(**_case(llm, f"rate {rate:g}", [rate] * batch, plain, always, args))
        mix = [MIX[row % 10 > 0] for row in range(batch)]
        if batch > 1:
            rows.add(**_case(llm, "mix", mix, plain, always, args))
        rows.add(**_case(llm, "only poor", [MIX[0]] * batch, plain, always, args))
    rows.close(COLUMNS)


def _case(
    llm: LLM, name: str, rates: list[float], plain: float, always: SpeculationConfig, args: argparse.Namespace
) -> dict[str, Any]:
    """Speed-ups over plain steps of one batch."""
    batch = len(rates)
    llm.engine.set_policy(speculative=always)
    seconds = _seconds_a_token(llm, rates, args)
    acceptance, rounds, drafted, _ = _fared(llm, rates, args)
    tokens = 1 + acceptance * drafted / max(rounds, 1)
    llm.engine.set_policy(speculative=dataclasses.replace(always, adaptive=True))
    _seconds_a_token(llm, rates, args)  # what launches cost is learned
    adaptive = _seconds_a_token(llm, rates, args)
    adaptive_acceptance, *_, off = _fared(llm, rates, args)
    round_seconds = llm.engine.speculation.launch_seconds.of(batch, always.tokens) if llm.engine.speculation else float("nan")
    return {
        "case": name, "batch": batch, "plain_ms": plain * 1e3, "round_ms": round_seconds * 1e3, "took_ms": seconds * tokens * 1e3,
        "tokens_a_round": tokens, "acceptance": acceptance, "always": plain / seconds, "expected": tokens * plain / round_seconds,
        "adaptive": plain / adaptive, "adaptive_acceptance": adaptive_acceptance, "off": off,
    }  # fmt: skip


def _build(config: ModelConfig, args: argparse.Namespace, speculation: SpeculationConfig | None) -> LLM:
    loaded = load_model(random=config, dtype=args.dtype, scale=0.001)
    draft = None
    if speculation is not None:
        draft = load_model(
            random=dataclasses.replace(config, **DRAFTS[args.target], sliding_windows=()), dtype=args.dtype, scale=0.001
        )
    sizes = EngineConfig(
        max_context=args.prompt + args.output,
        kv_cache_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
        max_sequences=max(args.batches),
        max_tokens_per_step=max(args.tokens_per_step, max(args.batches)),
        token_buckets=(max(args.tokens_per_step, max(args.batches)),),
        prefill_chunk=args.tokens_per_step,
        row_buckets=tuple(sorted(args.batches)),
        decode_steps=args.decode_steps,
        prefix_cache=False,
        speculative=speculation,
    )
    return LLM(loaded, engine_config=sizes, draft=draft)


def _plain_steps(config: ModelConfig, args: argparse.Namespace, speculation: SpeculationConfig | None) -> dict[int, float]:
    """Seconds of a step, by batch size, of a new engine that may draft and does not, or that knows nothing of speculation."""
    llm = _build(config, args, speculation)
    if speculation is not None:
        llm.engine.set_policy(speculative=None)
    seconds = {batch: _seconds_a_token(llm, [1.0] * batch, args) for batch in args.batches}
    del llm
    gc.collect()  # an engine is in cycles, and holds the device's memory
    return seconds


def _compare_off(config: ModelConfig, args: argparse.Namespace, always: SpeculationConfig, rows: Rows) -> None:
    """Plain steps of an engine without speculation, of one that may draft, and of one without again: what comes of being built
    later in a process shows in the third."""
    for case, speculation in (("never on", None), ("off", always), ("never on, built last", None)):
        for batch, took in _plain_steps(config, args, speculation).items():
            rows.add(case=case, batch=batch, plain_ms=took * 1e3)
    rows.close(COLUMNS[:3])


def _seconds_a_token(llm: LLM, rates: list[float], args: argparse.Namespace) -> float:
    """Seconds in which each row gets one token, on average over all."""

    def seconds(output: int) -> float:
        started = time.perf_counter()
        llm.generate(_prompts(llm, len(rates), args), [_params(rate, output) for rate in rates])
        return time.perf_counter() - started

    seconds(2)
    short = min(seconds(1) for _ in range(2))
    return (min(seconds(args.output) for _ in range(2)) - short) / (args.output - 1)


def _fared(llm: LLM, rates: list[float], args: argparse.Namespace) -> tuple[float, int, int, str]:
    """Accepted of drafted, rounds, drafts, and why rows had stopped drafting."""
    outputs = llm.generate(_prompts(llm, len(rates), args), [_params(rate, args.output) for rate in rates])
    found = [output.speculation for output in outputs if output.speculation is not None]
    drafted = sum(one.drafted for one in found)
    reasons = sorted({one.off for one in found if one.off is not None})
    return sum(one.accepted for one in found) / max(drafted, 1), sum(one.rounds for one in found), drafted, " ".join(reasons)


def _params(rate: float, output: int) -> SamplingParams:
    return SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, top_p=rate, seed=int(1000 * rate))


def _prompts(llm: LLM, batch: int, args: argparse.Namespace) -> list[list[int]]:
    return np.random.default_rng(batch).integers(0, llm.engine.model_config.num_tokens, (batch, args.prompt)).tolist()


def _given_verdict(
    logits: jax.Array, settings: Any, counts: Any, positions: jax.Array, num_output: jax.Array, masks: Any, drafts: Drafts
) -> Sampled:
    """`sample`, then the verdict: a row takes its draft by a hash of its seed and position, and else another token."""
    sampled = sample(logits, settings, counts, positions, num_output, masks, drafts)

    def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    takes = jax.vmap(uniform)(settings.seed, positions) < settings.top_p
    other = jnp.where(sampled.tokens == drafts.tokens, jnp.where(sampled.tokens == 0, 1, sampled.tokens - 1), sampled.tokens)
    tokens = jnp.where(takes, drafts.tokens, other)
    return sampled._replace(tokens=jnp.where((drafts.tokens >= 0) & sampled.finite, tokens, sampled.tokens))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default="qwen2.5-1.5b", choices=sorted(DRAFTS))
    parser.add_argument("--tokens", type=int, default=3, help="drafts of a round")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32])
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[0.95, 0.8, 0.66, 0.5])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--decode-steps", type=int)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--dtype")
    parser.add_argument("--never-on", action="store_true", help="time an engine without speculation too")
    parser.add_argument("--off-only", action="store_true", help="compare only plain steps, of engines with drafts and without")
    parser.add_argument("--json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # The verdict is in the programs of this process alone: none may be lowered in another.
    speculative.sample = _given_verdict  # type: ignore[assignment]
    startup._start_pool = lambda *_: None  # type: ignore[assignment]
    main()
