"""`SamplingParams`: everything a request may ask of the sampler. Host only: knows neither JAX nor the tokenizer.

Values are checked here, once, when the object is made; what depends on the model (token ids against the vocabulary, the
context limit) is checked by the engine when the request is added.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llmjax.errors import RequestError
from llmjax.structured_output import StructuredOutput

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 24
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_SALT_CHARS = 1024
GREEDY_TEMPERATURE = 1e-3
_INT32_MAX = 2**31 - 1
_INT32_DIGITS = 10  # int() refuses texts of more than a few thousand


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Filters apply in this order: logit bias and penalties on the raw logits, then temperature, then `top_k`, then
    `top_p` over what `top_k` left (renormalised), then `min_p` relative to the most likely token. Tokens tied with the
    last one kept are kept too.

    Attributes:
        n: choices per prompt; choice i is sampled with a noise of its own, a function of (seed, i).
        max_tokens: new tokens at most; None means up to the context limit. 0 is allowed only with `prompt_logprobs`.
        min_tokens: end-of-sequence ids, stop ids and stop strings have no effect before this many new tokens.
        temperature: 0, or anything below 1e-3, is greedy (ties go to the lowest id).
        top_k: 0 or -1 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of ids seen in prompt or output.
        presence_penalty, frequency_penalty: subtracted from logits of ids seen in the output.
        logit_bias: token id -> number added to its logit, -100..100.
        seed: None draws a fresh one for the request.
        stop: one string or up to 16; the text ends before the first that appears.
        stop_token_ids: ids that end the output, besides the model's own end-of-sequence ids.
        include_stop_str_in_output: keep the stop string that matched at the end of the text.
        ignore_eos: the model's end-of-sequence ids do not end the output (`stop_token_ids` still do).
        logprobs: None for none, else the number (0..20) of alternatives given beside the chosen token's logprob.
        prompt_logprobs: the same for every prompt token but the first.
        logprobs_mode: "raw" (default) is the log-softmax of the model's own logits, whatever the temperature and
            filters; "processed" is that of the distribution really sampled from.
        skip_special_tokens: leave special tokens out of the text (never out of the token ids).
        cache_salt: requests share cached prefixes only with those of the same salt, None included: whoever must not learn by
            timing what others have asked gets a salt of their own.
        structured: the form that the output must have: only tokens are sampled that keep to it. "raw" logprobs do not know of
            it. A complete output ends ("stop"), whatever `min_tokens` says.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, _INT32_MAX)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise RequestError("max_tokens is 0: ask for at least 1 token, or for prompt_logprobs", "max_tokens")
        _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens")
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, 1000.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            put(self, name, _number(name, getattr(self, name), low, high))
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 and at most 1, got 0", "top_p")
        if self.repetition_penalty <= 1e-6:
            raise RequestError(f"repetition_penalty must be above 1e-6, got {self.repetition_penalty}", "repetition_penalty")
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in ("raw", "processed"):
            raise RequestError(f"logprobs_mode must be 'raw' or 'processed', got {self.logprobs_mode!r}", "logprobs_mode")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        if self.cache_salt is not None and not (isinstance(self.cache_salt, str) and 1 <= len(self.cache_salt) <= MAX_SALT_CHARS):
            raise RequestError(
                f"cache_salt must be a string of 1 to {MAX_SALT_CHARS} characters, got {self.cache_salt!r:.60}", "cache_salt"
            )
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise RequestError(f"structured must be a StructuredOutput, got {self.structured!r:.60}", "structured")
        put(self, "stop", _stop_strings(self.stop))
        put(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        put(self, "logit_bias", _bias(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        assert isinstance(self.stop_token_ids, tuple)
        return self.stop_token_ids

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature < GREEDY_TEMPERATURE


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a whole number, got {value!r}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}, got {value}", name)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}", name)
    if not low <= value <= high:  # also false for NaN
        raise RequestError(f"{name} must be between {low:g} and {high:g}, got {value}", name)
    return float(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple):
        raise RequestError(f"stop must be a string or a list of strings, got {value!r:.60}", "stop")
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(strings)}", "stop")
    for item in strings:
        if not isinstance(item, str):
            raise RequestError(f"stop must hold strings, got {item!r:.60}", "stop")
        if not 1 <= len(item) <= MAX_STOP_STRING_CHARS:
            raise RequestError(f"each stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(item)}", "stop")
    return tuple(strings)


def _stop_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise RequestError(f"stop_token_ids must be a list of token ids, got {value!r:.60}", "stop_token_ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(value)}", "stop_token_ids")
    for item in value:
        _integer("stop_token_ids", item, 0, _INT32_MAX)
    return tuple(dict.fromkeys(value))


def _bias(value: Any) -> dict[int, float] | None:
    if not value and isinstance(value, Mapping | None):
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r:.60}", "logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias takes at most {MAX_LOGIT_BIAS} ids, got {len(value)}", "logit_bias")
    out: dict[int, float] = {}
    for key, number in value.items():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _INT32_DIGITS:  # JSON's keys are strings
            key = int(key)
        _integer("logit_bias", key, 0, _INT32_MAX)
        if key in out:
            raise RequestError(f"logit_bias names token id {key} twice", "logit_bias")
        out[key] = _number("logit_bias", number, -100.0, 100.0)
    assert all(math.isfinite(v) for v in out.values())
    return out
