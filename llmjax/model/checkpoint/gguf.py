"""A GGUF as a checkpoint: config from its metadata, names of its tensors, the order of its rows. Host only.

Architectures llama (mistral files included), qwen2 and qwen3. llama files store the rows of q and k with the two halves of each
head interleaved (their converter permutes for the rotation of ggml); that is undone while loading. qwen files are not permuted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.errors import ModelError, UnsupportedModelError
from llmjax.model.checkpoint.eos import collect_eos_ids
from llmjax.model.checkpoint.gguf_file import GGUFFile
from llmjax.model.checkpoint.leaves import Checkpoint, Naming, check_tensors, plan_leaves
from llmjax.model.config import ModelConfig, RopeScaling
from llmjax.model.config_fields import number, whole
from llmjax.model.hf_rope import scaled_max_positions

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MAX_LAYERS = 10_000
_ROPE_FACTORS = "rope_freqs.weight"
_CONTROL, _UNUSED = 3, 5  # tokenizer.ggml.token_type

# Control tokens that end an answer. A GGUF names one eos id, the models stop on several.
_END_TEXTS = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "</s>"})

# Keys (after the architecture's prefix) that change what is computed, unless zero.
_REFUSED_KEYS = (
    "expert_count",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "rope.scaling.yarn_log_multiplier",
    "use_parallel_residual",
)

_LAYER = "blk.{layer}."


def _naming(architecture: str) -> Naming:
    def named(leaf: str, *tensors: str) -> dict[str, tuple[str, ...]]:
        return {f"{leaf}.{kind}": tuple(f"{_LAYER}{name}.{kind}" for name in tensors) for kind in ("weight", "bias")}

    return Naming(
        names={
            "embed.weight": ("token_embd.weight",),
            "final_norm.weight": ("output_norm.weight",),
            "lm_head.weight": ("output.weight",),
            **named("attention_norm", "attn_norm"),
            **named("mlp_norm", "ffn_norm"),
            **named("attention.qkv", "attn_q", "attn_k", "attn_v"),
            **named("attention.out", "attn_output"),
            **named("attention.q_norm", "attn_q_norm"),
            **named("attention.k_norm", "attn_k_norm"),
            **named("mlp.gate_up", "ffn_gate", "ffn_up"),
            **named("mlp.down", "ffn_down"),
        },
        layer_prefix=_LAYER,
        interleaved=("attn_q.", "attn_k.") if architecture == "llama" else (),
    )


def open_gguf(path: Path, dtype: str | None = None) -> Checkpoint:
    """Read the header, derive the config and check that every tensor is there; no weight is read (but rope's few factors).

    Args:
        path: the file.
        dtype: name of the dtype to load as; None takes float32.

    Raises:
        UnsupportedModelError: an architecture, a setting or a tensor type that is not implemented, by name.
        ModelError: not a GGUF, truncated, damaged, or tensors missing or of the wrong shape.
    """
    reader = GGUFFile(path)
    try:
        config = gguf_config(reader).replace(dtype=dtype or "float32")
        naming = _naming(config.family)
        leaves = plan_leaves(config, naming)
        check_tensors(leaves, reader, naming, config.num_layers)
        return Checkpoint("gguf", path, config, _eos_ids(reader, config.vocab_size), leaves, reader)
    except BaseException:
        reader.close()
        raise


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The `ModelConfig` that a file's metadata and tensor table describe (dtype float32)."""
    path, metadata = file.path, file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: GGUF architecture {architecture!r} is not supported; known: {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(f"{path}: one of {metadata['split.count']} split files; merge them into one GGUF first")
    fields = _Fields(path, architecture, metadata)
    for key in _REFUSED_KEYS:
        if fields.values.get(key):
            raise UnsupportedModelError(f"{path}: {architecture}.{key} {fields.values[key]!r} is not supported")

    hidden, heads = fields.whole("embedding_length"), fields.whole("attention.head_count")
    layers = fields.whole("block_count")
    if layers > _MAX_LAYERS:
        raise UnsupportedModelError(f"{path}: {architecture}.block_count {layers} is above {_MAX_LAYERS}")
    if hidden % heads and "attention.key_length" not in fields.values:
        raise UnsupportedModelError(
            f"{path}: {architecture}.attention.key_length is missing and {hidden} is not a multiple of {heads} heads"
        )
    head_dim = fields.whole("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.whole(key, head_dim) != head_dim:
            raise UnsupportedModelError(f"{path}: {architecture}.{key} differs from the head's {head_dim}; that is not supported")
    context = fields.whole("context_length")
    scaling = _rope_scaling(file, fields, context, head_dim)
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{path}: tensor token_embd.weight is missing")
    return ModelConfig(
        family=architecture,
        vocab_size=table.shape[0],
        num_tokens=_num_tokens(metadata, table.shape[0]),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_size=fields.whole("feed_forward_length"),
        max_positions=scaled_max_positions(context, scaling),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        sliding_windows=_windows(fields, layers),
    )


class _Fields:
    """The metadata of one architecture, keys without its prefix."""

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.where = f"{path}: {architecture}"
        prefix = architecture + "."
        self.values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}

    def whole(self, key: str, *default: int) -> int:
        if isinstance(self.values.get(key), list):
            raise UnsupportedModelError(f"{self.where}: {key} differs by layer; that is not supported")
        return whole(self.values, key, *default, where=self.where)

    def number(self, key: str, *default: float) -> float:
        return number(self.values, key, *default, where=self.where)


def _rope_scaling(file: GGUFFile, fields: _Fields, context: int, head_dim: int) -> RopeScaling | None:
    """Scaling from the keys, or from the factors tensor in which files of Llama 3.1 and later carry theirs."""
    values = fields.values
    kind = values.get("rope.scaling.type", "none")
    if kind == "none" and values.get("rope.scale_linear"):
        kind, values = "linear", {**values, "rope.scaling.factor": values["rope.scale_linear"]}
    table = file.tensors.get(_ROPE_FACTORS)
    if table is not None:
        if kind != "none":
            raise UnsupportedModelError(f"{file.path}: {_ROPE_FACTORS} together with rope scaling {kind!r} is not supported")
        if table.shape != (head_dim // 2,):
            raise ModelError(f"{file.path}: {_ROPE_FACTORS} is {list(table.shape)}, it must be {[head_dim // 2]}")
        factors = np.empty(table.shape, np.float32)
        file.read_into(_ROPE_FACTORS, factors)
        return RopeScaling(kind="factors", frequency_factors=tuple(factors.tolist()))
    if kind == "none":
        return None
    where = fields.where
    factor = number(values, "rope.scaling.factor", where=where)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor, original_max_positions=context)
    if kind != "yarn":
        raise UnsupportedModelError(f"{file.path}: rope scaling {kind!r} is not supported; known: none, linear, yarn")
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if values.get(key, 1.0) != 1.0:
            raise UnsupportedModelError(f"{where}: {key} {values[key]!r} is not supported; only 1 is")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=whole(values, "rope.scaling.original_context_length", context, where=where),
        beta_fast=number(values, "rope.scaling.yarn_beta_fast", 32.0, where=where),
        beta_slow=number(values, "rope.scaling.yarn_beta_slow", 1.0, where=where),
    )


def _windows(fields: _Fields, layers: int) -> tuple[int, ...]:
    """A window in a llama file (mistral) holds for all layers; other files cannot say for which."""
    window = fields.values.get("attention.sliding_window")
    if not window:
        return (0,) * layers
    if not fields.where.endswith(": llama") or "attention.sliding_window_pattern" in fields.values:
        raise UnsupportedModelError(f"{fields.where}: attention.sliding_window is not supported for this architecture")
    return (fields.whole("attention.sliding_window"),) * layers


def _num_tokens(metadata: Mapping[str, Any], vocab_size: int) -> int:
    """Rows of the vocabulary up to the last that is a token: converters fill padding rows with tokens of type "unused"."""
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list):
        return vocab_size
    known = len(types)
    while known and types[known - 1] == _UNUSED:
        known -= 1
    return min(known, vocab_size) or vocab_size


def _eos_ids(file: GGUFFile, vocab_size: int) -> tuple[int, ...]:
    metadata = file.metadata
    values = [
        (f"{file.path}: {key}", metadata.get(key))
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        values.append((str(file.path), [index for index, (text, kind) in pairs if kind == _CONTROL and text in _END_TEXTS]))
    return collect_eos_ids(values, vocab_size)
