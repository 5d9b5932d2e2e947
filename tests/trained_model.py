"""A tiny decoder that has learnt something: unlike random weights its distributions are sharp, and each of its parts is needed.

It learns texts in which each word is one of two that follow the two before it, and later parts repeat earlier ones. Training
is Adam (Kingma and Ba 2015); same seed, same weights on one machine.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import random_params

from llmjax.model.config import ModelConfig
from llmjax.model.rope import cos_sin

CONFIG = ModelConfig(
    family="llama", vocab_size=64, num_tokens=64, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
    mlp_size=128, max_positions=512,
)  # fmt: skip
LENGTH = 64
_ROWS = 16


def texts(count: int, seed: int) -> list[list[int]]:
    """Texts of the language, `LENGTH` tokens each."""
    table = np.random.default_rng(1).integers(0, CONFIG.num_tokens, (CONFIG.num_tokens, 2, 2))
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = random.integers(0, CONFIG.num_tokens, 2).tolist()
        while len(ids) < LENGTH:
            if len(ids) > 24 and random.random() < 0.1:
                start = int(random.integers(0, len(ids) - 12))
                ids += ids[start : start + 12]
            elif random.random() < 0.05:
                ids.append(int(random.integers(0, CONFIG.num_tokens)))
            else:
                ids.append(int(table[ids[-1], ids[-2] % 2, int(random.random() < 0.25)]))  # one way alone would run in circles
        found.append(ids[:LENGTH])
    return found


def trained_params(steps: int) -> dict[str, Any]:
    """Parameters after some steps of `_ROWS` texts."""
    params = random_params(CONFIG, seed=0)
    moments = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    for step in range(steps):
        rows = jnp.asarray(texts(_ROWS, seed=1000 + step))
        rate = 4e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        params, moments, loss = _update(params, moments, rows, jnp.float32(step + 1), jnp.float32(rate))
    assert np.isfinite(loss)
    return params


def _loss(params: Any, rows: jax.Array) -> jax.Array:
    """Mean negative logprob of rows [B, T]. The decoder of `llmjax.model` once more, as that one's attention has no gradient."""
    x, c = params["embed"]["weight"][rows], CONFIG
    cos, sin = (table[:, None] for table in cos_sin(jnp.arange(rows.shape[1]), c))
    for layer in params["layers"].values():
        qkv = _norm(x, layer["attention_norm"]) @ layer["attention"]["qkv"]["weight"].T
        qkv = qkv.reshape(*rows.shape, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        q, k, v = jnp.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
        out = jax.nn.dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + out.reshape(*rows.shape, -1) @ layer["attention"]["out"]["weight"].T
        gate, up = jnp.split(_norm(x, layer["mlp_norm"]) @ layer["mlp"]["gate_up"]["weight"].T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ layer["mlp"]["down"]["weight"].T
    scores = jax.nn.log_softmax(_norm(x, params["final_norm"]) @ params["lm_head"]["weight"].T)
    return -jnp.take_along_axis(scores[:, :-1], rows[:, 1:, None], axis=-1).mean()


def _norm(x: jax.Array, scale: Any) -> jax.Array:
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale["weight"]


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@jax.jit
def _update(params: Any, moments: Any, rows: Any, step: Any, rate: Any) -> Any:
    loss, gradient = jax.value_and_grad(_loss)(params, rows)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
    second = jax.tree.map(lambda v, g: 0.98 * v + 0.02 * g * g, moments[1], gradient)
    change = jax.tree.map(lambda m, v: m / (1 - 0.9**step) / (jnp.sqrt(v / (1 - 0.98**step)) + 1e-8), first, second)
    return jax.tree.map(lambda p, c: p - rate * c, params, change), (first, second), loss
