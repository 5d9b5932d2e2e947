"""Sensitivity: what quantising each linear alone does to its output, and to the model's.

Owns the measurement. What follows from it is the plan's (`plan.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from llmjax.errors import ConfigError, NonFiniteError
from llmjax.model.config import ModelConfig
from llmjax.model.transformer import logits
from llmjax.quantization.layer_walk import (
    LINEARS,
    Packed,
    Params,
    check_walkable,
    embed,
    final_hidden,
    groups,
    linear_names,
    linear_params,
    pack,
    rounded_tokens,
    run_layer,
)
from llmjax.quantization.plan import SCHEMES, LinearSensitivity, Scheme
from pallas_kernels.matmul import dense
from pallas_kernels.quantized import check_finite, dequantize, quantize

_ROWS_AT_ONCE = 64  # tokens whose logits are held, as a vocabulary is large; packed tokens are a multiple of it


@dataclasses.dataclass
class _Sums:
    """Over the tokens so far: |y|^2, |z|^2, |y - z|^2 and y . z of the output y and the quantised one z; and KL."""

    output: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(4))
    kl: float = 0.0


def measure_sensitivity(
    params: Params,
    config: ModelConfig,
    samples: Sequence[Sequence[int]],
    *,
    scheme: Scheme,
    weights: Literal["channel", "tensor"] = "channel",
    sequence_length: int = 1024,
    kl_samples: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[LinearSensitivity]:
    """The sensitivity of every linear, in order of computation.

    A linear's own error is that of its product with the float model's inputs, bias left out. For KL the model goes on from that
    layer with this linear quantised: with L layers that takes as long as 2 (L + 1) passes of the model.

    Args:
        params: a float model.
        samples: token ids; empty ones are left out, long ones cut at `sequence_length` or the model's context.
        scheme: "w8a16" rounds weights to the nearest of a scale, "w8a8" also what goes in, with a scale a token.
        weights: whether a scale is a row's or the whole matrix's.
        kl_samples: KL, which takes nearly all of the time, is measured with this many samples, and the others of their group;
            None for all, 0 for none.
        progress: called with the groups of samples that are done, and of how many.

    Raises:
        ConfigError: no sample with a token, or a scheme or granularity that there is not.
        NonFiniteError: the float model itself gives NaN or infinity; it names the linear.
        ValueError: a weight holds NaN or infinity; it names the parameter.
        UnsupportedModelError: not a float decoder of llmjax.model.
    """
    if scheme not in SCHEMES or weights not in ("channel", "tensor"):
        raise ConfigError(f"sensitivity: choose a scheme of {', '.join(SCHEMES)} and weights by channel or tensor")
    if sequence_length < 1 or (kl_samples is not None and kl_samples < 0):
        raise ConfigError(
            f"sensitivity: sequence_length is at least 1 and kl_samples at least 0, got {sequence_length} and {kl_samples}"
        )
    check_walkable(params, config)
    for name in linear_names(config):
        check_finite(f"{name}.weight", linear_params(params, name)["weight"])
    limit = min(sequence_length, config.max_positions)
    todo = [sample[:limit] for sample in samples if len(sample)]
    if not todo:
        raise ConfigError("sensitivity: there is no sample with a token: give at least one")
    sums = {name: _Sums() for name in linear_names(config)}
    parts = list(groups([len(sample) for sample in todo], limit))
    kl_tokens = 0
    for number, group in enumerate(parts):
        packed = pack([todo[index] for index in group])
        streams = _measure_outputs(sums, params, config, packed, scheme, weights)
        if kl_samples is None or group.start < kl_samples:
            _measure_kl(sums, params, config, packed, streams, scheme, weights)
            kl_tokens += sum(len(todo[index]) for index in group)
        if progress is not None:
            progress(number + 1, len(parts))
    return [_result(name, found, linear_params(params, name)["weight"].size, kl_tokens) for name, found in sums.items()]


def _measure_outputs(
    sums: dict[str, _Sums], params: Params, config: ModelConfig, packed: Packed, scheme: Scheme, weights: str
) -> list[Array]:
    """Adds the errors of the linears' outputs; the float model's residual stream before each layer, and behind the last."""
    streams = [embed(params, packed)]
    for index in range(config.num_layers):
        x, given = run_layer(params, index, streams[-1], packed, config=config)
        streams.append(x)
        for name, value in given:
            _measure_output(sums[name], name, value, params, packed, scheme, weights)
    return streams


def _measure_kl(
    sums: dict[str, _Sums],
    params: Params,
    config: ModelConfig,
    packed: Packed,
    streams: list[Array],
    scheme: Scheme,
    weights: str,
) -> None:
    float_hidden = final_hidden(params, streams[-1], config=config)
    head = {name: node for name, node in params.items() if name != "layers"}
    for index in range(config.num_layers):
        for linear in LINEARS:
            name = f"layers.{index}.{linear}"
            changed = _with_rounded(params, name, weights)
            rounded = linear if scheme == "w8a8" else ""
            x, _ = run_layer(changed, index, streams[index], packed, config=config, rounded=rounded)
            for behind in range(index + 1, config.num_layers):
                x, _ = run_layer(params, behind, x, packed, config=config)
            hidden = final_hidden(params, x, config=config)
            sums[name].kl += float(_kl(head, float_hidden, hidden, packed.counted, config=config))


def _measure_output(found: _Sums, name: str, x: Array, params: Params, packed: Packed, scheme: Scheme, weights: str) -> None:
    weight = linear_params(params, name)["weight"]
    sums = np.asarray(_output_sums(x, weight, packed.counted, by_tensor=weights == "tensor", rounds_inputs=scheme == "w8a8"))
    if not np.isfinite(sums).all():
        raise NonFiniteError(f"{name}: its inputs or outputs are NaN or infinite: look at the model's weights and dtype")
    found.output += sums


@functools.partial(jax.jit, static_argnames=("by_tensor", "rounds_inputs"))
def _output_sums(
    x: Float[Array, "T in"], weight: Float[Array, "out in"], counted: Bool[Array, "T"], *, by_tensor: bool, rounds_inputs: bool
) -> Float[Array, "4"]:
    """See `_Sums`; the product is without bias, in float32."""
    x = jnp.where(counted[:, None], x, 0)
    y = dense(x, weight, out_dtype=jnp.float32)
    near = dense(rounded_tokens(x) if rounds_inputs else x, _rounded(weight, by_tensor), out_dtype=jnp.float32)
    return jnp.stack([jnp.sum(y * y), jnp.sum(near * near), jnp.sum((y - near) ** 2), jnp.sum(y * near)])


def _with_rounded(params: Params, name: str, weights: str) -> Params:
    """The model with the weight of one linear quantised and back; shares all else."""
    _, layer, block, linear = name.split(".")
    own = params["layers"][int(layer)]
    node = own[block][linear]
    rounded = _rounded(node["weight"], weights == "tensor")
    changed = own | {block: own[block] | {linear: node | {"weight": rounded}}}
    return params | {"layers": params["layers"] | {int(layer): changed}}


@functools.partial(jax.jit, static_argnums=1)
def _rounded(weight: Float[Array, "out in"], by_tensor: bool) -> Float[Array, "out in"]:
    """Quantised and back, in the weight's dtype, as a kernel that widens int8 in registers multiplies it."""
    return dequantize(quantize(weight, axis=None if by_tensor else 1), weight.dtype)


