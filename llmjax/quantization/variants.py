"""What a model becomes before it is made: a float model with some of its linears as another dtype, walked layer by layer.

Owns `Variant` and what is measured of one beside the float model: the error of each linear's output, with those of the layers
before it, and perplexity. A layer is quantised when the walk comes to it, so that no second model is in memory. Embeddings and
head are the float model's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from llmjax.errors import ConfigError
from llmjax.model.config import ModelConfig
from llmjax.model.param_spec import stacked_rows
from llmjax.model.quantization import Scheme
from llmjax.model.transformer import logits
from llmjax.quantization.layer_walk import (
    LINEARS,
    Packed,
    Params,
    embed,
    final_hidden,
    groups,
    linear_params,
    pack,
    product,
    run_layer,
)
from llmjax.quantization.quantize import Granularity, quantize_weight
from pallas_kernels.quantized import QuantizedTensor

_ROWS_AT_ONCE = 64  # tokens whose logits are held; packed tokens are a multiple of it


class Variant(NamedTuple):
    """A float model and what its linears become.

    Attributes:
        params: float, smoothed or not; not changed.
        dtypes: of linears by name ("layers.0.mlp.down"), "int8" or a float dtype; one that is not named stays as it is.
        weights: what shares a scale.
    """

    params: Params
    dtypes: Mapping[str, str]
    weights: Granularity = "channel"

    def layer(self, index: int, config: ModelConfig) -> Params:
        """The parameters with this one layer as it becomes."""
        own = self.params["layers"][index]
        changed = dict(own)
        for linear in LINEARS:
            name = f"layers.{index}.{linear}"
            if (dtype := self.dtypes.get(name)) is not None:
                block, last = linear.split(".")
                weight = _converted(linear_params(self.params, name)["weight"], name, dtype, config, self.weights)
                changed[block] = changed[block] | {last: changed[block][last] | {"weight": weight}}
        return self.params | {"layers": self.params["layers"] | {index: changed}}


def output_errors(
    variant: Variant, config: ModelConfig, samples: Sequence[Sequence[int]], *, scheme: Scheme, limit: int
) -> dict[str, float]:
    """Each linear's relative L2 error beside its own float model: |output - float output| / |float output|, without bias.

    What goes into a linear is what comes of the layers before it, quantised as they are. Infinite where something is not finite.

    Args:
        samples: token ids; up to `limit` tokens of each are run.
    Raises ConfigError without a sample that has a token.
    """
    params = variant.params
    sums = {f"layers.{index}.{linear}": np.zeros(2) for index in range(config.num_layers) for linear in LINEARS}
    for packed in _packed(samples, config, limit):
        truth = stream = embed(params, packed, config=config)
        for index in range(config.num_layers):
            changed = variant.layer(index, config)
            truth, given = run_layer(params, index, truth, packed, config=config)
            stream, own = run_layer(changed, index, stream, packed, config=config, scheme=scheme)
            for (name, want), (_, got) in zip(given, own, strict=True):
                weights = (linear_params(tree, name)["weight"] for tree in (params, changed))
                sums[name] += np.asarray(_squares(want, got, *weights, packed.counted, scheme=scheme), np.float64)
    return {name: _relative(*map(float, found)) for name, found in sums.items()}


def mean_nll(variant: Variant, config: ModelConfig, samples: Sequence[Sequence[int]], *, scheme: Scheme, limit: int) -> float:
    """Mean negative logprob in nats of each token of the samples but the first of each, from those before it.

    Raises ConfigError without a sample of two tokens or more.
    """
    total, count = 0.0, 0
    for packed in _packed([sample for sample in samples if len(sample) > 1], config, limit):
        x = embed(variant.params, packed, config=config)
        for index in range(config.num_layers):
            x, _ = run_layer(variant.layer(index, config), index, x, packed, config=config, scheme=scheme)
        hidden = final_hidden(variant.params, x, config=config)
        tokens, positions = packed.batch.tokens, packed.batch.positions
        # a token is foretold where the next one in the pack is of the same sample, not the first of another
        follows = jnp.roll(packed.counted, -1).at[-1].set(False) & (jnp.roll(positions, -1) > 0)
        head = {name: node for name, node in variant.params.items() if name != "layers"}
        total += float(_nll(head, hidden, jnp.roll(tokens, -1), follows, config=config))
        count += int(follows.sum())
    return total / count


def _packed(samples: Sequence[Sequence[int]], config: ModelConfig, limit: int) -> Iterator[Packed]:
    limit = min(limit, config.max_positions)
    todo = [sample[:limit] for sample in samples if len(sample)]
    if not todo:
        raise ConfigError("there is no sample with enough tokens to measure with: give more or longer ones")
    for group in groups([len(sample) for sample in todo], limit):
        yield pack([todo[index] for index in group])


def _converted(weight: Array, name: str, dtype: str, config: ModelConfig, weights: Granularity) -> Array | QuantizedTensor:
    if dtype != "int8":
        return weight.astype(dtype)
    return quantize_weight(weight, stacked_rows(config, tuple(name.split(".")), weight.shape), weights)


@functools.partial(jax.jit, static_argnames="scheme")
def _squares(
    want: Float[Array, "T in"],
    got: Float[Array, "T in"],
    weight: Float[Array, "out in"],
    changed: Array | QuantizedTensor,
    counted: Bool[Array, "T"],
    *,
    scheme: Scheme,
) -> Float[Array, "2"]:
    """|y|^2 and |y - z|^2 over the tokens, of the float output y and the other one z."""
    pairs = ((want, weight), (got, changed))
    y, z = (product(jnp.where(counted[:, None], x, 0), w, scheme=scheme, out_dtype=jnp.float32) for x, w in pairs)
    return jnp.stack([jnp.sum(y * y), jnp.sum((y - z) ** 2)])


@functools.partial(jax.jit, static_argnames="config")
def _nll(
    head: Params, hidden: Float[Array, "T D"], following: Int[Array, "T"], counted: Bool[Array, "T"], *, config: ModelConfig
) -> Float[Array, ""]:
    """Sum over counted tokens of the negative logprob of the one that follows."""

    def of_rows(rows: tuple[Array, Array, Array]) -> Array:
        x, chosen, use = rows
        logprobs = jax.nn.log_softmax(logits(head, x, config=config)[:, : config.num_tokens], axis=-1)
        own = jnp.take_along_axis(logprobs, chosen[:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(use, own, 0.0))

    blocks = tuple(array.reshape(-1, _ROWS_AT_ONCE, *array.shape[1:]) for array in (hidden, following, counted))
    return jnp.sum(jax.lax.map(of_rows, blocks))


def _relative(own: float, error: float) -> float:
    if not (np.isfinite(own) and np.isfinite(error)):
        return float("inf")
    if not own:
        return float("inf") if error else 0.0
    return float(np.sqrt(error / own))
