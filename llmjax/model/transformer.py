"""The decoder as pure functions: `forward`, `logits`, `layer_finiteness`.

One layer is traced per program (two, with the last), not each: layers share an inner `jax.jit` whose layer-dependent values
(number, page offset, window) are arguments.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llmjax.model.batch import ModelBatch
from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import KVCache
from llmjax.model.layers import AttentionInputs, Block
from llmjax.model.mixed_layer import embed, is_uniform, mixed_layer, multiply
from llmjax.model.rope import cos_sin
from pallas_kernels.fused_layer import MEETINGS, fused_layer
from pallas_kernels.fused_norm import rms_norm

Params = dict[str, Any]  # nested; leaves are jax.Array | QuantizedTensor; see `param_spec`


class _Stream(NamedTuple):
    """What goes from layer to layer; see `fused_layer`. Only the first T rows mean anything."""

    residual: Float[Array, "R D"]
    qkv: Float[Array, "R Q"] | None
    meetings: Int[Array, "L3"]


@functools.partial(jax.jit, static_argnames=("config", "decode", "max_queries"))
def _layer(
    layer: Params,
    following: Params | None,
    index: Int[Array, ""],
    stream: _Stream,
    inputs: AttentionInputs,
    cache: KVCache,
    page_offset: Int[Array, ""],
    window: Int[Array, ""],
    *,
    config: ModelConfig,
    decode: bool,
    max_queries: int,
) -> tuple[_Stream, KVCache]:
    """The attention of a layer, and what leads to that of the `following` one."""
    block = _block(layer, config)
    assert stream.qkv is not None
    attention, cache = block.attention.attend(
        stream.qkv, inputs, cache, page_offset, window, decode=decode, max_queries=max_queries
    )
    behind, in_front = block.params_behind(), None if following is None else _block(following, config).params_in_front()
    if is_uniform(attention.dtype, behind, in_front):
        residual, next_qkv, meetings = fused_layer(
            attention, stream.residual, stream.meetings, index, behind, in_front,
            activation=config.activation, eps=config.norm_eps,
        )  # fmt: skip
    else:  # nobody meets: a count is a layer's own, so that this layer's may stay zero
        meetings = stream.meetings
        residual, next_qkv = mixed_layer(
            attention, stream.residual, behind, in_front,
            quantization=config.quantization, activation=config.activation, eps=config.norm_eps,
        )  # fmt: skip
    return _Stream(residual, next_qkv, meetings), cache


def _block(layer: Params, config: ModelConfig) -> Block:
    graph = nnx.split(nnx.eval_shape(lambda: Block(config)))[0]
    block: Block = nnx.merge(graph, layer)
    return block


def forward(
    params: Params,
    batch: ModelBatch,
    kv_cache: KVCache,
    *,
    config: ModelConfig,
    decode: bool = False,
    max_queries: int = 0,
    num_layers: int | None = None,
) -> tuple[Float[Array, "T D"], KVCache]:
    """Run the decoder over a batch of packed tokens.

    Args:
        params: nested dict as `param_spec.iter_params(config)` describes.
        batch: tokens and where they belong; see `ModelBatch`.
        kv_cache: holds the rows' earlier tokens. Donate it under `jit` and the update happens in place.
        config: static.
        decode: static; True promises one token a row (T == R).
        max_queries: static; promises that no row has more tokens in the batch; 0 promises nothing.
        num_layers: static; run only the first so many, over the same cache. None runs all.

    Returns:
        hidden states [T, D] after the final norm, in `config.dtype`, and the cache with the new tokens' keys and values.
        `logits` turns the rows you need into logits.
    """
    hidden, cache, _ = _run_layers(
        params, batch, kv_cache, config=config, decode=decode, max_queries=max_queries, num_layers=num_layers
    )
    return hidden, cache


def attention_inputs(batch: ModelBatch, config: ModelConfig, page_size: int) -> AttentionInputs:
    """What the attention of every layer reads of a batch."""
    cos, sin = cos_sin(batch.positions, config)
    return AttentionInputs(
        cos=cos, sin=sin,
        pages=batch.slot_mapping // page_size, offsets=batch.slot_mapping % page_size,
        page_table=batch.page_table, seq_lens=batch.seq_lens, query_starts=batch.query_starts,
    )  # fmt: skip


def _run_layers(
    params: Params,
    batch: ModelBatch,
    kv_cache: KVCache,
    *,
    config: ModelConfig,
    decode: bool,
    max_queries: int = 0,
    num_layers: int | None = None,
) -> tuple[Float[Array, "T D"], KVCache, list[Array]]:
    pages_a_layer = kv_cache.k.shape[0] // config.num_layers
    count = config.num_layers if num_layers is None else num_layers
    inputs = attention_inputs(batch, config, kv_cache.page_size)
    x = embed(params["embed"]["weight"], batch.tokens, jnp.dtype(config.dtype))
    layers, tokens = params["layers"], x.shape[0]
    meetings = jnp.zeros((count * MEETINGS,), jnp.int32)
    stream = _Stream(x, _block(layers[0], config).project(x, config.norm_eps), meetings)
    streams = []
    for index in range(count):
        following = layers[index + 1] if index + 1 < count else None
        stream, kv_cache = _layer(
            layers[index], following, jnp.int32(index), stream, inputs, kv_cache,
            jnp.int32(index * pages_a_layer), jnp.int32(config.sliding_windows[index]),
            config=config, decode=decode, max_queries=max_queries,
        )  # fmt: skip
        streams.append(stream.residual[:tokens])
    hidden = rms_norm(streams[-1], params["final_norm"]["weight"], config.norm_eps)
    return hidden, kv_cache, streams


def logits(params: Params, hidden: Float[Array, "... D"], *, config: ModelConfig) -> Float[Array, "... V"]:
    """float32 logits of hidden states; padding rows of the vocabulary (ids from `config.num_tokens`) are -inf."""
    head = params["embed"] if config.tie_embeddings else params["lm_head"]
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = multiply(flat, head["weight"], None, quantization=config.quantization, out_dtype=jnp.float32)
    if config.num_tokens < config.vocab_size:
        out = jnp.where(jnp.arange(config.vocab_size) < config.num_tokens, out, -jnp.inf)
    return out.reshape(*hidden.shape[:-1], config.vocab_size)


def layer_finiteness(params: Params, batch: ModelBatch, kv_cache: KVCache, *, config: ModelConfig) -> Array:
    """For each layer, whether the residual stream after it is finite everywhere: bool [L]. Diagnosis, not serving."""
    _, _, streams = _run_layers(params, batch, kv_cache, config=config, decode=False)
    return jnp.stack([jnp.isfinite(stream).all() for stream in streams])
