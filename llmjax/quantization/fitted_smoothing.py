"""Smoothing factors that are searched: those with which rounding is expected to cost least, whatever SmoothQuant's alpha.

Owns the expected error and its descent; where factors are folded in is `smoothing`'s. Pure: arrays in, new arrays out.

What is minimised. A value that is rounded with step s is off by s^2 / 12 on the average (uniform noise: Widrow, Kollar,
Quantization Noise, 2008). A token's step is its largest input by 127, a row's its largest weight by 127; with factors f the
inputs are x / f and the weights w f. So the squared error of a token's output is, up to 1 / (12 127^2),

    max_c |x_c / f_c|^2  sum_c f_c^2 |w_c|^2         from the inputs; w_c are columns
    sum_c (x_c / f_c)^2  sum_r max_c |w_rc f_c|^2    from the weights

and the mean over tokens, each divided by the square of what its error is hidden in, is descended on log f with Adam. Samples are
few, and a channel that is rarely large has little to say in a mean: so of w8a8's factors half the way to SmoothQuant's, which
know the largest values alone, is gone back. (KL without that, with it, and SmoothQuant's: Qwen2.5-Coder-0.5B 0.0062, 0.0041,
0.0050; SmolLM2-135M 0.0112, 0.0112, 0.0164.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float

from llmjax.errors import ConfigError, NonFiniteError
from llmjax.model.config import ModelConfig
from llmjax.model.quantization import Scheme
from llmjax.quantization.layer_walk import Packed, Params, check_walkable, embed, groups, pack, refuse_bad_weights, run_layer
from llmjax.quantization.smoothing import alpha_for, smooth_layer, smoothing_factors

ALPHA = 0.7
"""SmoothQuant's; for down see `alpha_for`."""

MOST_TOKENS = 4096
"""Tokens that factors are fitted to, at most: their inputs of a layer are in memory together."""

_STEPS = 200
_RATE = 0.05  # of the first step, on the factors' logarithms; falls to nothing


def fit_smoothing(
    params: Params,
    config: ModelConfig,
    samples: Sequence[Sequence[int]],
    *,
    scheme: Scheme,
    sequence_length: int,
    progress: Callable[[int, int], None] | None = None,
) -> Params:
    """The same model with the factors folded in that suit these samples; see `smoothing.smooth`, whose `alpha` is not needed.

    The error of down's output is weighed by the residual stream that it is added to, those of the others by their own outputs.

    Args:
        params: a float model; shares with the result what is not smoothed.
        samples: token ids; the first `MOST_TOKENS` of them are used, of each `sequence_length` at most.
        scheme: "w8a16" leaves the inputs' share of the error out.
        progress: called with (layers done, layers in total).

    Raises:
        ConfigError: there is no sample with a token, or a factor does not fit the weights' dtype.
        ModelError: the weight of a linear holds NaN or infinity.
        NonFiniteError: inputs of a linear are NaN or infinite; it names the linear.
        UnsupportedModelError: not a float decoder of llmjax.model.
    """
    check_walkable(params, config)
    chosen = _few(samples, min(sequence_length, config.max_positions))
    refuse_bad_weights(params, config)
    parts = [pack([chosen[index] for index in group]) for group in groups([len(one) for one in chosen], sequence_length)]
    streams = [embed(params, packed, config=config) for packed in parts]
    layers = {}
    for index in range(config.num_layers):
        streams, inputs = _walked(params, index, streams, parts, config)
        behind = _counted(streams, parts)

        def factors(name: str, weight: Array, inputs: dict[str, Array] = inputs, behind: Array = behind) -> np.ndarray:
            x = inputs[name]
            hidden_in = behind if name.endswith(".down") else x.astype(jnp.float32) @ weight.astype(jnp.float32).T
            return fitted_factors(x, weight, _squares(hidden_in), alpha=alpha_for(name, ALPHA), scheme=scheme, name=name)

        layers[index] = smooth_layer(params, index, factors)
        if progress is not None:
            progress(index + 1, config.num_layers)
    return params | {"layers": layers}


