"""`ModelConfig` from a Hugging Face config.json, per architecture. Host only; transformers is not needed.

Owns what each family's fields mean (defaults included, as in transformers) and the refusal, by name, of everything that is not
implemented: a field that would change results is never ignored. Reads no weight and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from llmjax.errors import UnsupportedModelError
from llmjax.model.config import DTYPES, ModelConfig
from llmjax.model.config_fields import flag, number, whole
from llmjax.model.hf_rope import parse_rope, scaled_max_positions

ParseConfig = Callable[[Mapping[str, Any]], ModelConfig]

_MAX_LAYERS = 10_000  # one tuple entry a layer: a hostile number must not become a gigabyte

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Fields that change what is computed, with the value (besides null, false and 0) at which they change nothing.
_MUST_BE_NEUTRAL: dict[str, Any] = {
    "partial_rotary_factor": 1,
    "rotary_pct": 1,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logit_scale": 1,
    "logits_scaling": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "clip_qkv": None,
    "num_experts": None,
    "num_local_experts": None,
    "n_routed_experts": None,
    "kv_lora_rank": None,
    "attention_chunk_size": None,
    "no_rope_layers": None,
    "dual_chunk_attention_config": None,
    "alibi": None,
    "use_parallel_residual": None,
    "is_encoder_decoder": None,
    "add_cross_attention": None,
}

_ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def parse_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a config.json.

    Args:
        config: the file's content. A quantization that is implemented is the caller's to read, and to leave out here.

    Returns:
        The config; its dtype is the file's `dtype` (or `torch_dtype`), float32 if there is none. `num_tokens` is the whole
        vocabulary: how many ids are real is the tokenizer's knowledge.

    Raises:
        UnsupportedModelError: an unknown architecture, a field that is missing, impossible or not implemented, by name.
    """
    if not isinstance(config, Mapping):
        raise UnsupportedModelError(f"config.json: must be an object, got {type(config).__name__}")
    parse = ARCHITECTURES.get(architecture_name(config))
    if parse is None:
        raise UnsupportedModelError(
            f"config.json: architecture {architecture_name(config)!r} is not supported; known: {', '.join(sorted(ARCHITECTURES))}"
        )
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModelError(
            f"config.json: quantization_config ({method}) is not supported; use the unquantised weights or a GGUF"
        )
    return parse(config)


def architecture_name(config: Mapping[str, Any]) -> str:
    """The first of `architectures`; without any, the causal LM of `model_type`."""
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    model_type = str(config.get("model_type"))
    return _ARCHITECTURE_OF_MODEL_TYPE.get(model_type, model_type)


def register_architecture(name: str, parse: ParseConfig) -> None:
    """Accept config.json files whose `architectures` begin with `name`. The last call for a name wins."""
    ARCHITECTURES[name] = parse


