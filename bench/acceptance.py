"""How many drafts a real target accepts: by draft length, temperature and kind of text, on any device.

    python -m bench.acceptance --target qwen1.5b.gguf --draft qwen0.5b.gguf --tokens 1,2,3,4,5 --json out.json
    python -m bench.acceptance --target qwen1.5b.gguf --method ngram --kinds editing,repeating --tokens 1,2,3,4,5 --output 96

Of the rounds of a kind of text, r in number, that accepted n_1, n_2, ... of k drafts each:
- a_round: sum(n) / r, of k; tokens_a_round: that and the one that the target adds, which is what a round is worth in plain steps;
- accepted: a_round / k: of all drafts, those behind a rejected one too;
- tested: sum(n) / sum(min(n + 1, k)): of those that nothing rejected stood in front of, which is the probability a in the formula
  of a speed-up. A round of prompt lookup that found nothing counts as one draft that was rejected;
- found: the share of rounds that had drafts, below 1 with prompt lookup only.

Every k is run, none is worked out of another: where a round begins depends on k. A k that has no program of its own takes the
next longer one with k drafts a row: the same drafts, verified alike. Every round is a full one, but for one in which an answer
ends: a row with no more than k tokens to go stops drafting. All texts are answered together. They are chats by the target's own
template that ask for code, English, Chinese and JSON, and with n-grams for editing and repeating too. Weights are not in this
project: any pair of one vocabulary will do.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from bench.rows import Rows
from llmjax.engine.config import EngineConfig
from llmjax.engine.llm import LLM
from llmjax.model.checkpoint.load import load_model
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.launch_seconds import LaunchSeconds
from llmjax.scheduling.request import Request
from llmjax.scheduling.scheduler import Scheduler
from llmjax.scheduling.speculation import Drafting, Speculation
from llmjax.scheduling.speculation_config import SpeculationConfig

_CODE = """\
def monthly_report(orders, rate):
    result = {}
    for order in orders:
        if order.cancelled:
            continue
        month = order.date.strftime("%Y-%m")
        result.setdefault(month, 0.0)
        result[month] += order.price * order.pieces * (1 + rate)
    return result
