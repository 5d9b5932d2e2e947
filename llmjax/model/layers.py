"""The layers of a decoder, declared as Flax NNX modules and used as pure functions.

A module only says which parameters it has and what it computes; parameters live outside, in a plain nested dict, and are merged
in at trace time (`transformer.py`). Nothing here keeps state: the KV cache is passed in and returned.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import KVCache
from llmjax.model.mixed_layer import Weight, project_normed
from pallas_kernels.fused_layer import LayerParams, NextParams
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_kv_write import rope_kv_write


class AttentionInputs(NamedTuple):
    """What every layer's attention shares: rotary tables [T, H/2], the place of each token, and the rows' page tables."""

    cos: Float[Array, "T H2"]
    sin: Float[Array, "T H2"]
    pages: Int[Array, "T"]
    offsets: Int[Array, "T"]
    page_table: Int[Array, "R M"]
    seq_lens: Int[Array, "R"]
    query_starts: Int[Array, "R+1"]


class Linear(nnx.Module):
    """`x @ weight.T + bias`; the weight is stored [out, in], both operands of the product contract over their last axis.

    What is merged in may be a `QuantizedTensor`, or in another dtype than declared: `mixed_layer.py` multiplies by either.
    """

    def __init__(self, out_size: int, in_size: int, *, bias: bool, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((out_size, in_size), dtype))
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype)) if bias else None

    def arrays(self) -> tuple[Weight, Float[Array, "out"] | None]:
        """Weight and bias."""
        return self.weight.get_value(), None if self.bias is None else self.bias[...]


class Scale(nnx.Module):
    """The learned weight of an RMSNorm, float32."""

    def __init__(self, size: int) -> None:
        self.weight = nnx.Param(jnp.ones((size,), jnp.float32))


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache: q, k and v from one product, written to the cache before they are read."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        dtype = jnp.dtype(config.dtype)
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = Linear(heads * config.head_dim, config.hidden_size, bias=config.qkv_bias, dtype=dtype)
        self.out = Linear(config.hidden_size, config.num_heads * config.head_dim, bias=config.output_bias, dtype=dtype)
        self.q_norm = Scale(config.head_dim) if config.qk_norm else None
        self.k_norm = Scale(config.head_dim) if config.qk_norm else None

    def attend(
        self,
        qkv: Float[Array, "R Q"],
        inputs: AttentionInputs,
        cache: KVCache,
        page_offset: Int[Array, ""],
        window: Int[Array, ""],
        *,
        decode: bool,
        max_queries: int = 0,
    ) -> tuple[Float[Array, "T NH"], KVCache]:
        """The heads' outputs side by side, in front of the output projection. Of `qkv` the first T rows are read."""
        c = self.config
        q_norm, k_norm = (None if norm is None else norm.weight[...] for norm in (self.q_norm, self.k_norm))
        q, *caches = rope_kv_write(
            qkv, cache.k, cache.v, inputs.cos, inputs.sin, inputs.pages, inputs.offsets, q_norm, k_norm,
            page_offset=page_offset, eps=c.norm_eps,
        )  # fmt: skip
        cache = KVCache(*caches)
        out = paged_attention(
            q, cache.k, cache.v, inputs.page_table, inputs.seq_lens, inputs.query_starts,
            page_offset=page_offset, scale=c.head_dim**-0.5, window=window, decode=decode, max_queries=max_queries,
        )  # fmt: skip
        return out.reshape(out.shape[0], -1), cache


class MLP(nnx.Module):
    """Gated MLP: gate and up from one product."""

    def __init__(self, config: ModelConfig) -> None:
        dtype = jnp.dtype(config.dtype)
        self.gate_up = Linear(2 * config.mlp_size, config.hidden_size, bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(config.hidden_size, config.mlp_size, bias=config.mlp_bias, dtype=dtype)


class Block(nnx.Module):
    """One pre-norm decoder layer.

    What it computes is cut at the attention: everything from one attention to the next is a single operation, which takes
    `params_behind` of one layer and `params_in_front` of the next. The first layer has `project` in front.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.attention_norm = Scale(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = Scale(config.hidden_size)
        self.mlp = MLP(config)

    def project(self, x: Float[Array, "T D"], eps: float) -> Float[Array, "T Q"]:
        """q, k and v of the norm of x."""
        return project_normed(x, self.params_in_front(), eps=eps, quantization=self.attention.config.quantization)

    def params_behind(self) -> LayerParams:
        """What follows the attention: output projection, norm, MLP."""
        return LayerParams(
            *self.attention.out.arrays(), self.mlp_norm.weight[...], *self.mlp.gate_up.arrays(), *self.mlp.down.arrays()
        )

    def params_in_front(self) -> NextParams:
        """What leads to the attention: norm, and the projection to q, k and v."""
        return NextParams(self.attention_norm.weight[...], *self.attention.qkv.arrays())


class Embedding(nnx.Module):
    """A table of rows [V, D]: the token embedding, or the output head."""

    def __init__(self, config: ModelConfig) -> None:
        self.weight = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), jnp.dtype(config.dtype)))


class Decoder(nnx.Module):
    """The whole model, as a declaration: its parameter tree is the nested dict every loader fills."""

    def __init__(self, config: ModelConfig) -> None:
        self.embed = Embedding(config)
        self.layers = nnx.List([Block(config) for _ in range(config.num_layers)])
        self.final_norm = Scale(config.hidden_size)
        if not config.tie_embeddings:
            self.lm_head = Embedding(config)


def abstract_params(config: ModelConfig) -> dict[str, object]:
    """The parameter tree that is declared for `config`, as nested dicts of `jax.ShapeDtypeStruct`; nothing is allocated. What a
    quantization stores differently is not seen here: see `load.param_structs`."""
    model = nnx.eval_shape(lambda: Decoder(config))
    tree: dict[str, object] = nnx.to_pure_dict(nnx.split(model)[1])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
