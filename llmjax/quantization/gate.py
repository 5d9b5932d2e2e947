"""The gate: limits, checks, and the verdict whether a candidate may take its baseline's place. Pure arithmetic over `Quality`.

A verdict as JSON (`Verdict.as_json`), version 1:

    {"version": 1, "passed": bool, "decision": "pass" | "stop" | "fallback",
     "refused": [names of the checks that failed, in order],
     "skipped": [names of the metrics that have a limit and were not measured, and need not be],
     "checks": [{"name": str, "passed": bool, "value": number | null, "bound": "max" | "min", "limit": number,
                 "allowance": number, "reason": str}],
     "quality": {...}}    as `Quality.as_json` gives it

A check passes when value <= limit + allowance (bound "max"), or value >= limit - allowance ("min"). `value` is null where there
is no finite one, which never passes. `reason` is one line for people, also of a check that passed. `decision` is "pass", or what
was to be done with a candidate that is refused: "stop" serves nothing, "fallback" serves the baseline.

Measures of read text are paired token by token and steady: they have no allowance. Outputs are yes or no, and of a few dozen some
turn over by a hair's breadth, so that their allowance is 1.645 standard deviations of that: sqrt(b + c) of the b + c things on
which the models differ (McNemar 1947), one-sided 95 %.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from llmjax.errors import ConfigError
from llmjax.quantization.agreement import finite_or_none
from llmjax.quantization.quality import Quality
from llmjax.quantization.tasks import Paired

VERSION = 1
ONE_SIDED_95 = 1.645

OnFail = Literal["stop", "fallback"]
Bound = Literal["max", "min"]


@dataclasses.dataclass(frozen=True)
class Metric:
    """What can be limited: by which bound, and in words."""

    bound: Bound
    about: str


METRICS: dict[str, Metric] = {
    "perplexity_ratio": Metric("max", "perplexity of the candidate by the baseline's"),
    "top1_agreement": Metric("min", "share of tokens before which both would have said the same"),
    "kl": Metric("max", "mean KL(baseline || candidate), nats a token"),
    "kl_p99": Metric("max", "99th percentile of KL(baseline || candidate) over the tokens, nats"),
    "kl_token": Metric("max", "largest KL(baseline || candidate) of a token, nats; it grows with the text"),
    "block_error": Metric("max", "largest error of a layer's attention or MLP, by that of plain int8 rounding"),
    "loop_rate": Metric("max", "share of the candidate's that run into a loop"),
    "loop_rate_increase": Metric("max", "that share less the baseline's"),
    "exact_match_ratio": Metric("min", "tasks that the candidate solves by those the baseline solves"),
    "arithmetic_drop": Metric("max", "share of sums right, the baseline's less the candidate's"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a candidate must keep to. None does not ask; the names are those of `METRICS` behind max_ or min_.

    The defaults for what the whole model says leave twice the room that int8 weights with a scale a channel take on SmolLM2-135M,
    where rounding costs much for the size of the model. A scale, a layer or a whole blind int8 that is wrong is far outside of
    them; one lost head of hundreds may be inside, and shows in its own block (`bench/gate_power.py` has figures). A block may be
    off by three times what plain rounding costs it: smoothing, which moves errors about, comes to 2.4 at most, one scale a matrix
    to 17. int8 activations cost more than weights do; what they do to a block alone is not asked.

    Attributes:
        min_tokens: tokens of text to be read before anything is said about them.
        min_outputs: outputs of a kind, likewise.
        required: metrics that must have been measured; other limits hold where there is something to measure.
    """

    max_perplexity_ratio: float | None = 1.02
    min_top1_agreement: float | None = 0.95
    max_kl: float | None = 0.01
    max_kl_p99: float | None = 0.04
    max_kl_token: float | None = None
    max_block_error: float | None = 3.0
    max_loop_rate: float | None = None
    max_loop_rate_increase: float | None = 0.05
    min_exact_match_ratio: float | None = 0.95
    max_arithmetic_drop: float | None = 0.1
    min_tokens: int = 1000
    min_outputs: int = 16
    required: frozenset[str] = frozenset({"loop_rate_increase"})

    def __post_init__(self) -> None:
        for name, metric in METRICS.items():
            value = getattr(self, f"{metric.bound}_{name}")
            if value is not None and not (type(value) in (int, float) and 0 <= value <= sys.float_info.max):
                raise ConfigError(f"the limit of {name} must be a finite number from 0 on, or null for none, got {value!r}")
        for name in ("min_tokens", "min_outputs"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"{name} must be a whole number from 1 on, got {getattr(self, name)!r}")
        for name in self.required:
            if name not in METRICS:
                raise ConfigError(f"there is no metric {name!r} to require; known: {', '.join(METRICS)}")

    @classmethod
    def of(cls, bounds: Iterable[Mapping[str, Any]], **options: Any) -> Limits:
        """The defaults, changed by a list as YAML has it: {metric: name, max or min: number or null}; `options` are other fields.

        Metrics that are named with a number become required. Raises `ConfigError` for an unknown metric, one named twice, and
        a bound of the wrong side.
        """
        fields: dict[str, Any] = {}
        required = set(cls.required)
        for one in bounds:
            name = one.get("metric")
            if name not in METRICS:
                raise ConfigError(f"there is no metric {name!r}; known: {', '.join(METRICS)}")
            bound = METRICS[name].bound
            if set(one) != {"metric", bound}:
                raise ConfigError(f"the limit of {name} has one bound, {bound}: {{metric: {name}, {bound}: NUMBER}}")
            if f"{bound}_{name}" in fields:
                raise ConfigError(f"the limit of {name} is given twice")
            fields[f"{bound}_{name}"] = one[bound]
            required.add(name) if one[bound] is not None else required.discard(name)
        return cls(**{"required": frozenset(required)} | fields | options)

    def of_metric(self, name: str) -> float | None:
        """The limit of one metric."""
        value: float | None = getattr(self, f"{METRICS[name].bound}_{name}")
        return value


