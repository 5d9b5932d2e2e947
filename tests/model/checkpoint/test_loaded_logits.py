"""From a checkpoint's files to logits: every family equals a float64 decoder that works on the file's own tensors.

The oracle knows Hugging Face names and formulas only, nothing of llmjax's tree, fusing or row order (B36, B37).
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from fake_checkpoints import bigram_model, chain_logits, random_weights, tiny_config, write_hf

from llmjax.model.batch import pack_sequences
from llmjax.model.checkpoint.load import load_model
from llmjax.model.kv_cache import init_cache
from llmjax.model.transformer import forward, logits

IDS = [5, 299, 11, 7, 7, 130, 42, 3, 256, 1, 88, 19]


def oracle(config, weights, ids):
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    heads, size = config["num_attention_heads"], config["head_dim"]
    groups = heads // config["num_key_value_heads"]
    count = len(ids)
    angles = np.arange(count)[:, None] * config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    turn = np.exp(1j * angles)[:, None]
    distance = np.arange(count)[:, None] - np.arange(count)
    hidden_from = (distance < 0) | (distance >= (config.get("sliding_window") or count))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    def project(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def rotate(x):
        z = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        h = norm(x, prefix + "input_layernorm.weight")
        q, k, v = (project(h, f"{attention}{name}_proj").reshape(count, -1, size) for name in "qkv")
        if f"{attention}q_norm.weight" in w:
            q, k = norm(q, f"{attention}q_norm.weight"), norm(k, f"{attention}k_norm.weight")
        q, k = rotate(q), rotate(k)
        out = np.empty_like(q)
        for head in range(heads):
            scores = q[:, head] @ k[:, head // groups].T / np.sqrt(size)
            scores[hidden_from] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = shares / shares.sum(-1, keepdims=True) @ v[:, head // groups]
        x = x + project(out.reshape(count, -1), f"{attention}o_proj")
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate = project(h, f"{prefix}mlp.gate_proj")
        x = x + project(gate / (1 + np.exp(-gate)) * project(h, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj")
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w[head].T


def model_logits(model, ids):
    batch, pages = pack_sequences([ids], page_size=16)
    cache = init_cache(model.config, num_pages=pages, page_size=16)
    hidden, _ = jax.jit(forward, static_argnames=("config", "decode"))(model.params, batch, cache, config=model.config)
    return np.asarray(logits(model.params, hidden, config=model.config))


CASES = {
    "head_dim 16 of hidden 48, 4 heads on 2": tiny_config(),
    "tied, 9 heads on 3, biases": tiny_config(
        tie_word_embeddings=True, num_attention_heads=9, num_key_value_heads=3, head_dim=10, attention_bias=True, mlp_bias=True
    ),
    "mistral": tiny_config("mistral", sliding_window=5, num_hidden_layers=1),
    "qwen2": tiny_config("qwen2", rope_theta=1000000.0, num_hidden_layers=1),
    "qwen3": tiny_config("qwen3", num_hidden_layers=1),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_files_tensors(name, tmp_path):
    config = CASES[name]
    weights = random_weights(config)
    expected = oracle(config, weights, IDS)
    model = load_model(path=write_hf(tmp_path / "hf", config, weights, shards=2))
    np.testing.assert_allclose(model_logits(model, IDS), expected, atol=3e-4, rtol=3e-4)


def test_a_bigram_checkpoint_follows_its_table(tmp_path):
    table = chain_logits({1: 2, 2: 3, 3: 1}, 301, default=4)
    config, weights = bigram_model(table)
    got = model_logits(load_model(path=write_hf(tmp_path, config, weights)), [1, 2, 3, 9, 300])
    np.testing.assert_allclose(got, table[[1, 2, 3, 9, 300]], atol=1e-4)
