"""`Plan`: which parameters become int8, which stay, and the numbers that decided. Host only: plain data, written as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmjax.errors import ConfigError
from llmjax.model.config import DTYPES
from llmjax.model.quantization import SCHEMES, Scheme
from llmjax.quantization.patterns import matches

_FORMAT = 2
_INFINITE = "infinite"  # in JSON, which has no number for it


@dataclasses.dataclass(frozen=True)
class LinearSensitivity:
    """What quantising one linear alone does.

    Attributes:
        name: as in "layers.0.mlp.down".
        relative_l2: |error of its output| / |its output|, over all tokens and channels.
        cosine: between its output and the quantised one.
        kl: of the model's next-token distribution with this linear quantised, from the float one: mean over tokens, in nats;
            infinite when that model's logits are not finite, None where it was not measured.
        weights: of its matrix.
    """

    name: str
    relative_l2: float
    cosine: float
    kl: float | None
    weights: int


@dataclasses.dataclass(frozen=True)
class Decision:
    """The dtype of a linear's weight, why, and what was measured (None where nothing was)."""

    dtype: str
    reason: str
    sensitivity: LinearSensitivity | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What quantising a model does to each of its linears. All other parameters (embeddings, head, norms, biases) keep their
    dtype, or get what `keep` says.

    Attributes:
        scheme: "w8a16" (weights alone) or "w8a8" (activations too, with a scale a token).
        max_sensitivity: relative L2 error of a linear's output above which it stays as it is; None for no limit.
        keep: pattern -> float dtype, as it was given.
        linears: by name, in order of computation.
        max_perplexity_ratio: the quantised model's perplexity by the float one's that was allowed; None for no limit.
        perplexity_ratio: what was measured of this plan, on samples that decided nothing else; None where it was not.
    """

    scheme: Scheme
    max_sensitivity: float | None
    keep: Mapping[str, str]
    linears: Mapping[str, Decision]
    max_perplexity_ratio: float | None = None
    perplexity_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ConfigError(f"plan: scheme {self.scheme!r}; choose one of {', '.join(SCHEMES)}")
        for name, decision in self.linears.items():
            if decision.dtype not in (*DTYPES, "int8"):
                raise ConfigError(f"plan: {name}: dtype {decision.dtype!r}; choose int8 or one of {', '.join(DTYPES)}")

    @property
    def quantised(self) -> list[str]:
        """Names of the linears whose weights become int8."""
        return [name for name, decision in self.linears.items() if decision.dtype == "int8"]

    @property
    def share(self) -> float:
        """Of the weights of all linears that were measured, the share that becomes int8; 0 where none were measured."""
        sizes = {name: d.sensitivity.weights for name, d in self.linears.items() if d.sensitivity is not None}
        return sum(sizes.get(name, 0) for name in self.quantised) / max(sum(sizes.values()), 1)

    def dtype_of(self, parameter: str) -> str | None:
        """The dtype for a parameter ("layers.0.mlp.down.weight", "final_norm.weight"); None: it stays as it is."""
        linear = parameter.removesuffix(".weight")
        if parameter.endswith(".weight") and linear in self.linears:
            return self.linears[linear].dtype
        return kept_dtype(parameter, self.keep)

    def to_json(self) -> str:
        """JSON text; `from_json` reads it."""
        fields = {"format": _FORMAT} | dataclasses.asdict(self)
        for decision in fields["linears"].values():
            if (measured := decision["sensitivity"]) is not None:
                measured |= {name: _INFINITE for name, value in measured.items() if value == math.inf}
        return json.dumps(fields, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of a text. Raises `ConfigError` when it is none."""
        try:
            fields: dict[str, Any] = json.loads(text)
            if fields.pop("format") != _FORMAT:
                raise ConfigError(f"the plan is not of format {_FORMAT}: make it again with this llmjax")
            linears = {name: _decision(**decision) for name, decision in fields.pop("linears").items()}
            return cls(linears=linears, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"this is no plan of a quantisation ({type(error).__name__}): make it again") from None


