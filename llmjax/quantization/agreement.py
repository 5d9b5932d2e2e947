"""How far a candidate is from its baseline on given text: perplexity, agreement of the best token, divergence. Host only.

Texts are streamed: of one that was read a float a token is kept, for the percentile of the divergence. Sums are float64. What
is not finite is counted and left out of the sums, so that the counts, not the sums, say that a model is broken.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmjax.quantization.scores import Floats, Scorer, Scores, divergence

BLOCK = 64
"""Positions whose distributions exist at once."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Teacher-forced measures. Sums run over `tokens`: those for which both models gave finite numbers.

    Attributes:
        texts: that were read; those of fewer than two tokens have nothing to tell and are not counted.
        tokens: that were judged.
        baseline_nll, candidate_nll: sums of the negative logprobs of the tokens, nats.
        square_sum: of the differences of the two, squared.
        same_best: tokens before which both models would have said the same.
        kl_sum, kl_max: of KL(baseline || candidate), nats a token.
        kl_p99: 99th percentile of it. The noise of rounding is much the same everywhere, so that it is a few times the mean; a
            lost head hits few tokens hard, and shows here first. Unlike the largest it does not grow with the text.
        kl_exact: whether over the whole vocabulary; else it is a lower bound (`scores.divergence`).
        baseline_broken, candidate_broken: tokens at which a model was not finite, or gave a token that came no chance.
        first_broken: (text, token), counted from 0, of the first such place of either; None without any.
    """

    texts: int = 0
    tokens: int = 0
    baseline_nll: float = 0.0
    candidate_nll: float = 0.0
    square_sum: float = 0.0
    same_best: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    kl_p99: float = 0.0
    kl_exact: bool = True
    baseline_broken: int = 0
    candidate_broken: int = 0
    first_broken: tuple[int, int] | None = None

    @property
    def baseline_perplexity(self) -> float | None:
        """e to the mean negative logprob; None without tokens."""
        return _exp(self.baseline_nll / self.tokens) if self.tokens else None

    @property
    def candidate_perplexity(self) -> float | None:
        """As `baseline_perplexity`."""
        return _exp(self.candidate_nll / self.tokens) if self.tokens else None

    @property
    def perplexity_ratio(self) -> float | None:
        """The candidate's by the baseline's: above 1 is worse."""
        return _exp((self.candidate_nll - self.baseline_nll) / self.tokens) if self.tokens else None

    @property
    def perplexity_ratio_error(self) -> float | None:
        """Standard error of the ratio, as if tokens were independent (of neighbours they are not: it is rather larger)."""
        if self.tokens < 2 or self.perplexity_ratio is None:
            return None
        mean = (self.candidate_nll - self.baseline_nll) / self.tokens
        variance = max(self.square_sum / self.tokens - mean**2, 0.0) * self.tokens / (self.tokens - 1)
        return self.perplexity_ratio * math.sqrt(variance / self.tokens)

    @property
    def top1_agreement(self) -> float | None:
        """Share of tokens before which both models would have said the same."""
        return self.same_best / self.tokens if self.tokens else None

    @property
    def kl_mean(self) -> float | None:
        """Nats a token."""
        return self.kl_sum / self.tokens if self.tokens else None

    def as_json(self) -> dict[str, Any]:
        """Fields and measures as plain data; what is not finite is None."""
        names = (
            "baseline_perplexity", "candidate_perplexity", "perplexity_ratio", "perplexity_ratio_error", "top1_agreement",
            "kl_mean",
        )  # fmt: skip
        plain = dataclasses.asdict(self) | {name: getattr(self, name) for name in names}
        return {name: finite_or_none(value) for name, value in plain.items()}


def compare(baseline: Scorer, candidate: Scorer, texts: Iterable[Sequence[int]], *, block: int = BLOCK) -> Agreement:
    """Read all texts (token ids) with both models, one after the other, `block` positions at a time."""
    total = Agreement()
    divergences: list[Floats] = []
    for text in texts:
        if len(text) < 2:
            continue
        at = 0
        for ours, theirs in zip(baseline.score(text, block), candidate.score(text, block), strict=True):
            kl = divergence(ours, theirs)
            total, good = _add(total, ours, theirs, kl, at)
            divergences.append(kl[good])
            at += len(ours.chosen)
        total = dataclasses.replace(total, texts=total.texts + 1)
    p99 = float(np.percentile(np.concatenate(divergences), 99)) if total.tokens else 0.0
    return dataclasses.replace(total, kl_p99=p99)


def _add(total: Agreement, baseline: Scores, candidate: Scores, kl: Floats, at: int) -> tuple[Agreement, npt.NDArray[np.bool_]]:
    """The sums with a block more, and which of its tokens are in them."""
    # a token that only the candidate rules out has a KL of infinity even where another one came
    worse = candidate.broken | (~baseline.broken & ~np.isfinite(kl))
    good = ~(baseline.broken | worse)
    first = total.first_broken
    if first is None and not good.all():
        first = (total.texts, at + int(np.argmin(good)))
    delta = baseline.chosen[good] - candidate.chosen[good]
    summed = Agreement(
        texts=total.texts,
        tokens=total.tokens + int(good.sum()),
        baseline_nll=total.baseline_nll - float(baseline.chosen[good].sum()),
        candidate_nll=total.candidate_nll - float(candidate.chosen[good].sum()),
        square_sum=total.square_sum + float(np.square(delta).sum()),
        same_best=total.same_best + int((baseline.best == candidate.best)[good].sum()),
        kl_sum=total.kl_sum + float(kl[good].sum()),
        kl_max=max(total.kl_max, float(kl[good].max(initial=0.0))),
        kl_exact=total.kl_exact and baseline.ids is None,
        baseline_broken=total.baseline_broken + int(baseline.broken.sum()),
        candidate_broken=total.candidate_broken + int(worse.sum()),
        first_broken=first,
    )
    return summed, np.asarray(good, np.bool_)


def finite_or_none(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