@dataclasses.dataclass(frozen=True)
class Check:
    """One limit and what was found; see the module's text."""

    name: str
    passed: bool
    value: float | None
    bound: Bound
    limit: float
    allowance: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the gate says. Same quality and limits, same verdict."""

    decision: Literal["pass", "stop", "fallback"]
    checks: tuple[Check, ...]
    skipped: tuple[str, ...]
    quality: Quality

    @property
    def passed(self) -> bool:
        """Whether the candidate may be served."""
        return self.decision == "pass"

    @property
    def refused(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if not check.passed)

    def line(self) -> str:
        """The verdict in one line for people: what was wrong, or that nothing was."""
        if self.passed:
            return f"the candidate passes all {len(self.checks)} checks"
        return "the candidate is refused: " + "; ".join(check.reason for check in self.checks if not check.passed)

    def as_json(self) -> dict[str, Any]:
        """As the module's text describes."""
        return {
            "version": VERSION,
            "passed": self.passed,
            "decision": self.decision,
            "refused": list(self.refused),
            "skipped": list(self.skipped),
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "quality": self.quality.as_json(),
        }


def judge(quality: Quality, limits: Limits | None = None, *, on_fail: OnFail = "stop") -> Verdict:
    """Hold what was measured against the limits. A model that was not finite anywhere fails by name, whatever else it did."""
    limits = Limits() if limits is None else limits
    checks = [*_soundness(quality), _enough("tokens", quality.agreement.tokens, limits.min_tokens, "tokens of held-out text")]
    skipped = []
    for name in METRICS:
        if limits.of_metric(name) is None:
            continue
        found = _FOUND[name](quality)
        if found is None and name not in limits.required:
            skipped.append(name)
        else:
            checks += _checks(name, found, limits)
    passed = all(check.passed for check in checks)
    return Verdict("pass" if passed else on_fail, tuple(checks), tuple(skipped), quality)


@dataclasses.dataclass(frozen=True)
class _Found:
    """A value, its allowance, the number of outputs it comes from, and where it was found. `why` says what keeps it from having a
    value."""

    value: float | None
    allowance: float = 0.0
    outputs: int | None = None
    why: str = "it is not finite"
    where: str = ""


def _checks(name: str, found: _Found | None, limits: Limits) -> list[Check]:
    limit, metric = limits.of_metric(name), METRICS[name]
    assert limit is not None
    if found is None:
        return [Check(name, False, None, metric.bound, limit, 0.0, f"{name} was not measured: give the data that it needs")]
    checks = []
    if found.outputs is not None and found.outputs < limits.min_outputs:
        checks.append(_enough(f"{name}.outputs", found.outputs, limits.min_outputs, f"outputs for {name}"))
    value = finite_or_none(found.value)
    if value is None:
        return [*checks, Check(name, False, None, metric.bound, limit, 0.0, f"{name} has no value: {found.why}{found.where}")]
    edge = limit + found.allowance if metric.bound == "max" else limit - found.allowance
    passed = value <= edge if metric.bound == "max" else value >= edge
    beyond = "above" if metric.bound == "max" else "below"
    reason = f"{name} {value:.5g}{found.where} is {'within' if passed else beyond} {limit:g}"
    reason += f" with an allowance of {found.allowance:.3g} for {found.outputs} outputs" if found.allowance else ""
    return [*checks, Check(name, passed, value, metric.bound, limit, found.allowance, reason)]


