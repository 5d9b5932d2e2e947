"""The parameter tree as plain data, against the Flax declaration of the same decoder."""

from __future__ import annotations

import jax
import pytest
from fake_checkpoints import tiny_config

from llmjax.model.checkpoint.presets import PRESETS
from llmjax.model.hf_config import parse_hf_config
from llmjax.model.layers import abstract_params
from llmjax.model.param_spec import iter_params, num_params, param_shapes

CONFIGS = {
    "llama": parse_hf_config(tiny_config(attention_bias=True, mlp_bias=True, torch_dtype="bfloat16")),
    "tied": parse_hf_config(tiny_config(tie_word_embeddings=True)),
    "qwen2": parse_hf_config(tiny_config("qwen2")),
    "qwen3": parse_hf_config(tiny_config("qwen3")),
}


def flat(tree, prefix=()):
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {path: leaf for key, child in tree.items() for path, leaf in flat(child, (*prefix, key)).items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_and_dtypes_are_those_the_decoder_declares(name):
    config = CONFIGS[name]
    declared = {path: (leaf.shape, str(leaf.dtype)) for path, leaf in flat(abstract_params(config)).items()}
    assert {path: (shape, dtype) for path, shape, dtype in iter_params(config)} == declared
    assert flat(param_shapes(config)) == {path: shape for path, (shape, _) in declared.items()}


def test_fused_shapes():
    config = CONFIGS["qwen2"]
    layer = param_shapes(config)["layers"][1]
    assert layer["attention"]["qkv"] == {"weight": ((4 + 2 * 2) * 16, 48), "bias": (128,)}
    assert layer["attention"]["out"] == {"weight": (48, 64)}
    assert layer["mlp"] == {"gate_up": {"weight": (128, 48)}, "down": {"weight": (48, 64)}}
    assert "lm_head" not in param_shapes(CONFIGS["tied"])


def test_presets_have_the_sizes_of_the_models_they_are_named_after():
    assert num_params(PRESETS["llama-8b"]) == 8_030_261_248
    assert num_params(PRESETS["qwen2.5-1.5b"]) == 1_543_714_304
    assert jax.tree.leaves(param_shapes(PRESETS["llama-8b"]), is_leaf=lambda x: isinstance(x, tuple))[0] == (128256, 4096)