"""
_PROSE = (
    "The ferry leaves the old harbour at seven. Anna sells the tickets herself, and in winter she is often the only passenger. "
    "On the island Anna feeds the hens, reads the rain gauge and writes both numbers into a blue book. At dusk the ferry takes "
    "her back, whether the sea is calm or not."
)
TEXTS = {
    "code": ("Write a Python function that parses a CSV line with quotes.", "Write a C function that reverses a linked list."),
    "english": ("Explain in two paragraphs how tides work.", "Give me tips for keeping a garden in a dry summer."),
    "chinese": ("请用中文介绍一下茶的历史。", "请用中文说明如何学习一门外语。"),
    "json": ("Return a JSON list of four rivers with name, length_km and countries.", "Describe a book as a JSON object."),
}
EDITS = {
    "editing": (
        f"Rename result to totals in this code and answer with the whole code:\n\n{_CODE}",
        f"Write Maria instead of Anna in this text and answer with the whole text:\n\n{_PROSE}",
    ),
    "repeating": (
        f"Repeat this code word for word:\n\n{_CODE}",
        f"Repeat this text word for word:\n\n{_PROSE}",
    ),
}


class FullRounds(Speculation):
    """Drafts `tokens` a row whatever it costs, or none where fewer are left to be said, and remembers what came of it.

    Attributes:
        tokens: drafts of each row.
        seen: of each request by its seed: proposed and accepted drafts, round by round.
    """

    def __init__(self, built: SpeculationConfig, seconds: LaunchSeconds, tokens: int) -> None:
        super().__init__(built, seconds)
        self.tokens = tokens
        self.seen: dict[int, list[tuple[int, int]]] = {}
        self._length = min(length for length in built.lengths if length >= tokens)

    def plan(self, decoding: Sequence[Request]) -> Drafting | None:
        drafts = [self.tokens if request.num_left > self.tokens else 0 for request in decoding]
        return Drafting(self._length, drafts) if any(drafts) else None

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        assert proposed in (0, self.tokens), "a round was cut short"
        self.seen.setdefault(request.seed, []).append((proposed, accepted))


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    rows = Rows(args.json)
    texts = {kind: text for kind, text in (TEXTS | EDITS).items() if kind in args.kinds}
    most = sum(map(len, texts.values()))
    target = load_model(path=args.target, dtype=args.dtype)
    draft = None if args.method != "draft" else load_model(path=args.draft, dtype=args.dtype)
    built = SpeculationConfig(method=args.method, tokens=max(args.tokens), adaptive=False, disable_above_batch=most)
    config = EngineConfig(
        max_context=512, max_sequences=most, max_tokens_per_step=128, row_buckets=(most,), token_buckets=(128,),
        kv_cache_bytes=args.kv_mib * 2**20, speculative=built,
    )  # fmt: skip
    llm = LLM(target, engine_config=config, draft=draft, tokenizer=args.target)
    for temperature, tokens in itertools.product(args.temperatures, args.tokens):
        for kind, rounds in _answer(llm, built, texts, args, tokens, temperature).items():
            rows.add(kind=kind, method=args.method, tokens=tokens, temperature=temperature, **figures(rounds, tokens))
    columns = ["kind", "tokens", "temperature", "rounds", "found", "a_round", "accepted", "tested", "tokens_a_round"]
    rows.close(columns)


def figures(rounds: Sequence[tuple[int, int]], tokens: int) -> dict[str, float]:
    """Those of the docstring, of proposed and accepted drafts a round of `tokens`; zeros where there was no round."""
    count = len(rounds)
    accepted = sum(taken for _, taken in rounds)
    tested = sum(min(taken + 1, tokens) for _, taken in rounds)
    a_round = accepted / max(count, 1)
    return {
        "rounds": count, "found": sum(proposed > 0 for proposed, _ in rounds) / max(count, 1), "a_round": a_round,
        "accepted": a_round / tokens, "tested": accepted / max(tested, 1), "tokens_a_round": 1 + a_round,
    }  # fmt: skip


def _answer(
    llm: LLM, built: SpeculationConfig, texts: dict[str, Sequence[str]], args: argparse.Namespace, tokens: int, temperature: float
) -> dict[str, list[tuple[int, int]]]:
    """All texts answered at once: proposed and accepted drafts of the rounds of each kind."""
    engine = llm.engine
    watched = FullRounds(built, engine.runner.launch_seconds, tokens)
    engine.speculation, engine.scheduler = watched, Scheduler(engine.config, engine.pool, watched)
    asked = [(kind, text) for kind, some in texts.items() for text in some]
    params = [
        SamplingParams(max_tokens=args.output, temperature=temperature, seed=args.seed + index) for index in range(len(asked))
    ]
    outputs = llm.chat([[{"role": "user", "content": text}] for _, text in asked], params)
    found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in texts}
    for (kind, _), one, output in zip(asked, params, outputs, strict=True):
        assert one.seed is not None
        found[kind] += watched.seen.get(one.seed, [])
        if args.show:
            print(f"{kind}: {output.outputs[0].text!r}")
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True, help="a model's file or folder")
    parser.add_argument("--draft", help="likewise, for method draft")
    parser.add_argument("--method", choices=("draft", "ngram", "truncated"), default="draft")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[3])
    parser.add_argument("--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 0.7])
    parser.add_argument("--kinds", type=lambda text: text.split(","), help=f"of {', '.join(TEXTS | EDITS)}")
    parser.add_argument("--output", type=int, default=96)
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype")
    parser.add_argument("--show", action="store_true", help="print what was answered")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    if (args.method == "draft") != (args.draft is not None):
        parser.error("--draft belongs to --method draft, which needs it")
    if args.kinds is None:
        args.kinds = list(TEXTS | EDITS if args.method == "ngram" else TEXTS)
    if not set(args.kinds) <= set(TEXTS | EDITS):
        parser.error(f"--kinds are of {', '.join(TEXTS | EDITS)}")
    return args


if __name__ == "__main__":
    main()
