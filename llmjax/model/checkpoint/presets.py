"""Named shapes for random weights: real models' dimensions without their files. Host only."""

from __future__ import annotations

from llmjax.errors import UnsupportedModelError
from llmjax.model.config import ModelConfig

PRESETS: dict[str, ModelConfig] = {
    "llama-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=14336,
        max_positions=131072,
        rope_theta=500000.0,
        dtype="bfloat16",
    ),
    "qwen2.5-1.5b": ModelConfig(
        family="qwen2",
        vocab_size=151936,
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        mlp_size=8960,
        max_positions=32768,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        tie_embeddings=True,
        qkv_bias=True,
        dtype="bfloat16",
    ),
}


def preset_config(name: str) -> ModelConfig:
    """The config of a preset; UnsupportedModelError lists the known names."""
    if name not in PRESETS:
        raise UnsupportedModelError(f"random model {name!r} is not known; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
