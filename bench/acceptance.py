"""How many drafts a real target accepts: by draft length, temperature and kind of text, on any device.

    python -m bench.acceptance --target qwen1.5b.gguf --draft qwen0.5b.gguf --tokens 1,2,3,4,5 --json out.json
    python -m bench.acceptance --target qwen1.5b.gguf --method ngram --tokens 3 --json out.json

- a_round: drafts accepted of those of a full round, on average (of 3, for 3 tokens a round);
- accepted: of all drafts, those behind a rejected one too; tested: of those that nothing rejected stood in front of, which is the
  probability a in the formula of a speed-up;
- tokens_a_round: those and the one that the target adds, which is what a round is worth in plain steps.

The texts of a setting are answered together. They are chats by the target's own template that ask for code, English, Chinese and
JSON, and with n-grams for editing and repeating too. Weights are not in this project: any pair of one vocabulary will do.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from bench.rows import Rows
from llmjax.engine.config import EngineConfig
from llmjax.engine.llm import LLM
from llmjax.model.checkpoint.load import load_model
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.speculation_config import SpeculationConfig

_CODE = "def area(width, height):\n    result = width * height\n    return result\n"
TEXTS = {
    "code": ("Write a Python function that parses a CSV line with quotes.", "Write a C function that reverses a linked list."),
    "english": ("Explain in two paragraphs how tides work.", "Give me tips for keeping a garden in a dry summer."),
    "chinese": ("请用中文介绍一下茶的历史。", "请用中文说明如何学习一门外语。"),
    "json": ("Return a JSON list of four rivers with name, length_km and countries.", "Describe a book as a JSON object."),
}
EDITS = {
    "editing": (f"Rename result to product in this code and answer with the whole code:\n\n{_CODE * 3}",),
    "repeating": (f"Repeat this text word for word, twice:\n\n{_CODE * 2}",),
}


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    rows = Rows(args.json)
    texts = TEXTS | EDITS if args.method == "ngram" else TEXTS
    most = max(map(len, texts.values()))
    target = load_model(path=args.target, dtype=args.dtype)
    draft = None if args.method != "draft" else load_model(path=args.draft, dtype=args.dtype)
    for tokens in args.tokens:
        speculation = SpeculationConfig(method=args.method, tokens=tokens, adaptive=False, disable_above_batch=most)
        config = EngineConfig(
            max_context=512, max_sequences=most, max_tokens_per_step=128, row_buckets=(most,), token_buckets=(128,),
            kv_cache_bytes=args.kv_mib * 2**20, speculative=speculation, seed=args.seed,
        )  # fmt: skip
        llm = LLM(target, engine_config=config, draft=draft, tokenizer=args.target)
        for temperature, kind in itertools.product(args.temperatures, texts):
            figures = _measure(llm, texts[kind], args, temperature)
            rows.add(kind=kind, method=args.method, tokens=tokens, temperature=temperature, **figures)
        del llm
    rows.close(["kind", "method", "tokens", "temperature", "a_round", "accepted", "tested", "tokens_a_round"])


def _measure(llm: LLM, texts: Sequence[str], args: argparse.Namespace, temperature: float) -> dict[str, Any]:
    params = SamplingParams(max_tokens=args.output, temperature=temperature, ignore_eos=True)
    assert llm.engine.speculation is not None
    counts = llm.engine.speculation.counts
    before = sum(counts.accepted_at()[:-1])
    outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], params)
    found = [output.speculation for output in outputs if output.speculation is not None]
    rounds, drafted, accepted = (sum(getattr(one, name) for one in found) for name in ("rounds", "drafted", "accepted"))
    tested = rounds + sum(counts.accepted_at()[:-1]) - before  # a draft is tested if the one in front of it was accepted
    return {
        "rounds": rounds, "a_round": accepted / max(rounds, 1), "accepted": accepted / max(drafted, 1),
        "tested": accepted / max(tested, 1), "tokens_a_round": 1 + accepted / max(rounds, 1),
    }  # fmt: skip


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True, help="a model's file or folder")
    parser.add_argument("--draft", help="likewise, for method draft")
    parser.add_argument("--method", choices=("draft", "ngram", "truncated"), default="draft")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[3])
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7])
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    if (args.method == "draft") != (args.draft is not None):
        parser.error("--draft belongs to --method draft, which needs it")
    return args


if __name__ == "__main__":
    main()
