"""Tiny random decoders of every family, and a naive float64 decoder to compare them with.

The oracle is written from the papers' formulas in plain numpy, recomputes the whole sequence for every token, and shares no code
with llmjax but the rotary frequencies, which have a test of their own.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from llmjax.model.config import ModelConfig, RopeScaling
from llmjax.model.layers import abstract_params
from llmjax.model.rope import cos_sin
from pallas_kernels.quantized import QuantizedTensor

_BASE: dict[str, Any] = {
    "family": "llama", "vocab_size": 301, "hidden_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "mlp_size": 80, "max_positions": 512,
}  # fmt: skip
CONFIGS: dict[str, ModelConfig] = {
    "llama": ModelConfig(**_BASE),
    "llama-9-3-tied": ModelConfig(**_BASE | {"num_heads": 9, "num_kv_heads": 3, "tie_embeddings": True}),
    "llama-mqa-rope": ModelConfig(
        **_BASE | {"num_kv_heads": 1, "head_dim": 24},
        rope_scaling=RopeScaling(kind="llama3", factor=4.0, original_max_positions=32, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "llama-dynamic": ModelConfig(**_BASE, rope_scaling=RopeScaling(kind="dynamic", factor=2.0, original_max_positions=24)),
    "qwen2": ModelConfig(**_BASE | {"family": "qwen2"}, qkv_bias=True, num_tokens=290),
    "qwen3": ModelConfig(**_BASE | {"family": "qwen3", "num_kv_heads": 4}, qk_norm=True),
    "mistral-window": ModelConfig(**_BASE | {"family": "mistral"}, sliding_windows=(20, 20)),
    "mixed-window": ModelConfig(
        **_BASE, sliding_windows=(0, 17), output_bias=True, mlp_bias=True, qkv_bias=True, activation="gelu_tanh"
    ),
}


def random_params(config: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Random weights, large enough that attention and logits have structure."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            value = 1.0 + 0.2 * rng.standard_normal(shape.shape)
        elif "bias" in name:
            value = 0.3 * rng.standard_normal(shape.shape)
        else:
            value = rng.standard_normal(shape.shape) * (1.6 / math.sqrt(shape.shape[-1]))
        return jax.numpy.asarray(value.astype(np.float32), shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(config))


TIE = 1e-4
"""Of logits nearer than this float32 may take either to be the larger."""

Stored = Callable[[int, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def naive_logits(params: dict[str, Any], ids: list[int], config: ModelConfig, stored: Stored | None = None) -> np.ndarray:
    """Logits [T, V] of a whole sequence, in float64, with full score matrices.

    `stored` tells what a cache makes of a layer's keys and values [T, K, H]. int8 weights count as what they stand for; under the
    scheme w8a8 what they multiply is rounded token by token.
    """
    p = _in_float64(params, rounds=config.quantization is not None and config.quantization.scheme == "w8a8")
    x = p["embed"]["weight"][ids]
    positions = jax.numpy.arange(-(-len(ids) // 64) * 64)  # of few lengths: each is compiled
    cos, sin = (np.asarray(a, np.float64)[: len(ids)] for a in cos_sin(positions, config))
    for index in range(config.num_layers):
        layer = p["layers"][index]
        x = x + _attention(
            layer["attention"],
            _norm(x, layer["attention_norm"]["weight"], config),
            cos,
            sin,
            config,
            config.sliding_windows[index],
            None if stored is None else functools.partial(stored, index),
        )
        h = _linear(layer["mlp"]["gate_up"], _norm(x, layer["mlp_norm"]["weight"], config))
        gate, up = np.split(h, 2, axis=-1)
        x = x + _linear(layer["mlp"]["down"], _activation(gate, config.activation) * up)
    head = p["embed"] if config.tie_embeddings else p["lm_head"]
    logits = _linear(head, _norm(x, p["final_norm"]["weight"], config))
    logits[:, config.num_tokens :] = -np.inf
    return logits


def naive_greedy(params: dict[str, Any], ids: list[int], config: ModelConfig, steps: int) -> list[int]:
    """Greedy continuation, everything computed again for every token."""
    return _continued(params, ids, config, steps)[0]


def clear_prompt(
    params: dict[str, Any], config: ModelConfig, length: int, steps: int, *, behind: Sequence[int] = ()
) -> list[int]:
    """`length` fresh random ids behind those given, whose greedy continuation is the same in float32: at none of the steps is the
    second best token within `TIE` of the best. Of 100,000 tokens of random prompts about one is within 1e-6."""
    while True:
        ids = [*behind, *(random.randrange(config.num_tokens) for _ in range(length))]
        if _continued(params, ids, config, steps)[1] > TIE:
            return ids


def _continued(params: dict[str, Any], ids: list[int], config: ModelConfig, steps: int) -> tuple[list[int], float]:
    """Greedy tokens, and the least that the best logit of a step was above the second."""
    out: list[int] = []
    least = math.inf
    for _ in range(steps):
        last = naive_logits(params, [*ids, *out], config)[-1]
        second, best = np.sort(last)[-2:]
        least = min(least, float(best - second))
        out.append(int(np.argmax(last)))
    return out, least


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _norm(x: np.ndarray, weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight


def _linear(layer: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    if "rounds" in layer:
        step = np.abs(x).max(-1, keepdims=True) / 127
        step = np.where(step == 0, 1.0, step)
        x = np.round(x / step) * step
    return x @ layer["weight"].T + layer.get("bias", 0.0)


def _in_float64(tree: Any, *, rounds: bool) -> Any:
    if isinstance(tree, QuantizedTensor):
        assert not tree.packed
        return np.asarray(tree.qvalue, np.float64) * np.broadcast_to(np.asarray(tree.scale, np.float64), tree.shape[:1])[:, None]
    if not isinstance(tree, dict):
        return np.asarray(tree, np.float64)
    marks = {"rounds": True} if rounds and isinstance(tree.get("weight"), QuantizedTensor) else {}
    return {key: _in_float64(value, rounds=rounds) for key, value in tree.items()} | marks


def _activation(x: np.ndarray, name: str) -> np.ndarray:
    if name == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(
    layer: dict[str, Any],
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    config: ModelConfig,
    window: int,
    stored: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]] | None,
) -> np.ndarray:
    tokens, heads, kv_heads, dim = len(x), config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = np.split(_linear(layer["qkv"], x), [heads * dim, (heads + kv_heads) * dim], axis=-1)
    q, k, v = q.reshape(tokens, heads, dim), k.reshape(tokens, kv_heads, dim), v.reshape(tokens, kv_heads, dim)
    if config.qk_norm:
        q, k = _norm(q, layer["q_norm"]["weight"], config), _norm(k, layer["k_norm"]["weight"], config)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    if stored is not None:
        k, v = stored(k, v)
    out = np.zeros_like(q)
    for head in range(heads):
        of = head // (heads // kv_heads)
        scores = q[:, head] @ k[:, of].T / math.sqrt(dim)
        for t in range(tokens):
            first = max(0, t - window + 1) if window else 0
            weights = np.exp(scores[t, first : t + 1] - scores[t, first : t + 1].max())
            out[t, head] = weights @ v[first : t + 1, of] / weights.sum()
    return _linear(layer["out"], out.reshape(tokens, heads * dim))