def make_plan(
    sensitivities: Sequence[LinearSensitivity],
    *,
    scheme: Scheme,
    model_dtype: str,
    max_sensitivity: float | None = None,
    keep: Mapping[str, str] | None = None,
) -> Plan:
    """Int8 for every linear but those that `keep` names, those above `max_sensitivity`, and those whose error is infinite.

    Args:
        sensitivities: of every linear of the model, measured under this scheme.
        model_dtype: what a linear that stays has.
        keep: pattern -> float dtype; see `kept_dtype`.
    Raises ConfigError for a scheme, limit or dtype that there is not, or nothing measured.
    """
    if max_sensitivity is not None and not 0 <= max_sensitivity < math.inf:
        raise ConfigError(f"max_sensitivity is a relative error, 0 or more, got {max_sensitivity}")
    if not sensitivities:
        raise ConfigError("a plan needs the sensitivity of every linear: measure them first")
    kept = dict(keep or {})
    for pattern, dtype in kept.items():
        if dtype not in DTYPES:
            raise ConfigError(f"keep: {pattern}: {dtype!r} is not a dtype to keep; choose one of {', '.join(DTYPES)}")
    linears: dict[str, Decision] = {}
    for found in sensitivities:
        own = kept_dtype(f"{found.name}.weight", kept)
        if own is not None:
            linears[found.name] = Decision(own, "kept by a pattern", found)
        elif not math.isfinite(found.relative_l2 + (found.kl or 0.0)):
            linears[found.name] = Decision(model_dtype, "quantised, it makes the model's output infinite or NaN", found)
        elif max_sensitivity is not None and found.relative_l2 > max_sensitivity:
            why = f"relative L2 {found.relative_l2:.3g} is above {max_sensitivity:g}"
            linears[found.name] = Decision(model_dtype, why, found)
        else:
            linears[found.name] = Decision("int8", "within the budget", found)
    return Plan(scheme, max_sensitivity, kept, linears)


def fit_perplexity(
    plan: Plan, ratio_of: Callable[[Plan], float], *, model_dtype: str, max_ratio: float, progress: Callable[[int], None]
) -> Plan:
    """The plan with so many more linears kept that the measured perplexity ratio is at most `max_ratio`.

    Greedy: those go first that cost most for each weight that stays (KL; where it was not measured, the square of the relative L2
    error). How many is found by doubling and bisection, so that keeping one less, of the same order, was measured as too few;
    that is not always the fewest, as what one linear costs depends on the others.

    Args:
        plan: measured; what it keeps stays kept.
        ratio_of: measures a plan. NaN counts as too much.
        model_dtype: what a linear that stays has.
        progress: called with the plans measured so far.

    Raises ConfigError for a limit below 1 or that is not finite, and when nothing would be left to quantise.
    """
    if not 1 <= max_ratio < math.inf:
        raise ConfigError(f"max_perplexity_ratio is 1 or more: 1.01 lets perplexity grow by 1 %, got {max_ratio}")
    order = _by_cost(plan)
    measured: dict[int, float] = {}

    def keeping(count: int) -> Plan:
        why = f"one of the {count} that cost most: without them the perplexity ratio is above {max_ratio:g}"
        kept = {name: Decision(model_dtype, why, plan.linears[name].sensitivity) for name in order[:count]}
        linears = {name: kept.get(name, decision) for name, decision in plan.linears.items()}
        return dataclasses.replace(plan, linears=linears, max_perplexity_ratio=max_ratio, perplexity_ratio=measured.get(count))

    def enough(count: int) -> bool:
        measured[count] = ratio_of(keeping(count))
        progress(len(measured))
        return measured[count] <= max_ratio

    few, many = -1, 0  # too few, and what is tried next
    while not (many < len(order) and enough(many)):
        if many >= len(order):
            raise ConfigError(f"no linear can be int8 within max_perplexity_ratio {max_ratio:g}: raise it, or choose w8a16")
        few, many = many, min(max(1, 2 * many), len(order) - 1) if many < len(order) - 1 else len(order)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return keeping(many)


def _by_cost(plan: Plan) -> list[str]:
    """The linears that become int8, the one that costs most for each of its weights first."""
    found = [(name, plan.linears[name].sensitivity) for name in plan.quantised]
    if any(one is None for _, one in found):
        raise ConfigError("a perplexity ratio needs the sensitivity of every linear: measure them first")
    whole = all(one is not None and one.kl is not None for _, one in found)

    def cost(one: LinearSensitivity) -> float:
        return (one.kl if whole and one.kl is not None else one.relative_l2**2) / one.weights

    return [name for name, one in sorted(found, key=lambda pair: -cost(pair[1]) if pair[1] is not None else 0.0)]


def kept_dtype(parameter: str, keep: Mapping[str, str]) -> str | None:
    """The dtype of the last pattern that names a parameter ("layers.0.mlp.down.weight"), None without one; see `patterns.py`."""
    path = tuple(parameter.split("."))
    return next((dtype for pattern, dtype in reversed([*keep.items()]) if matches(pattern, path)), None)


def ranked(sensitivities: Sequence[LinearSensitivity]) -> list[LinearSensitivity]:
    """The most sensitive first: by relative L2, then KL."""
    return sorted(sensitivities, key=lambda found: (-found.relative_l2, -(found.kl or 0.0), found.name))


def _decision(dtype: str, reason: str, sensitivity: dict[str, Any] | None) -> Decision:
    if sensitivity is None:
        return Decision(dtype, reason)
    numbers: dict[str, Any] = {name: math.inf if value == _INFINITE else value for name, value in sensitivity.items()}
    return Decision(dtype, reason, LinearSensitivity(**numbers))
