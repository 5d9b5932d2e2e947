"""A `ModelConfig` as a Hugging Face config.json. Host only.

The opposite of `hf_config.parse_hf_config`, which is asked whether it understands the result as what was meant.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llmjax.errors import ModelError, UnsupportedModelError
from llmjax.model.config import ModelConfig, RopeScaling
from llmjax.model.hf_config import parse_hf_config

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def hf_config(config: ModelConfig, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """The content of a config.json, without what a quantization adds.

    Raises ModelError with the fields that it cannot say: a family of one's own, a GGUF's rope factors, biases its family has not.
    """
    if config.family not in _ARCHITECTURES:
        raise ModelError(f"export: no config.json for family {config.family!r}; known: {', '.join(_ARCHITECTURES)}")
    declared = config.max_positions
    if config.rope_scaling is not None and config.rope_scaling.kind == "dynamic":
        declared = config.rope_scaling.original_max_positions  # stretched when it is read
    content: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": declared,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else _rope(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": _ACTIVATIONS[config.activation],
        "torch_dtype": config.dtype,
        "eos_token_id": list(eos_token_ids) or None,
        **_biases(config),
        **_windows(config),
    }
    try:
        read = parse_hf_config(content)
    except UnsupportedModelError as error:
        raise ModelError(f"export: {error}") from None
    meant = config.replace(quantization=None, num_tokens=read.num_tokens)
    lost = [field.name for field in dataclasses.fields(config) if getattr(read, field.name) != getattr(meant, field.name)]
    if lost:
        raise ModelError(
            f"export: a config.json of family {config.family!r} cannot say {', '.join(lost)}; save with orbax instead"
        )
    return content


def _biases(config: ModelConfig) -> dict[str, bool]:
    return {"llama": {"attention_bias": config.output_bias, "mlp_bias": config.mlp_bias},
            "qwen3": {"attention_bias": config.output_bias}}.get(config.family, {})  # fmt: skip


def _windows(config: ModelConfig) -> dict[str, Any]:
    sizes = [size for size in config.sliding_windows if size]
    if not sizes:
        return {"sliding_window": None}
    types = ["sliding_attention" if size else "full_attention" for size in config.sliding_windows]
    return {"sliding_window": sizes[0], "layer_types": types, **({"use_sliding_window": True} if "qwen" in config.family else {})}


def _rope(scaling: RopeScaling) -> dict[str, Any]:
    fields = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        "factors": (),
    }[scaling.kind]
    said = {name: getattr(scaling, name) for name in fields if getattr(scaling, name) is not None}
    if scaling.kind in ("llama3", "yarn"):
        said["original_max_position_embeddings"] = scaling.original_max_positions
    return {"rope_type": scaling.kind, **said}