@functools.partial(jax.jit, static_argnames="config")
def _kl(
    head: Params, want: Float[Array, "T D"], got: Float[Array, "T D"], counted: Bool[Array, "T"], *, config: ModelConfig
) -> Float[Array, ""]:
    """Sum over tokens of the KL divergence of `got`'s next-token distribution from `want`'s, in nats.

    Its terms q - p + p d with d = log p - log q are not below zero and sum to the divergence: nothing cancels between them, and
    where p and q are close nothing does within one.
    """

    def of_rows(rows: tuple[Array, Array, Array]) -> Array:
        p, q = (jax.nn.log_softmax(logits(head, x, config=config)[:, : config.num_tokens], axis=-1) for x in rows[:2])
        d = p - q
        near = jnp.clip(d, -1.0, 1.0)
        terms = jnp.where(near == d, jnp.exp(p) * (jnp.expm1(-near) + near), jnp.exp(q) + jnp.exp(p) * (d - 1))
        return jnp.sum(jnp.where(rows[2], jnp.sum(terms, axis=-1), 0.0))

    blocks = tuple(array.reshape(-1, _ROWS_AT_ONCE, *array.shape[1:]) for array in (want, got, counted))
    return jnp.sum(jax.lax.map(of_rows, blocks))


def _result(name: str, found: _Sums, size: int, kl_tokens: int) -> LinearSensitivity:
    own, near, error, product = found.output
    kl = None if not kl_tokens else found.kl / kl_tokens if np.isfinite(found.kl) else float("inf")
    if not own:  # a linear that gives zeros alone gives them quantised too
        return LinearSensitivity(name, float("inf") if error else 0.0, 0.0 if error else 1.0, kl, size)
    cosine = product / np.sqrt(own * near) if near else 0.0
    return LinearSensitivity(name, float(np.sqrt(error / own)), float(min(cosine, 1.0)), kl, size)
