"""The decoder one layer at a time, with what goes into each of its linears: what calibration and sensitivity look at.

Owns the packing of samples and the walk; the layers' mathematics are those of `llmjax.model.layers` and `mixed_layer` with
nothing fused, so the program that serves has no hook in it. Equal to `transformer.forward`, whatever dtypes the weights have (a
test compares them to the bit). Pure but for packing. Keeps no KV cache: a layer's is thrown away when its attention is done.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from llmjax.errors import ModelError, UnsupportedModelError
from llmjax.model.batch import ModelBatch
from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import init_cache
from llmjax.model.layers import Attention
from llmjax.model.mixed_layer import Weight, multiply
from llmjax.model.mixed_layer import embed as embedded
from llmjax.model.quantization import Scheme
from llmjax.model.registry import get_model, is_shared_decoder
from llmjax.model.transformer import attention_inputs
from pallas_kernels.fused_norm import rms_norm
from pallas_kernels.gated_activation import gated
from pallas_kernels.int8_matmul import quantize_activations, w8a8, w8a16
from pallas_kernels.quantized import QuantizedTensor, check_finite

if TYPE_CHECKING:
    from jax.typing import DTypeLike

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
    """Raises `UnsupportedModelError` unless this is the shared decoder with float linears."""
    if not is_shared_decoder(get_model(config.family)):
        raise UnsupportedModelError(
            f"family {config.family!r} has a decoder of its own: only the decoder of llmjax.model can be calibrated"
        )
    for name in linear_names(config):
        try:
            weight = linear_params(params, name)["weight"]
        except (KeyError, TypeError):
            raise UnsupportedModelError(
                f"the parameters of family {config.family!r} have no {name}: only the decoder of llmjax.model can be calibrated"
            ) from None
        if isinstance(weight, QuantizedTensor):
            raise UnsupportedModelError(f"{name}: the weight is quantised already; calibrate the float model it was made from")


def refuse_bad_weights(params: Params, config: ModelConfig) -> None:
    """Raises `ModelError` by its name for the weight of a linear that holds NaN or infinity."""
    for name in linear_names(config):
        weight = linear_params(params, name)["weight"]
        if bool(_all_finite(weight)):
            continue
        try:
            check_finite(f"{name}.weight", weight)
        except ValueError as error:
            raise ModelError(f"{error}: look at the checkpoint, or load it in a wider dtype") from None


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


def embed(params: Params, packed: Packed, *, config: ModelConfig) -> Float[Array, "T D"]:
    """The residual stream in front of the first layer."""
    return embedded(params["embed"]["weight"], packed.batch.tokens, jnp.dtype(config.dtype))


def run_layer(
    params: Params, index: int, x: Float[Array, "T D"], packed: Packed, *, config: ModelConfig, scheme: Scheme = "w8a16"
) -> tuple[Float[Array, "T D"], list[LinearInput]]:
    """One layer over whole samples: the residual stream behind it, and the inputs of its linears.

    Args:
        params: of the whole model; linears of this layer may be int8 in place of the model's own.
        scheme: how those are multiplied, see `product`; with float linears it is better left alone: each is a program.
    """
    layer, own = params["layers"][index], _of_one_layer(config)
    norms = {name: node for name, node in layer["attention"].items() if name.endswith("norm")}
    normed, qkv = _project(layer["attention_norm"]["weight"], layer["attention"]["qkv"], x, config=own, scheme=scheme)
    attention = _attend(norms, qkv, packed.batch, jnp.int32(config.sliding_windows[index]), config=own)
    x, *behind = _behind(
        layer["attention"]["out"], layer["mlp_norm"]["weight"], layer["mlp"], attention, x, config=own, scheme=scheme
    )
    inputs = zip(LINEARS, (normed, attention, *behind), strict=True)
    return x, [LinearInput(f"layers.{index}.{linear}", value) for linear, value in inputs]


def final_hidden(params: Params, x: Float[Array, "T D"], *, config: ModelConfig) -> Float[Array, "T D"]:
    """Behind the final norm: what `transformer.logits` takes."""
    return rms_norm(x, params["final_norm"]["weight"], config.norm_eps)


def product(
    x: Float[Array, "T in"],
    weight: Weight,
    bias: Float[Array, "out"] | None = None,
    *,
    scheme: Scheme,
    residual: Float[Array, "T out"] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "T out"]:
    """What the model multiplies by a weight. Under "w8a8" an int8 one always meets quantised activations: what the device's table
    says of few tokens is for speed, and does not make them any less sensitive."""
    if not isinstance(weight, QuantizedTensor):
        return multiply(x, weight, bias, quantization=None, residual=residual, out_dtype=out_dtype)
    if scheme == "w8a8":
        dtype = x.dtype if out_dtype is None else out_dtype
        return w8a8(*quantize_activations(x), weight, bias, residual=residual, out_dtype=dtype)
    return w8a16(x, weight, bias, residual=residual, out_dtype=out_dtype)


@jax.jit
def _all_finite(weight: Array) -> Array:
    return jnp.isfinite(weight).all()


def _of_one_layer(config: ModelConfig) -> ModelConfig:
    """What is static of a layer, the same for all of them: else each would be compiled."""
    return config.replace(num_layers=1, sliding_windows=(0,))


@functools.partial(jax.jit, static_argnames=("config", "scheme"))
def _project(
    norm: Array, linear: Params, x: Float[Array, "T D"], *, config: ModelConfig, scheme: Scheme
) -> tuple[Float[Array, "T D"], Float[Array, "T Q"]]:
    """What goes into the projection to q, k and v, and what it gives."""
    normed = rms_norm(x, norm, config.norm_eps)
    return normed, _through(linear, normed, scheme)


@functools.partial(jax.jit, static_argnames="config")
def _attend(
    norms: Params, qkv: Float[Array, "T Q"], batch: ModelBatch, window: Int[Array, ""], *, config: ModelConfig
) -> Float[Array, "T NH"]:
    attention = nnx.eval_shape(lambda: Attention(config))
    nnx.update(attention, norms)
    inputs = attention_inputs(batch, config, _PAGE_SIZE)
    cache = init_cache(config, num_pages=1 + len(batch.tokens) // _PAGE_SIZE + ROWS, page_size=_PAGE_SIZE)
    out: Array = attention.attend(qkv, inputs, cache, jnp.int32(0), window, decode=False)[0]
    return out


@functools.partial(jax.jit, static_argnames=("config", "scheme"))
def _behind(
    out: Params,
    norm: Array,
    mlp: Params,
    attention: Float[Array, "T NH"],
    x: Float[Array, "T D"],
    *,
    config: ModelConfig,
    scheme: Scheme,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Float[Array, "T F"]]:
    """The residual stream behind the layer, and what went into gate_up and down."""
    x = _through(out, attention, scheme, x)
    normed = rms_norm(x, norm, config.norm_eps)
    gates = gated(_through(mlp["gate_up"], normed, scheme), config.activation)
    return _through(mlp["down"], gates, scheme, x), normed, gates


def _through(linear: Params, x: Array, scheme: Scheme, residual: Array | None = None) -> Array:
    return product(x, linear["weight"], linear.get("bias"), scheme=scheme, residual=residual)
