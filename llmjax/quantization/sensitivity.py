"""Sensitivity: what quantising each linear alone does to its output, and to the model's.

Owns the measurement. A linear is made int8 and multiplied as a quantised model does it (a test compares the two models). What
follows from it is the plan's (`plan.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from llmjax.errors import ConfigError, NonFiniteError
from llmjax.model.config import ModelConfig
from llmjax.model.param_spec import stacked_rows
from llmjax.model.quantization import SCHEMES, Scheme
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
    product,
    refuse_bad_weights,
    run_layer,
)
from llmjax.quantization.plan import LinearSensitivity
from llmjax.quantization.quantize import Granularity, quantize_weight
from pallas_kernels.quantized import QuantizedTensor

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
    weights: Granularity = "channel",
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
        weights: what shares a scale, as of `quantize_params`: a row, or all of a matrix.
        kl_samples: KL, which takes nearly all of the time, is measured with this many samples, and the others of their group;
            None for all, 0 for none.
        progress: called with the groups of samples that are done, and of how many.

    Raises:
        ConfigError: no sample with a token, or a scheme or granularity that there is not.
        ModelError: the weight of a linear holds NaN or infinity; it names the parameter.
        NonFiniteError: the float model itself gives NaN or infinity; it names the linear.
        UnsupportedModelError: not a float decoder of llmjax.model.
    """
    if scheme not in SCHEMES or weights not in ("channel", "tensor"):
        raise ConfigError(f"sensitivity: choose a scheme of {', '.join(SCHEMES)} and weights by channel or tensor")
    if sequence_length < 1 or (kl_samples is not None and kl_samples < 0):
        raise ConfigError(
            f"sensitivity: sequence_length is at least 1 and kl_samples at least 0, got {sequence_length} and {kl_samples}"
        )
    check_walkable(params, config)
    refuse_bad_weights(params, config)
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
    sums: dict[str, _Sums], params: Params, config: ModelConfig, packed: Packed, scheme: Scheme, weights: Granularity
) -> list[Array]:
    """Adds the errors of the linears' outputs; the float model's residual stream before each layer, and behind the last."""
    streams = [embed(params, packed, config=config)]
    for index in range(config.num_layers):
        x, given = run_layer(params, index, streams[-1], packed, config=config)
        streams.append(x)
        for name, value in given:
            near = _quantised(params, name, config, weights)
            found = _output_sums(value, linear_params(params, name)["weight"], near, packed.counted, scheme=scheme)
            if not np.isfinite(found).all():
                raise NonFiniteError(f"{name}: its inputs or outputs are NaN or infinite: look at the model's weights and dtype")
            sums[name].output += np.asarray(found)
    return streams


def _measure_kl(
    sums: dict[str, _Sums],
    params: Params,
    config: ModelConfig,
    packed: Packed,
    streams: list[Array],
    scheme: Scheme,
    weights: Granularity,
) -> None:
    float_hidden = final_hidden(params, streams[-1], config=config)
    head = {name: node for name, node in params.items() if name != "layers"}
    for index in range(config.num_layers):
        for linear in LINEARS:
            name = f"layers.{index}.{linear}"
            changed = _with_weight(params, name, _quantised(params, name, config, weights))
            x, _ = run_layer(changed, index, streams[index], packed, config=config, scheme=scheme)
            for behind in range(index + 1, config.num_layers):
                x, _ = run_layer(params, behind, x, packed, config=config)
            hidden = final_hidden(params, x, config=config)
            sums[name].kl += float(_kl(head, float_hidden, hidden, packed.counted, config=config))


@functools.partial(jax.jit, static_argnames="scheme")
def _output_sums(
    x: Float[Array, "T in"],
    weight: Float[Array, "out in"],
    quantised: QuantizedTensor,
    counted: Bool[Array, "T"],
    *,
    scheme: Scheme,
) -> Float[Array, "4"]:
    """See `_Sums`; the product is without bias, in float32."""
    x = jnp.where(counted[:, None], x, 0)
    y, near = (product(x, w, scheme=scheme, out_dtype=jnp.float32) for w in (weight, quantised))
    return jnp.stack([jnp.sum(y * y), jnp.sum(near * near), jnp.sum((y - near) ** 2), jnp.sum(y * near)])


def _quantised(params: Params, name: str, config: ModelConfig, weights: Granularity) -> QuantizedTensor:
    weight = linear_params(params, name)["weight"]
    return quantize_weight(weight, stacked_rows(config, tuple(name.split(".")), weight.shape), weights)


def _with_weight(params: Params, name: str, weight: QuantizedTensor) -> Params:
    """The model with the weight of one linear changed; shares all else."""
    _, layer, block, linear = name.split(".")
    own = params["layers"][int(layer)]
    changed = own | {block: own[block] | {linear: own[block][linear] | {"weight": weight}}}
    return params | {"layers": params["layers"] | {int(layer): changed}}


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