def _soundness(quality: Quality) -> list[Check]:
    """That both models gave finite numbers everywhere: what is wrong with the baseline cannot be judged either."""
    read, checks = quality.agreement, []
    place = "" if read.first_broken is None else f", first in text {read.first_broken[0]} at token {read.first_broken[1] + 1}"
    said = "" if quality.first_error is None else f" ({quality.first_error})"
    for side in ("candidate", "baseline"):
        for name, count, what in (
            ("finite", getattr(read, f"{side}_broken"), f"tokens of the {side} had NaN or infinite scores{place}"),
            ("outputs", getattr(quality, f"{side}_errors"), f"outputs of the {side} ended in an error{said}"),
        ):
            reason = f"{count} {what}" if count else f"no {what.removesuffix(place).removesuffix(said)}"
            checks.append(Check(f"{side}.{name}", count == 0, float(count), "max", 0.0, 0.0, reason))
    return checks


def _enough(name: str, count: int, needed: int, what: str) -> Check:
    reason = f"{count} {what}" + ("" if count >= needed else f": too few to judge, {needed} are needed")
    return Check(name, count >= needed, float(count), "min", float(needed), 0.0, reason)


def _asked(pairs: Paired | None) -> Paired | None:
    """None where nothing was asked."""
    return pairs if pairs is not None and pairs.count else None


def _block_error(quality: Quality) -> _Found | None:
    worst = quality.worst_block
    return None if worst is None else _Found(worst[1], where=f" in {worst[0]}")


def _loop_rate(quality: Quality) -> _Found | None:
    loops = _asked(quality.loops)
    return None if loops is None else _Found(loops.candidate / loops.count, 0.0, loops.count)


def _loop_rate_increase(quality: Quality) -> _Found | None:
    loops = _asked(quality.loops)
    if loops is None:
        return None
    return _Found((loops.candidate - loops.baseline) / loops.count, _allowance(loops, loops.count), loops.count)


def _exact_match_ratio(quality: Quality) -> _Found | None:
    solved = _asked(quality.exact_match)
    if solved is None:
        return None
    if not solved.baseline:
        return _Found(
            None, 0.0, solved.count, "the baseline solves no task, so that nothing can be lost: give tasks it can solve"
        )
    return _Found(solved.candidate / solved.baseline, _allowance(solved, solved.baseline), solved.count)


def _arithmetic_drop(quality: Quality) -> _Found | None:
    sums = _asked(quality.arithmetic)
    return (
        None if sums is None else _Found((sums.baseline - sums.candidate) / sums.count, _allowance(sums, sums.count), sums.count)
    )


def _allowance(pairs: Paired, unit: int) -> float:
    return ONE_SIDED_95 * math.sqrt(pairs.only_baseline + pairs.only_candidate) / unit


_FOUND: dict[str, Callable[[Quality], _Found | None]] = {
    "perplexity_ratio": lambda quality: _Found(quality.agreement.perplexity_ratio, why=_why_none(quality)),
    "top1_agreement": lambda quality: _Found(quality.agreement.top1_agreement, why=_why_none(quality)),
    "kl": lambda quality: _Found(quality.agreement.kl_mean, why=_why_none(quality)),
    "kl_p99": lambda quality: _Found(quality.agreement.kl_p99 if quality.agreement.tokens else None, why=_why_none(quality)),
    "kl_token": lambda quality: _Found(quality.agreement.kl_max if quality.agreement.tokens else None, why=_why_none(quality)),
    "block_error": _block_error,
    "loop_rate": _loop_rate,
    "loop_rate_increase": _loop_rate_increase,
    "exact_match_ratio": _exact_match_ratio,
    "arithmetic_drop": _arithmetic_drop,
}


def _why_none(quality: Quality) -> str:
    return "it is not finite" if quality.agreement.tokens else "no token was judged"
