"""What a quantisation is told as: figures of each layer and of the whole model, and the gate's verdict. Plain data, host only.

This is where calibration, sensitivity and gate meet; it takes their numbers and knows none of them. `report_page.py` shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.quantization.agreement import finite_or_none

Range = tuple[float, float]
"""Smallest and largest value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFigures:
    """One weight of the model. None where something was not measured.

    Attributes:
        name: the parameter's, "layers.0.mlp.down" say.
        dtype_before, dtype_after: "bfloat16", "int8".
        parameters: values in it.
        bytes_before, bytes_after: scales included.
        linear: whether it is the weight of a product, and so might be int8; False for norms and embeddings.
        kept: why it stayed in high precision, one line; empty where it did not.
        weight_range: of its values.
        input_range: of the activations that came in during calibration.
        input_clip: the largest magnitude that the observer kept of them.
        relative_l2, cosine, kl: when it alone is quantised: the error of its output by the output's size (both L2), the cosine
            between the two outputs, and KL of the final logits, nats a token.
        error_before, error_after: relative L2 error of its output in the quantised model: with nothing but rounding everywhere,
            and as it is now (plan, smoothing).
    """

    name: str
    dtype_before: str
    dtype_after: str
    parameters: int
    bytes_before: int
    bytes_after: int
    linear: bool = True
    kept: str = ""
    weight_range: Range | None = None
    input_range: Range | None = None
    input_clip: float | None = None
    relative_l2: float | None = None
    cosine: float | None = None
    kl: float | None = None
    error_before: float | None = None
    error_after: float | None = None

    @property
    def quantized(self) -> bool:
        """Whether it is int8 now; a layer that was kept in a wider type than before is not."""
        return self.dtype_after == "int8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationReport:
    """A whole quantisation. `facts` are for people (scheme, samples); `date` is UTC; `verdict` is `Verdict.as_json()`."""

    title: str
    date: str
    layers: Sequence[LayerFigures]
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verdict: Mapping[str, Any] | None = None

    @property
    def bytes_before(self) -> int:
        """Of all layers."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Of all layers."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def linear_share(self) -> float | None:
        """Share of the parameters of linear layers that were quantised; None without one."""
        linear = [layer for layer in self.layers if layer.linear]
        total = sum(layer.parameters for layer in linear)
        return sum(layer.parameters for layer in linear if layer.quantized) / total if total else None

    def ranking(self) -> list[LayerFigures]:
        """The layers whose sensitivity was measured, the worst first: by relative L2, what is not finite in front."""
        measured = [layer for layer in self.layers if layer.relative_l2 is not None]
        return sorted(measured, key=lambda layer: (-_worst_first(layer.relative_l2), layer.name))

    def as_json(self) -> dict[str, Any]:
        """Everything on the page as plain data: the fields, sums and the ranking's names. What is not finite is None."""
        return {
            "version": 1,
            "title": self.title,
            "date": self.date,
            "facts": dict(self.facts),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "linear_share": self.linear_share,
            "ranking": [layer.name for layer in self.ranking()],
            "layers": [_plain(layer) for layer in self.layers],
            "verdict": None if self.verdict is None else dict(self.verdict),
        }


def _worst_first(value: float | None) -> float:
    known = finite_or_none(value)
    return float("inf") if known is None else float(known)


def _plain(layer: LayerFigures) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in dataclasses.asdict(layer).items():
        out[name] = [finite_or_none(one) for one in value] if isinstance(value, tuple) else finite_or_none(value)
    return out
