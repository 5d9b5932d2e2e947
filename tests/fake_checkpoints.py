"""Tiny real checkpoints for tests: Hugging Face directories and GGUF files with random or scripted weights.

Weights are float32 numpy arrays under Hugging Face names; the writers turn the same weights into any format, so that
loaders can be compared with each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Weights = dict[str, np.ndarray]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of two layers: hidden 48, 4 query and 2 kv heads of 16, vocabulary 301. A change to None drops the key."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": 301,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    }
    if family == "mistral":
        config["sliding_window"] = None
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None or key in ("sliding_window", "num_key_value_heads")}


def random_weights(config: Mapping[str, Any], seed: int = 0, scale: float = 0.2) -> Weights:
    """Random weights under Hugging Face names for a `tiny_config`: biases and q/k norms as the family has them."""
    rng = np.random.default_rng(seed)
    family = config["model_type"]
    hidden, mlp, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention_bias = bool(config.get("attention_bias"))

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def norm(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": norm(hidden)}
    if not config.get("tie_word_embeddings"):
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        projections = {
            "self_attn.q_proj": (heads * head_dim, hidden, attention_bias or family == "qwen2"),
            "self_attn.k_proj": (kv_heads * head_dim, hidden, attention_bias or family == "qwen2"),
            "self_attn.v_proj": (kv_heads * head_dim, hidden, attention_bias or family == "qwen2"),
            "self_attn.o_proj": (hidden, heads * head_dim, attention_bias),
            "mlp.gate_proj": (mlp, hidden, bool(config.get("mlp_bias"))),
            "mlp.up_proj": (mlp, hidden, bool(config.get("mlp_bias"))),
            "mlp.down_proj": (hidden, mlp, bool(config.get("mlp_bias"))),
        }
        for name, (rows, columns, bias) in projections.items():
            weights[f"{prefix}{name}.weight"] = matrix(rows, columns)
            if bias:
                weights[f"{prefix}{name}.bias"] = matrix(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = norm(hidden)
        if family == "qwen3":
            weights[f"{prefix}self_attn.q_norm.weight"] = norm(head_dim)
            weights[f"{prefix}self_attn.k_norm.weight"] = norm(head_dim)
    return weights


def bigram_model(logits: np.ndarray, *, scale: float = 1.0) -> tuple[dict[str, Any], Weights]:
    """Config and weights of a llama whose next-token logits depend on the last token alone.

    `logits[last, next]` is what the model returns (float32, up to the norm's epsilon). Hidden size = vocabulary, embedding =
    identity * scale, attention and MLP add nothing. RMSNorm turns the embedding into a one-hot vector of length sqrt(V), so
    the head holds the table divided by sqrt(V).
    """
    vocab = logits.shape[0]
    assert logits.shape == (vocab, vocab)
    config = tiny_config(
        vocab_size=vocab,
        hidden_size=vocab,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        rms_norm_eps=1e-8,
        max_position_embeddings=4096,
    )
    weights = {name: np.zeros_like(value) for name, value in random_weights(config).items()}
    weights["model.embed_tokens.weight"] = np.eye(vocab, dtype=np.float32) * scale
    weights["lm_head.weight"] = np.ascontiguousarray(logits.T, np.float32) / np.float32(np.sqrt(vocab))
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = np.ones_like(weights[name])
    return config, weights


def chain_logits(next_token: Mapping[int, int], vocab_size: int, *, default: int = 0, margin: float = 20.0) -> np.ndarray:
    """A table for `bigram_model`: after each token `next_token[token]` (else `default`) stands `margin` above the rest."""
    table = np.zeros((vocab_size, vocab_size), np.float32)
    for token in range(vocab_size):
        table[token, next_token.get(token, default)] = margin
    return table


def write_hf(
    path: Path,
    config: Mapping[str, Any],
    weights: Weights,
    *,
    shards: int = 1,
    dtype: str = "float32",
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face directory: model.safetensors, or `shards` files with an index. Returns `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    stored = {name: np.ascontiguousarray(value.astype(DTYPES[dtype])) for name, value in weights.items()}
    if shards == 1:
        save_file(stored, path / "model.safetensors")
        return path
    names = list(stored)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        shard = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: stored[name] for name in names[index::shards]}
        save_file(part, path / shard)
        weight_map |= dict.fromkeys(part, shard)
    total = sum(value.nbytes for value in stored.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index_json), encoding="utf-8")
    return path


def interleave_heads(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the llama converter does to the rows of q and k: the two halves of each head, row by row in turn."""
    head_dim = rows.shape[0] // heads
    order = [
        head * head_dim + half * (head_dim // 2) + i for head in range(heads) for i in range(head_dim // 2) for half in (0, 1)
    ]
    return rows[order]


def gguf_names(config: Mapping[str, Any], weights: Weights) -> Weights:
    """The weights under GGUF names, rows of q and k interleaved for the llama architecture."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    result: Weights = {}
    for name, value in weights.items():
        stem, kind = name.rsplit(".", 1)
        if stem in top:
            result[f"{top[stem]}.{kind}"] = value
            continue
        _, _, layer, part = stem.split(".", 3)
        if gguf_architecture(config) == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            value = interleave_heads(value, heads if "q_proj" in part else kv_heads)
        result[f"blk.{layer}.{inner[part]}.{kind}"] = value
    return result


def gguf_architecture(config: Mapping[str, Any]) -> str:
    """Mistral files are of architecture llama."""
    return {"mistral": "llama"}.get(config["model_type"], config["model_type"])


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Weights,
    *,
    quant: str = "F32",
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF of the same model and return `path`.

    Matrices are stored as `quant` (F32, F16, BF16 or what the gguf package can quantise to), vectors as F32. `metadata` adds or
    replaces keys (int, float, str, bool, list; None drops one), `extra` adds tensors.
    """
    architecture = gguf_architecture(config)
    heads = config["num_attention_heads"]
    values: dict[str, Any] = {
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": config.get("num_key_value_heads") or heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": config["rope_theta"],
    }
    if "head_dim" in config:
        values[f"{architecture}.attention.key_length"] = config["head_dim"]
        values[f"{architecture}.attention.value_length"] = config["head_dim"]
    if config.get("eos_token_id") is not None:
        values["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
    values.update(metadata or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    kind = gguf.GGMLQuantizationType[quant]
    for name, value in gguf_names(config, weights).items():
        if value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, value)
        elif kind == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(name, value.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
