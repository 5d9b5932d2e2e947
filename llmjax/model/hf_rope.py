"""Rotary settings from a Hugging Face config dict, in every spelling. Host only.

Two generations: a top-level `rope_theta` with a `rope_scaling` dict (or null), and transformers 5's single `rope_parameters`.
The kind is called `rope_type`, or `type` in older files. A kind that is not known is refused, never replaced by a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.errors import UnsupportedModelError
from llmjax.model.config import RopeScaling
from llmjax.model.config_fields import flag, number, optional_number, whole

_DEFAULT_THETA = 10000.0
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def parse_rope(config: Mapping[str, Any], max_positions: int) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of a config.json.

    `original_max_position_embeddings` is read where transformers reads it: for llama3 and yarn, at top level first, then in the
    dict, else `max_positions`. `dynamic` always stretches from `max_positions`.

    Raises `UnsupportedModelError` for an unknown kind, a part of the head left unrotated, rope that differs by layer, or a
    value that is missing or impossible.
    """
    settings = _settings(config)
    theta = number(settings, "rope_theta", config.get("rope_theta") or _DEFAULT_THETA)
    if theta <= 1.0:
        raise UnsupportedModelError(f"config.json: rope_theta must be above 1, got {theta}")
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor {settings['partial_rotary_factor']!r} is not supported; only 1 is"
        )
    if settings.get("mrope_section") is not None:
        raise UnsupportedModelError("config.json: mrope_section (multimodal rope) is not supported")
    return theta, _scaling(config, settings, max_positions)


def scaled_max_positions(max_positions: int, scaling: RopeScaling | None) -> int:
    """Context in tokens once stretched: `dynamic` and `yarn` say by how much beyond the trained length; the others declare it."""
    if scaling is None or scaling.kind not in ("dynamic", "yarn"):
        return max_positions
    return max(max_positions, int(scaling.original_max_positions * scaling.factor))


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one dict of rope settings, whichever key holds it."""
    settings: Any = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            settings = config[key]
            break
    if not isinstance(settings, Mapping):
        raise UnsupportedModelError(f"config.json: {key} must be an object, got {settings!r}")
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    if nested:
        if len(nested) != len(settings) or any(value != nested[0] for value in nested):
            raise UnsupportedModelError(
                f"config.json: {key} differs by layer type ({', '.join(settings)}); that is not supported"
            )
        return nested[0]
    return settings


def _scaling(config: Mapping[str, Any], settings: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in _KINDS:
        raise UnsupportedModelError(f"config.json: rope scaling {kind!r} is not supported; known: {', '.join(_KINDS)}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=number(settings, "factor"), original_max_positions=max_positions)
    if kind == "dynamic":
        return RopeScaling(kind="dynamic", factor=number(settings, "factor"), original_max_positions=max_positions)
    key = "original_max_position_embeddings"
    original = whole(config, key, settings.get(key) or max_positions)
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=number(settings, "factor"),
            original_max_positions=original,
            low_freq_factor=number(settings, "low_freq_factor"),
            high_freq_factor=number(settings, "high_freq_factor"),
        )
    return RopeScaling(
        kind="yarn",
        factor=number(settings, "factor", max_positions / original),
        original_max_positions=original,
        beta_fast=number(settings, "beta_fast", 32.0),
        beta_slow=number(settings, "beta_slow", 1.0),
        attention_factor=optional_number(settings, "attention_factor"),
        mscale=optional_number(settings, "mscale"),
        mscale_all_dim=optional_number(settings, "mscale_all_dim"),
        truncate=flag(settings, "truncate", True),
    )