def _llama(config: Mapping[str, Any]) -> ModelConfig:
    bias = flag(config, "attention_bias", False)
    return _decoder(
        config,
        family="llama",
        num_kv_heads=whole(config, "num_key_value_heads", whole(config, "num_attention_heads")),
        sliding_windows=_windows(config, None, lambda index: False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
    )


def _mistral(config: Mapping[str, Any]) -> ModelConfig:
    _refuse_set(config, "attention_bias", "mlp_bias")
    window = _window(config, 4096)
    return _decoder(
        config,
        family="mistral",
        num_kv_heads=_kv_heads(config, 8),
        sliding_windows=_windows(config, window, lambda index: window is not None),
    )


def _qwen2(config: Mapping[str, Any]) -> ModelConfig:
    _refuse_set(config, "mlp_bias")
    return _decoder(
        config, family="qwen2", num_kv_heads=_kv_heads(config, 32), sliding_windows=_qwen_windows(config), qkv_bias=True
    )


def _qwen3(config: Mapping[str, Any]) -> ModelConfig:
    _refuse_set(config, "mlp_bias")
    bias = flag(config, "attention_bias", False)
    return _decoder(
        config,
        family="qwen3",
        num_kv_heads=_kv_heads(config, 32),
        sliding_windows=_qwen_windows(config),
        head_dim=whole(config, "head_dim", 128),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


ARCHITECTURES: dict[str, ParseConfig] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MinistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}

_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def _decoder(config: Mapping[str, Any], *, family: str, head_dim: int | None = None, **fields: Any) -> ModelConfig:
    """What all families share."""
    for key, neutral in _MUST_BE_NEUTRAL.items():
        value = config.get(key)
        if value and value != neutral:
            raise UnsupportedModelError(f"config.json: {key} {value!r} is not supported for {architecture_name(config)}")
    declared = whole(config, "max_position_embeddings", _DEFAULT_MAX_POSITIONS[family])
    theta, scaling = parse_rope(config, declared)
    return ModelConfig(
        family=family,
        vocab_size=whole(config, "vocab_size"),
        hidden_size=whole(config, "hidden_size"),
        num_layers=_num_layers(config),
        num_heads=whole(config, "num_attention_heads"),
        head_dim=head_dim or _head_dim(config),
        mlp_size=whole(config, "intermediate_size"),
        max_positions=scaled_max_positions(declared, scaling),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=flag(config, "tie_word_embeddings", False),
        activation=_activation(config),
        dtype=_dtype(config),
        **fields,
    )


def _num_layers(config: Mapping[str, Any]) -> int:
    count = whole(config, "num_hidden_layers")
    if count > _MAX_LAYERS:
        raise UnsupportedModelError(f"config.json: num_hidden_layers {count} is above {_MAX_LAYERS}")
    return count


def _kv_heads(config: Mapping[str, Any], when_missing: int) -> int:
    """Null means as many as query heads; a missing key means the family's default."""
    if "num_key_value_heads" not in config:
        return when_missing
    return whole(config, "num_key_value_heads", whole(config, "num_attention_heads"))


def _head_dim(config: Mapping[str, Any]) -> int:
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    if config.get("head_dim") is not None:
        return whole(config, "head_dim")
    if hidden % heads:
        raise UnsupportedModelError(
            f"config.json: hidden_size {hidden} is not a multiple of {heads} heads and head_dim is missing"
        )
    return hidden // heads


def _activation(config: Mapping[str, Any]) -> Literal["silu", "gelu", "gelu_tanh"]:
    name = config.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"config.json: hidden_act {name!r} is not supported; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(f"config.json: dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    return name


def _refuse_set(config: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if config.get(key):
            raise UnsupportedModelError(f"config.json: {key} is not supported for {architecture_name(config)}")


def _window(config: Mapping[str, Any], when_missing: int) -> int | None:
    """`sliding_window` in tokens; null switches it off."""
    if config.get("sliding_window", when_missing) is None:
        return None
    return whole(config, "sliding_window", when_missing)


def _qwen_windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Without `use_sliding_window` a window is ignored; with it the layers from `max_window_layers` on slide."""
    window = _window(config, 4096) if flag(config, "use_sliding_window", False) else None
    first = config.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise UnsupportedModelError(f"config.json: max_window_layers must be a whole number of at least 0, got {first!r}")
    return _windows(config, window, lambda index: window is not None and index >= first)


def _windows(config: Mapping[str, Any], window: int | None, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """One window a layer, 0 for full attention: from `layer_types` when given, for any family, else from the family's rule."""
    count = _num_layers(config)
    types = config.get("layer_types")
    if types is None:
        return tuple((window or 0) if slides(index) else 0 for index in range(count))
    if not isinstance(types, list) or len(types) != count:
        raise UnsupportedModelError(f"config.json: layer_types must list {count} layers, got {types!r:.80}")
    other = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
    if other:
        raise UnsupportedModelError(
            f"config.json: layer type {', '.join(other)} is not supported; known: full_attention, sliding_attention"
        )
    if "sliding_attention" not in types:
        return (0,) * count
    if window is None and "use_sliding_window" not in config:
        window = None if config.get("sliding_window") is None else whole(config, "sliding_window")
    if window is None:
        raise UnsupportedModelError("config.json: layer_types has sliding_attention layers but sliding_window is switched off")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
