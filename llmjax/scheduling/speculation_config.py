"""`SpeculationConfig`: how an engine drafts tokens, and when it does not. Plain data; knows no requests."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from llmjax.errors import ConfigError

METHODS = ("ngram", "draft", "truncated")
MAX_DRAFT_TOKENS = 8
MAX_NGRAM = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding of one engine.

    Attributes:
        method: "ngram" drafts what followed the row's last tokens when they occurred before; "draft" asks a smaller model;
            "truncated" the target's own first layers.
        tokens: drafts of a row in one launch, at most (1 to 8).
        temperature: the draft's, relative to the request's. It changes how many drafts are accepted, never what is answered.
        min_acceptance: share of its drafts below which a request stops drafting.
        max_length: tokens of a sequence beyond which it does not draft; None is no limit.
        disable_above_batch: decoding rows above which nobody drafts.
        adaptive: False drafts `tokens` tokens always, whatever it costs and however few are accepted: for benchmarks and tests.
        layers: of "truncated": the target's first so many; None takes a quarter of them, at least one.
        ngram_min, ngram_max: of "ngram", and of outputs with a form with any method: tokens that must be found again, at least
            and at most; the longest match counts.
    """

    method: Literal["ngram", "draft", "truncated"]
    tokens: int = 3
    temperature: float = 1.0
    min_acceptance: float = 0.5
    max_length: int | None = None
    disable_above_batch: int = 32
    adaptive: bool = True
    layers: int | None = None
    ngram_min: int = 1
    ngram_max: int = 3

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"speculative.method must be one of {', '.join(METHODS)}, got {self.method!r}")
        for name in ("tokens", "disable_above_batch", "ngram_min", "ngram_max"):
            _check_count(name, getattr(self, name))
        for name in ("max_length", "layers"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.tokens > MAX_DRAFT_TOKENS:
            raise ConfigError(f"speculative.tokens must be 1 to {MAX_DRAFT_TOKENS}, got {self.tokens}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"speculative.temperature must be above 0, got {self.temperature}")
        if not 0 <= self.min_acceptance <= 1:
            raise ConfigError(f"speculative.min_acceptance must be between 0 and 1, got {self.min_acceptance}")
        if not self.ngram_min <= self.ngram_max <= MAX_NGRAM:
            raise ConfigError(
                f"speculative.ngram_min must be at most ngram_max, and that at most {MAX_NGRAM}; "
                f"got {self.ngram_min} and {self.ngram_max}"
            )
        if self.layers is not None and self.method != "truncated":
            raise ConfigError(f"speculative.layers belongs to method 'truncated', not to {self.method!r}: remove it")

    @property
    def lengths(self) -> tuple[int, ...]:
        """The numbers of drafts that launches choose from, rising."""
        return tuple(sorted({(self.tokens + 1) // 2, self.tokens}))

    def compiled_lengths(self, *, deterministic: bool) -> tuple[int, ...]:
        """Those that an engine built for this has programs of: one only in a deterministic engine."""
        return self.lengths[-1:] if deterministic else self.lengths

    def runs_on(self, built: SpeculationConfig, *, deterministic: bool) -> bool:
        """Whether an engine that was built for `built` has every program that this needs."""
        used = self.lengths if self.adaptive and not deterministic else (self.tokens,)
        compiled = built.compiled_lengths(deterministic=deterministic)
        same = all(getattr(self, name) == getattr(built, name) for name in ("method", "layers", "ngram_min", "ngram_max"))
        return same and set(used) <= set(compiled) and self.disable_above_batch <= built.disable_above_batch


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"speculative.{name} must be a whole number of at least 1, got {value!r}")
