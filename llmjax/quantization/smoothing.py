"""SmoothQuant: the outliers of activation channels moved into the weights, where a scale a channel takes them.

Owns the factors and where they are folded in. Pure: arrays in, new arrays out; the given tree is not changed.

What reads a norm is smoothed by that norm's scale. What the down projection reads is a gate's output times the up projection's,
and is smoothed by the rows of that: each has a scale of its own, so that it loses nothing to the factor. In small models those
inputs have the worst outliers of all.
Source: Xiao, Lin, Seznec, Wu, Demouth, Han, SmoothQuant, 2022 (arXiv 2211.10438), equation 4; through the up projection as in
Lin, Tang, Tang, Yang, Dang, Han, AWQ, 2023 (arXiv 2306.00978).
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from llmjax.errors import ConfigError
from llmjax.model.config import ModelConfig
from llmjax.quantization.calibration import Calibration
from llmjax.quantization.layer_walk import Params, check_walkable

EVEN = 0.5
"""The most that alpha is for what down reads, whose outliers would else only change places. On SmolLM2-135M (w8a8) KL was 0.0118
with 0.7 for the norms and 0.5 here, 0.0147 with 0.7 for both."""

SMOOTHED = (("attention_norm", "attention", "qkv"), ("mlp_norm", "mlp", "gate_up"))
"""Norm, block and linear: the linears that read a norm, which can give its channels any factor."""


def alpha_for(name: str, alpha: float) -> float:
    """How far outliers of a linear's inputs are moved where `alpha` is wanted."""
    return min(alpha, EVEN) if name.endswith(".down") else alpha


def smoothing_factors(activation_absmax: np.ndarray, weight: Float[Array, "out in"], *, alpha: float) -> np.ndarray:
    """float32 [in]: what a linear's inputs are divided by and its weight's columns are multiplied with.

    max|x|^alpha / max|w|^(1 - alpha) for each channel; 1 for a channel of zeros, which has no outliers to move.

    Args:
        activation_absmax: [in], as calibration has it.
        alpha: 0 leaves all difficulty in the activations, 1 moves all of it into the weights.
    Raises ConfigError for an alpha outside 0..1, sizes that differ, or magnitudes that are not finite.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"smoothing: alpha lies between 0 and 1, got {alpha}")
    columns = np.asarray(jnp.max(jnp.abs(weight), axis=0), np.float64)
    inputs = np.asarray(activation_absmax, np.float64)
    if inputs.shape != columns.shape:
        raise ConfigError(f"smoothing: {inputs.shape[0]} activation channels for a weight of {columns.shape[0]} columns")
    if not (np.isfinite(inputs).all() and bool(jnp.isfinite(weight).all())):  # a column's largest may hide NaN
        raise ConfigError("smoothing: activations or weights are NaN or infinite")
    factors = np.ones_like(columns)
    used = (inputs > 0) & (columns > 0)
    factors[used] = inputs[used] ** alpha / columns[used] ** (1 - alpha)
    return factors.astype(np.float32)


def smooth(params: Params, config: ModelConfig, calibration: Calibration, *, alpha: float = 0.5) -> Params:
    """The same model with smoother activations; its logits are unchanged but for rounding to the weights' dtype.

    The statistics of the smoothed linears no longer hold: calibrate the result again where ranges of activations are wanted.

    Args:
        params: a float model; shares with the result what is not smoothed.
        calibration: of this model.
        alpha: see `smoothing_factors`; for down at most `EVEN`.

    Raises:
        ConfigError: alpha is outside 0..1, the calibration is of another model, or a factor does not fit the weights' dtype.
        UnsupportedModelError: not a float decoder of llmjax.model.
    """
    check_walkable(params, config)

    def factors(name: str, weight: Array) -> np.ndarray:
        if name not in calibration.linears:
            raise ConfigError(f"the calibration has no {name}: it is of another model; calibrate this one")
        try:
            return smoothing_factors(calibration.linears[name].channel_absmax, weight, alpha=alpha_for(name, alpha))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None

    return params | {"layers": {index: smooth_layer(params, index, factors) for index in range(config.num_layers)}}


def smooth_layer(params: Params, index: int, factors: Callable[[str, Array], np.ndarray]) -> Params:
    """A layer with the factors folded in: each norm in front of a linear is divided by them, and the linear's columns multiplied;
    likewise the rows of up and the columns of down.

    Args:
        params: of the whole model; shares with the result what is not smoothed.
        factors: float32 [in] for the name and the weight [out, in] of a linear. Asked for down first, and for gate and up when
            the rows of up are divided.

    Raises ConfigError by the linear's name for a factor that does not fit the weights' dtype.
    """
    layer = dict(params["layers"][index])
    layer["mlp"] = _through_up(layer["mlp"], f"layers.{index}.mlp.down", factors)
    for norm, block, linear in SMOOTHED:
        name = f"layers.{index}.{block}.{linear}"
        divisors, node = _smoothed(layer[block][linear], name, factors)
        scale = layer[norm]["weight"] / divisors
        _check_finite(name, scale)
        layer[norm] = layer[norm] | {"weight": scale}
        layer[block] = layer[block] | {linear: node}
    return layer


def _through_up(mlp: Params, name: str, factors: Callable[[str, Array], np.ndarray]) -> Params:
    """The block with down's columns multiplied by its factors, and up's rows and biases, the second half of gate_up, divided."""
    own, down = _smoothed(mlp["down"], name, factors)
    divisors = np.concatenate([np.ones_like(own), own])
    gate_up = {}
    for part, value in mlp["gate_up"].items():
        by_row = divisors.reshape(-1, *[1] * (value.ndim - 1))
        gate_up[part] = (value.astype("float32") / by_row).astype(value.dtype)
        _check_finite(name, gate_up[part])
    return mlp | {"gate_up": gate_up, "down": down}


def _smoothed(node: Params, name: str, factors: Callable[[str, Array], np.ndarray]) -> tuple[np.ndarray, Params]:
    """The factors of a linear, and the linear with them in its columns."""
    own = factors(name, node["weight"])
    weight = (node["weight"].astype("float32") * own).astype(node["weight"].dtype)
    _check_finite(name, weight)
    return own, node | {"weight": weight}


def _check_finite(name: str, value: Array) -> None:
    if not bool(jnp.isfinite(value).all()):
        raise ConfigError(
            f"{name}: smoothing: a factor does not fit the dtype of the weights; lower alpha, or load them in float32"
        )
