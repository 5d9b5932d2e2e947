"""The `speculative` section of an engine: what a file may say of speculative decoding."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from llmjax.engine.config import SpeculationConfig
from llmjax.pipeline.schema import Section, Share, located

_DEFAULTS = SpeculationConfig(method="ngram")


class SpeculativeSection(Section):
    """Tokens drafted by something cheap and verified together by the model: the answers are those without it."""

    method: Literal["off", "ngram", "draft", "truncated"] = Field(
        "off",
        description="Who drafts: ngram (what followed the last tokens where they stood before), draft (a smaller model) or "
        "truncated (the first layers of the model itself).",
    )
    draft: str | None = Field(None, description="Stage that gives the draft model, for method draft.")
    tokens: int = Field(_DEFAULTS.tokens, ge=1, description="Tokens drafted at a time, at most; up to 8.")
    temperature: float = Field(
        _DEFAULTS.temperature,
        gt=0,
        description="Of the draft, relative to the request's; it changes how many drafts are accepted, never what is answered. "
        "`llmjax tune` finds the best.",
    )
    min_acceptance: Share = Field(
        _DEFAULTS.min_acceptance,
        description="Share of the tested drafts; a request below it is decoded plainly, and tried again now and then.",
    )
    max_length: int | None = Field(
        None, ge=1, description="Tokens of prompt and output beyond which a request does not draft. By default no limit."
    )
    disable_above_batch: int = Field(
        _DEFAULTS.disable_above_batch, ge=1, description="Decoding requests above which nobody drafts."
    )
    adaptive: bool = Field(
        _DEFAULTS.adaptive,
        description="Decide anew for each launch what is fastest. false always drafts `tokens`, whatever it costs, to measure.",
    )
    layers: int | None = Field(
        None, ge=1, description="Layers of a truncated draft. By default a quarter of the model's, at least one."
    )
    ngram_min: int = Field(_DEFAULTS.ngram_min, ge=1, description="Tokens that must stand there before, at least.")
    ngram_max: int = Field(_DEFAULTS.ngram_max, ge=1, description="The same at most; the longest is tried first.")

    @model_validator(mode="after")
    def _whose(self) -> SpeculativeSection:
        if self.method == "draft" and self.draft is None:
            raise located("method draft needs a draft model: name its stage with 'draft: NAME'", "method")
        if self.draft is not None and self.method != "draft":
            raise located(f"names a draft model, and the method is {self.method}: say 'method: draft', or leave it out", "draft")
        if self.layers is not None and self.method != "truncated":
            raise located(f"is for method truncated, and the method is {self.method}: leave it out", "layers")
        return self

    def config(self) -> SpeculationConfig | None:
        """The engine's own configuration; None where it is off. Raises `ConfigError` for numbers that cannot be."""
        if self.method == "off":
            return None
        return SpeculationConfig(
            method=self.method,
            tokens=self.tokens,
            temperature=self.temperature,
            min_acceptance=self.min_acceptance,
            max_length=self.max_length,
            disable_above_batch=self.disable_above_batch,
            adaptive=self.adaptive,
            layers=self.layers,
            ngram_min=self.ngram_min,
            ngram_max=self.ngram_max,
        )
