"""What the quality measures see of a model: `Scorer`, `Generator`, and the numbers that a scorer gives. Host only.

Knows no engine and no parameters: `engine_model.py` and `forward_model.py` are two that stand behind these protocols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a conversation."""

_ROUNDING = 1e-6
"""What is left beside the best tokens is 1 minus float32 probabilities: below this it is rounding, not mass."""


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a model says about n tokens of a text, each from those before it. Natural logarithms.

    Attributes:
        chosen: [n], the logprob of the token that comes.
        logprobs: [n, K] of the tokens `ids`; -inf is a token that cannot come. NaN is kept, for the measures to find.
        ids: [n, K], or None: all V of the vocabulary in order.
    """

    chosen: Floats
    logprobs: Floats
    ids: Ints | None = None

    @classmethod
    def of_logits(cls, logits: npt.ArrayLike, tokens: Sequence[int]) -> Scores:
        """Of raw logits [n, V] and the n tokens that come. A row that holds NaN or +inf, or nothing but -inf, is NaN."""
        wide = np.asarray(logits, np.float64)
        largest = wide.max(-1, keepdims=True)
        sound = np.isfinite(largest)
        shifted = np.where(sound, wide - np.where(sound, largest, 0.0), np.nan)
        shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
        return cls(shifted[np.arange(len(tokens)), np.asarray(tokens, np.int64)], shifted)

    @property
    def best(self) -> Ints:
        """[n], the most likely token; the first of those that tie."""
        column = np.argmax(self.logprobs, axis=-1)
        return column if self.ids is None else self.ids[np.arange(len(column)), column]

    @property
    def broken(self) -> npt.NDArray[np.bool_]:
        """[n], where the model gave no distribution: NaN, +inf, or probability 0 for a token that came."""
        bad = np.isnan(self.logprobs) | (self.logprobs == np.inf)
        return np.asarray(~np.isfinite(self.chosen) | bad.any(-1), np.bool_)


def divergence(baseline: Scores, candidate: Scores) -> Floats:
    """[n], KL(baseline || candidate) in nats (Kullback and Leibler 1951).

    Exact over whole vocabularies. Of the best K tokens alone it is a lower bound: tokens that either side does not tell are taken
    as one, which never makes it larger.

    Raises ValueError when one side tells all of its vocabulary and the other does not.
    """
    if (baseline.ids is None) != (candidate.ids is None):
        raise ValueError("one model gives whole distributions and the other only its best tokens: score both in the same way")
    if baseline.ids is None or candidate.ids is None:
        return _terms(baseline.logprobs, candidate.logprobs).sum(-1)
    same = baseline.ids[:, :, None] == candidate.ids[:, None, :]
    known = same.any(-1)
    theirs = np.take_along_axis(candidate.logprobs, same.argmax(-1), axis=-1)
    p = np.where(known, baseline.logprobs, -np.inf)
    q = np.where(known, theirs, -np.inf)
    rest_p, rest_q = (np.log(np.maximum(1.0 - np.exp(side).sum(-1), _ROUNDING)) for side in (p, q))
    return np.asarray(np.maximum(_terms(p, q).sum(-1) + _terms(rest_p, rest_q), 0.0))


def _terms(p: Floats, q: Floats) -> Floats:
    """p * log(p / q) of logarithms; 0 where p is 0."""
    with np.errstate(invalid="ignore"):
        return np.where(p == -np.inf, 0.0, np.exp(p) * (p - q))


class Scorer(Protocol):
    """A model that reads given text."""

    def score(self, tokens: Sequence[int], block: int) -> Iterator[Scores]:
        """Of `tokens[1:]`, each from all tokens before it, in order: `block` at a time, the last time what is left.

        At least two tokens are given. A model that computes NaN gives NaN; it does not raise.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Generation:
    """One output. `text` is empty for a model without a tokenizer; `error` says why there is none (NaN, say)."""

    token_ids: tuple[int, ...]
    text: str = ""
    error: str | None = None


class Generator(Protocol):
    """A model that writes, always its most likely token."""

    def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Generation]:
        """The continuation of each prompt, to its end of sequence or `max_tokens`, in the order of the prompts."""
        ...
