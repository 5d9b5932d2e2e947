"""The decoder one layer at a time, with what goes into each of its linears: what calibration and sensitivity look at.

Owns the packing of samples and the walk; the layers' mathematics are those of `llmjax.model.layers` with nothing fused, so the
program that serves has no hook in it. Equal to `transformer.forward` (a test compares them for every family). Pure but for
packing. Keeps no KV cache: a layer's is thrown away when its attention is done.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from llmjax.errors import UnsupportedModelError
from llmjax.model.batch import ModelBatch
from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import init_cache
from llmjax.model.layers import AttentionInputs, Block
from llmjax.model.rope import cos_sin
from pallas_kernels.fused_norm import rms_norm
from pallas_kernels.gated_activation import gated
from pallas_kernels.matmul import dense, residual_dense
from pallas_kernels.quantized import QuantizedTensor, dequantize, quantize_tokens

Params = dict[str, Any]
LINEARS = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
"""The linears of a layer, in the order in which they are computed."""

ROWS = 16
"""Samples that go through the model together at most."""

_PAGE_SIZE = 16
_FEWEST_TOKENS = 64


class LinearInput(NamedTuple):
    """What goes into one linear: [T, in], in the model's dtype. `name` as in "layers.3.mlp.down"."""

    name: str
    x: Float[Array, "T in"]


class Packed(NamedTuple):
    """Samples laid out for the walk. `counted` tells tokens from padding."""

    batch: ModelBatch
    counted: Bool[Array, "T"]


def linear_names(config: ModelConfig) -> list[str]:
    """Names of all linears of the decoder, in order of computation."""
    return [f"layers.{layer}.{linear}" for layer in range(config.num_layers) for linear in LINEARS]


def linear_params(params: Params, name: str) -> Params:
    """The node of the parameter tree that holds the weight, and the bias if there is one, of a linear."""
    _, layer, block, linear = name.split(".")
    node: Params = params["layers"][int(layer)][block][linear]
    return node


def check_walkable(params: Params, config: ModelConfig) -> None:
    """Raises `UnsupportedModelError` unless this is a float decoder of the shared kind."""
    for name in linear_names(config):
        try:
            weight = linear_params(params, name)["weight"]
        except (KeyError, TypeError):
            raise UnsupportedModelError(
                f"the parameters of family {config.family!r} have no {name}: only decoders of llmjax.model can be calibrated"
            ) from None
        if isinstance(weight, QuantizedTensor):
            raise UnsupportedModelError(f"{name}: the weight is quantised already; calibrate the float model it was made from")


def groups(lengths: Sequence[int], tokens: int) -> Iterator[range]:
    """Neighbouring samples that go together: at most `ROWS`, and at most `tokens` in all, but always one."""
    start, held = 0, 0
    for index, length in enumerate(lengths):
        if index > start and (held + length > tokens or index - start == ROWS):
            yield range(start, index)
            start, held = index, 0
        held += length
    if start < len(lengths):
        yield range(start, len(lengths))


