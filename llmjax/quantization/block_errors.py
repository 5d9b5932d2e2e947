"""Faults of weights where they are: each block of a candidate beside the baseline's, by what plain int8 rounding costs there.

A fault in one place of many, a lost head say, may turn over fewer words than sound rounding of all weights does, so that what
the whole model says cannot tell them apart. What its own block gives is off by several times as much as rounding could make it.
A block is what attention, or the MLP, of one layer adds to the residual stream.

Owns the walk and the measure. Every block is given what the baseline's is given, so that one error does not show in all layers
behind it. Activations stay float in all three models: rounding them, as w8a8 does, hides what is wrong with weights, and is no
property of a block's weights; what it costs the whole model is measured on the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from llmjax.model.config import ModelConfig
from llmjax.model.registry import get_model, is_shared_decoder
from llmjax.quantization.layer_walk import (
    Packed,
    Params,
    embed,
    groups,
    linear_names,
    linear_params,
    pack,
    product,
    run_layer,
)
from llmjax.quantization.variants import Variant
from pallas_kernels.quantized import QuantizedTensor

BLOCKS = {"attention": ("out", 1), "mlp": ("down", 3)}
"""The blocks of a layer: the linear that each ends with, and which of the layer's inputs it reads."""

_AT_ONCE = 512  # tokens of short texts that go through a layer together
_LEAST = 2.0**-8  # of a block's output: half a step of bfloat16 up and down; what rounding costs is never taken for less


class Weights(NamedTuple):
    """A parameter tree and its config."""

    params: Params
    config: ModelConfig


def comparable(baseline: Weights, candidate: Weights) -> bool:
    """Whether the blocks of one answer to those of the other: the shared decoder, of one shape, the baseline's linears float."""
    one, other = (model.config.replace(dtype="float32", quantization=None) for model in (baseline, candidate))
    if one != other or not is_shared_decoder(get_model(one.family)):
        return False
    linears = (linear_params(baseline.params, name)["weight"] for name in linear_names(one))
    return not any(isinstance(weight, QuantizedTensor) for weight in linears)


def block_errors(baseline: Weights, candidate: Weights, texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Of each block ("layers.3.attention") the candidate's error by that of plain int8 rounding, a scale a channel: about 1 where
    it is just that, 0 where nothing differs, NaN or infinite where the candidate is.

    An error is the root mean square, over all tokens, of |output - baseline's output| / |baseline's output| (L2). Attention's is
    part of what the MLP behind it is given, of the candidate and of rounding alike.

    Args:
        baseline, candidate: `comparable`.
        texts: token ids, each no longer than the context; empty ones tell nothing. Without any all errors are 0.
    """
    config = baseline.config
    plain = Variant(baseline.params, dict.fromkeys(linear_names(config), "int8"))
    sums = {f"layers.{layer}.{block}": np.zeros(2) for layer in range(config.num_layers) for block in BLOCKS}
    packs = list(_packed([text for text in texts if len(text)]))
    streams = [embed(baseline.params, packed, config=config) for packed in packs]
    for layer in range(config.num_layers if packs else 0):
        others = (candidate, Weights(plain.layer(layer, config), config))
        for number, packed in enumerate(packs):
            behind, truth = _outputs(baseline, layer, streams[number], packed)
            for column, model in enumerate(others):
                _, found = _outputs(model, layer, streams[number].astype(model.config.dtype), packed)
                for block, own in found.items():
                    sums[f"layers.{layer}.{block}"][column] += float(_squares(truth[block], own, packed.counted))
            streams[number] = behind
    tokens = sum(int(packed.counted.sum()) for packed in packs)
    return {name: _by_rounding(*map(float, found), tokens) for name, found in sums.items()}


def _packed(texts: Sequence[Sequence[int]]) -> Iterator[Packed]:
    for group in groups([len(text) for text in texts], _AT_ONCE):
        yield pack([texts[index] for index in group])


def _outputs(
    model: Weights, layer: int, stream: Float[Array, "T D"], packed: Packed
) -> tuple[Float[Array, "T D"], dict[str, Float[Array, "T D"]]]:
    """The residual stream behind a layer, and what each block adds to it."""
    behind, inputs = run_layer(model.params, layer, stream, packed, config=model.config)
    added = {}
    for block, (linear, place) in BLOCKS.items():
        node = linear_params(model.params, f"layers.{layer}.{block}.{linear}")
        added[block] = product(inputs[place].x, node["weight"], node.get("bias"), scheme="w8a16", out_dtype=jnp.float32)
    return behind, added


@jax.jit
def _squares(truth: Float[Array, "T D"], found: Float[Array, "T D"], counted: Bool[Array, "T"]) -> Float[Array, ""]:
    """Sum over counted tokens of the squared relative error; where the baseline's block adds nothing, of the error itself."""
    own, error = jnp.sum(truth**2, -1), jnp.sum((found - truth) ** 2, -1)
    return jnp.sum(jnp.where(counted, error / jnp.where(own > 0, own, 1.0), 0.0))


def _by_rounding(candidate: float, rounding: float, tokens: int) -> float:
    return float(np.sqrt(candidate / max(rounding, tokens * _LEAST**2))) if tokens else 0.0