def fitted_factors(
    x: Float[Array, "T in"],
    weight: Float[Array, "out in"],
    size: Float[Array, "T"],
    *,
    alpha: float,
    scheme: Scheme,
    name: str,
) -> np.ndarray:
    """float32 [in]: what a linear's inputs are divided by and its weight's columns are multiplied with. Those of least expected
    error, or for "w8a8" the geometric means of them and of `smoothing_factors`.

    A channel that is zero in all inputs, or in the weight, has nothing to tell: it gets the median of the others.

    Args:
        size: squared length of what a token's error is weighed by; tokens of 0 do not count.
        alpha: of SmoothQuant's factors.
        name: of the linear, for errors.

    Raises NonFiniteError for inputs or weights that are NaN or infinite.
    """
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    if not (bool(jnp.isfinite(x).all()) and bool(jnp.isfinite(weight).all())):  # the largest of a channel may hide NaN
        raise NonFiniteError(f"{name}: its inputs or weights are NaN or infinite: it cannot be smoothed; look at the weights")
    channels = np.asarray(jnp.max(jnp.abs(x), axis=0)), np.asarray(jnp.max(jnp.abs(weight), axis=0))
    used = (channels[0] > 0) & (channels[1] > 0)
    if not used.any():
        return np.ones(len(used), np.float32)
    inputs, start = scheme == "w8a8", np.log(smoothing_factors(channels[0], weight, alpha=alpha))
    found = np.asarray(_descended(x, weight, size, jnp.asarray(used), jnp.asarray(start), inputs=inputs))
    found = (found + start) / 2 if inputs else found
    factors: np.ndarray = np.exp(np.where(used, found, np.median(found[used])))
    return factors.astype(np.float32)


@functools.partial(jax.jit, static_argnames="inputs")
def _descended(
    x: Float[Array, "T in"],
    weight: Float[Array, "out in"],
    size: Float[Array, "T"],
    used: Bool[Array, "in"],
    start: Float[Array, "in"],
    *,
    inputs: bool,
) -> Float[Array, "in"]:
    """Logarithms of the factors, behind the descent from `start`. Channels that are not `used` stay where they were."""
    log_x, log_w = (jnp.log(jnp.abs(jnp.where(used, rows, 0.0))) for rows in (x, weight))
    counts = jnp.where(size > 0, 1.0 / size, 0.0) / jnp.maximum(jnp.sum(size > 0), 1)
    energy = jnp.where(used, counts @ x**2, 0.0)
    columns = jnp.where(used, jnp.sum(weight**2, axis=0), 0.0)

    def error(logs: Array) -> Array:
        of_weights = jnp.sum(_peaks(log_w, logs)) * jnp.sum(energy * jnp.exp(-2 * logs))
        of_inputs = counts @ _peaks(log_x, -logs) * jnp.sum(columns * jnp.exp(2 * logs)) if inputs else 0.0
        return jnp.log(of_weights + of_inputs)

    optimizer = optax.adam(optax.linear_schedule(_RATE, 0.0, _STEPS))

    def step(_: Array, carry: tuple[Array, optax.OptState]) -> tuple[Array, optax.OptState]:
        logs, state = carry
        updates, state = optimizer.update(jax.grad(error)(logs), state)
        return logs + updates, state

    logs: Array = lax.fori_loop(0, _STEPS, step, (start, optimizer.init(start)))[0]
    return logs


def _peaks(rows: Float[Array, "n in"], logs: Float[Array, "in"]) -> Float[Array, "n"]:
    """The square of the largest magnitude of each row; both are logarithms. Its gradient goes to the channel that is largest."""
    at = lax.stop_gradient(jnp.argmax(rows + logs, axis=1))
    return jnp.exp(2 * (jnp.take_along_axis(rows, at[:, None], axis=1)[:, 0] + logs[at]))


def _few(samples: Sequence[Sequence[int]], limit: int) -> list[Sequence[int]]:
    """The first tokens of the samples, without the empty ones."""
    chosen: list[Sequence[int]] = []
    left = MOST_TOKENS
    for sample in samples:
        if some := sample[: min(limit, left)]:
            chosen.append(some)
            left -= len(some)
    if not chosen:
        raise ConfigError("smoothing: fitted factors need samples, and the calibration has none with a token")
    return chosen


def _walked(
    params: Params, index: int, streams: list[Array], parts: list[Packed], config: ModelConfig
) -> tuple[list[Array], dict[str, Array]]:
    """The residual streams behind a layer, and what went into each of its linears, of all samples."""
    ran = [run_layer(params, index, x, packed, config=config) for x, packed in zip(streams, parts, strict=True)]
    given = zip(*(inputs for _, inputs in ran), strict=True)
    return [x for x, _ in ran], {same[0].name: _counted([one.x for one in same], parts) for same in given}


def _counted(arrays: list[Array], parts: list[Packed]) -> Array:
    """The rows of tokens, without padding."""
    return jnp.concatenate([array[packed.counted] for array, packed in zip(arrays, parts, strict=True)])


def _squares(rows: Float[Array, "T n"]) -> Float[Array, "T"]:
    return jnp.sum(rows.astype(jnp.float32) ** 2, axis=1)