def pack(samples: Sequence[Sequence[int]]) -> Packed:
    """Up to `ROWS` samples, none empty, padded to a power of two of tokens so that few programs are compiled."""
    lengths = np.asarray([len(sample) for sample in samples])
    tokens = max(_FEWEST_TOKENS, 1 << (int(lengths.sum()) - 1).bit_length())
    pages = -(-lengths // _PAGE_SIZE)
    first_page = 1 + np.cumsum(pages) - pages
    table = np.zeros((ROWS, tokens // _PAGE_SIZE), np.int32)
    flat, positions, slots = (np.zeros(tokens, np.int32) for _ in range(3))
    starts = np.full(ROWS + 1, lengths.sum(), np.int32)
    starts[: len(samples)] = np.cumsum(lengths) - lengths
    for row, sample in enumerate(samples):
        table[row, : pages[row]] = first_page[row] + np.arange(pages[row])
        where, own = np.arange(len(sample)), slice(starts[row], starts[row] + len(sample))
        flat[own], positions[own] = sample, where
        slots[own] = first_page[row] * _PAGE_SIZE + where
    seq_lens = np.zeros(ROWS, np.int32)
    seq_lens[: len(samples)] = lengths
    last = np.maximum(starts[1:] - 1, 0)
    batch = ModelBatch(*(jnp.asarray(a) for a in (flat, positions, slots, table, seq_lens, starts, last)))
    return Packed(batch, jnp.arange(tokens) < int(lengths.sum()))


def embed(params: Params, packed: Packed) -> Float[Array, "T D"]:
    """The residual stream in front of the first layer."""
    return jnp.take(params["embed"]["weight"], packed.batch.tokens, axis=0, mode="clip")


def run_layer(
    params: Params, index: int, x: Float[Array, "T D"], packed: Packed, *, config: ModelConfig, rounded: str = ""
) -> tuple[Float[Array, "T D"], list[LinearInput]]:
    """One layer over whole samples: the residual stream behind it, and the inputs of its linears.

    Args:
        params: of the whole model; the linears of this layer may be others than the model's own.
        rounded: the linear ("mlp.down") whose input is quantised to int8 with a scale a token and back; "" for none.
    """
    window = jnp.int32(config.sliding_windows[index])
    x, inputs = _layer(params["layers"][index], x, packed.batch, window, config=_of_one_layer(config), rounded=rounded)
    return x, [LinearInput(f"layers.{index}.{linear}", inputs[linear]) for linear in LINEARS]


def final_hidden(params: Params, x: Float[Array, "T D"], *, config: ModelConfig) -> Float[Array, "T D"]:
    """Behind the final norm: what `transformer.logits` takes."""
    return rms_norm(x, params["final_norm"]["weight"], config.norm_eps)


def rounded_tokens(x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """x quantised to int8 with a scale a token and back, in its dtype."""
    qvalue, scale = quantize_tokens(x)
    return dequantize(QuantizedTensor(qvalue, scale), x.dtype)


def _of_one_layer(config: ModelConfig) -> ModelConfig:
    """What is static of a layer, the same for all of them: else each would be compiled."""
    return config.replace(num_layers=1, sliding_windows=(0,))


@functools.partial(jax.jit, static_argnames=("config", "rounded"))
def _layer(
    layer: Params, x: Float[Array, "T D"], batch: ModelBatch, window: Int[Array, ""], *, config: ModelConfig, rounded: str
) -> tuple[Float[Array, "T D"], dict[str, Array]]:
    block: Block = nnx.merge(nnx.split(nnx.eval_shape(lambda: Block(config)))[0], layer)
    inputs: dict[str, Array] = {}

    def into(linear: str, value: Array) -> Array:
        inputs[linear] = value
        return rounded_tokens(value) if linear == rounded else value

    cos, sin = cos_sin(batch.positions, config)
    attention_inputs = AttentionInputs(
        cos=cos, sin=sin,
        pages=batch.slot_mapping // _PAGE_SIZE, offsets=batch.slot_mapping % _PAGE_SIZE,
        page_table=batch.page_table, seq_lens=batch.seq_lens, query_starts=batch.query_starts,
    )  # fmt: skip
    cache = init_cache(config, num_pages=1 + len(batch.tokens) // _PAGE_SIZE + ROWS, page_size=_PAGE_SIZE)
    normed = rms_norm(x, block.attention_norm.weight[...], config.norm_eps)
    qkv = dense(into("attention.qkv", normed), *block.attention.qkv.arrays())
    attention, _ = block.attention.attend(qkv, attention_inputs, cache, jnp.int32(0), window, decode=False)
    x = _added(into("attention.out", attention), x, block.attention.out)
    normed = rms_norm(x, block.mlp_norm.weight[...], config.norm_eps)
    gate_up = dense(into("mlp.gate_up", normed), *block.mlp.gate_up.arrays())
    x = _added(into("mlp.down", gated(gate_up, config.activation)), x, block.mlp.down)
    return x, inputs


def _added(x: Array, residual: Array, linear: Any) -> Array:
    weight, bias = linear.arrays()
    return residual_dense(x, weight, residual, bias)
