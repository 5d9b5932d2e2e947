"""What a GGUF's metadata say about the model, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from fake_checkpoints import random_weights, tiny_config, write_gguf

from llmjax.errors import ModelError, UnsupportedModelError
from llmjax.model.checkpoint.describe import describe
from llmjax.model.checkpoint.load import load_model


def gguf_model(tmp_path, metadata=None, config=None, extra=None, **kwargs):
    config = config or tiny_config()
    write_gguf(tmp_path / "m.gguf", config, random_weights(config), metadata=metadata, extra=extra, **kwargs)
    return describe(path=tmp_path / "m.gguf")


def test_gguf_eos_and_padding_tokens(tmp_path):
    tokens = [f"t{i}" for i in range(301)]
    tokens[7], tokens[9], tokens[11] = "<|endoftext|>", "<|im_end|>", "</s>"
    types = [1] * 290 + [5] * 11
    types[7] = types[9] = 3  # control; "</s>" here is ordinary text
    facts = gguf_model(
        tmp_path,
        {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.eot_token_id": 20},
    )
    assert facts["eos_token_ids"] == (2, 20, 7, 9)
    assert facts["config"].num_tokens == 290


def test_gguf_rope_scaling(tmp_path):
    linear = gguf_model(tmp_path, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})["config"].rope_scaling
    assert (linear.kind, linear.factor) == ("linear", 4.0)
    old = gguf_model(tmp_path, {"llama.rope.scale_linear": 2.0})["config"].rope_scaling
    assert (old.kind, old.factor) == ("linear", 2.0)
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    yarn = gguf_model(tmp_path, keys)["config"].rope_scaling
    assert (yarn.kind, yarn.factor, yarn.original_max_positions) == ("yarn", 4.0, 128)


def test_gguf_rope_factors_tensor(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    scaling = gguf_model(tmp_path, extra={"rope_freqs.weight": factors})["config"].rope_scaling
    assert scaling.kind == "factors"
    assert scaling.frequency_factors == tuple(factors.tolist())
    with pytest.raises(ModelError, match=r"rope_freqs.weight is \[7\], it must be \[8\]"):
        gguf_model(tmp_path, extra={"rope_freqs.weight": factors[:7]})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported"),
        ({"llama.attention.head_count_kv": [2, 1]}, "attention.head_count_kv differs by layer"),
        ({"llama.attention.value_length": 8}, "attention.value_length differs"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count differs"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope scaling 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
        ({"llama.block_count": None}, "llama: block_count is missing"),
        ({"llama.block_count": 3}, "tensors are missing: blk.2.attn_norm.weight"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "attention.layer_norm_rms_epsilon must be a positive number"),
        ({"llama.context_length": 0}, "context_length must be a whole number"),
        ({"split.count": 3}, "one of 3 split files"),
        ({"llama.embedding_length": 64}, r"is \[301, 48\], the config says \[301, 64\]"),
    ],
)
def test_gguf_metadata_refused_by_name(metadata, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        gguf_model(tmp_path, metadata)


def test_gguf_of_another_architecture(tmp_path):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", {**config, "model_type": "gemma3"}, random_weights(config))
    with pytest.raises(UnsupportedModelError, match=r"m.gguf: GGUF architecture 'gemma3' is not supported; known: llama, qwen2"):
        load_model(path=path)


def test_gguf_with_parameters_of_another_model(tmp_path):
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    with pytest.raises(ModelError, match=r"would change results: blk.0.attn_q_norm.weight"):
        gguf_model(tmp_path, extra=extra)
