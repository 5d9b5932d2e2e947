"""`Plan`: which parameters become int8, which stay, and the numbers that decided. Host only: plain data, written as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
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
    """

    scheme: Scheme
    max_sensitivity: float | None
    keep: Mapping[str, str]
    linears: Mapping[str, Decision]

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
