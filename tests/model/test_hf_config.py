"""config.json of every family: meaning of the fields, and refusal by name of what is not implemented."""

from __future__ import annotations

import math
import re
import subprocess
import sys

import pytest
from fake_checkpoints import tiny_config

from llmjax.errors import UnsupportedModelError
from llmjax.model import hf_config
from llmjax.model.hf_config import parse_hf_config, register_architecture


def test_every_field_of_a_llama_arrives():
    config = parse_hf_config(
        tiny_config(
            num_attention_heads=9,
            num_key_value_heads=3,
            head_dim=20,
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu_pytorch_tanh",
            tie_word_embeddings=True,
            torch_dtype="bfloat16",
        )
    )
    assert (config.family, config.vocab_size, config.hidden_size, config.num_layers) == ("llama", 301, 48, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.mlp_size) == (9, 3, 20, 64)
    assert (config.max_positions, config.num_tokens, config.norm_eps, config.rope_theta) == (512, 301, 1e-5, 10000.0)
    assert config.qkv_bias
    assert config.output_bias
    assert config.mlp_bias
    assert config.tie_embeddings
    assert not config.qk_norm
    assert (config.activation, config.dtype) == ("gelu_tanh", "bfloat16")


def test_explicit_head_dim_wins_over_the_quotient():
    assert parse_hf_config(tiny_config(head_dim=16)).head_dim == 16  # 48 / 4 would be 12
    assert parse_hf_config(tiny_config(head_dim=None)).head_dim == 12
    assert parse_hf_config({**tiny_config(), "head_dim": None}).head_dim == 12
    with pytest.raises(UnsupportedModelError, match="hidden_size 48 is not a multiple of 9 heads"):
        parse_hf_config(tiny_config(head_dim=None, num_attention_heads=9, num_key_value_heads=3))


def test_kv_heads_null_or_absent():
    assert parse_hf_config(tiny_config(num_key_value_heads=None)).num_kv_heads == 4
    for family, default in (("llama", 4), ("mistral", 8), ("qwen2", 32), ("qwen3", 32)):
        config = tiny_config(family, num_attention_heads=32 if default != 4 else 4)
        del config["num_key_value_heads"]
        assert parse_hf_config(config).num_kv_heads == default


def test_families_differ_in_biases_and_norms():
    by_family = {family: parse_hf_config(tiny_config(family)) for family in ("llama", "mistral", "qwen2", "qwen3")}
    assert {family: config.qkv_bias for family, config in by_family.items()} == {
        "llama": False, "mistral": False, "qwen2": True, "qwen3": False,
    }  # fmt: skip
    assert [family for family, config in by_family.items() if config.qk_norm] == ["qwen3"]
    assert not any(config.output_bias or config.mlp_bias for config in by_family.values())
    assert parse_hf_config({key: value for key, value in tiny_config("qwen3").items() if key != "head_dim"}).head_dim == 128


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("llama", {}, (0, 0, 0, 0)),
        ("llama", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("mistral", {}, (0, 0, 0, 0)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8, 8)),
        ("qwen2", {"sliding_window": 8}, (0, 0, 0, 0)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, (0, 0, 0, 0)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (0, 8, 8, 8)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, (0, 0, 0, 0)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, (8, 8, 8, 8)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 8)),
    ],
)
def test_windows_by_the_rule_of_the_family(family, changes, windows):
    assert parse_hf_config(tiny_config(family, num_hidden_layers=4, **changes)).sliding_windows == windows


def test_mistral_without_the_key_has_its_default_window():
    config = tiny_config("mistral")
    del config["sliding_window"]
    assert parse_hf_config(config).sliding_windows == (4096, 4096)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_layer_types_mix_windows_in_any_family(family):
    changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    if family.startswith("qwen"):
        changes["use_sliding_window"] = True
    assert parse_hf_config(tiny_config(family, **changes)).sliding_windows == (8, 0)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_layer_types_that_slide_need_a_window(family):
    config = tiny_config(family, layer_types=["sliding_attention", "full_attention"])
    config |= {"sliding_window": 8, "use_sliding_window": False} if family == "qwen2" else {"sliding_window": None}
    with pytest.raises(UnsupportedModelError, match="sliding_window is switched off"):
        parse_hf_config(config)


def test_the_architecture_may_come_from_model_type():
    config = tiny_config("qwen3")
    del config["architectures"]
    assert parse_hf_config(config).family == "qwen3"
    assert parse_hf_config(tiny_config("mistral", architectures=["MinistralForCausalLM"], sliding_window=8)).sliding_windows == (
        8,
        8,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, r"'MixtralForCausalLM' is not supported; known: Llama.*Qwen3For"),
        ({"architectures": [], "model_type": "gpt2"}, "'gpt2' is not supported"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config \(gptq\)"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"num_experts": 64}, "num_experts 64"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
        ({"logits_scaling": 8.0}, "logits_scaling 8.0"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer type linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types must list 2 layers"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"num_attention_heads": 33}, "33 query heads are not a multiple of 2 kv heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is above"),
        ({"vocab_size": -1}, "vocab_size must be a whole number"),
        ({"vocab_size": True}, "vocab_size must be a whole number"),
        ({"vocab_size": 2**40}, "vocab_size must be a whole number"),
        ({"intermediate_size": 6.5}, "intermediate_size must be a whole number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ({"rope_theta": 1.0}, "rope_theta must be above 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"sliding_window": 0, "layer_types": ["sliding_attention", "full_attention"]}, "sliding_window must be a whole number"),
    ],
)  # fmt: skip
def test_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config({**tiny_config(), **changes})


@pytest.mark.parametrize(("family", "key"), [("mistral", "attention_bias"), ("qwen2", "mlp_bias")])
def test_biases_a_family_does_not_have_are_refused(family, key):
    with pytest.raises(UnsupportedModelError, match=f"{key} is not supported for {tiny_config(family)['architectures'][0]}"):
        parse_hf_config(tiny_config(family, **{key: True}))


def test_neutral_values_of_refused_fields_are_accepted():
    neutral = {"partial_rotary_factor": 1.0, "num_experts": 0, "final_logit_softcapping": None, "logits_scaling": 1.0}
    assert parse_hf_config({**tiny_config(), **neutral}) == parse_hf_config(tiny_config())


def test_yarn_says_how_far_the_context_reaches():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse_hf_config({**tiny_config(), "rope_scaling": rope}).max_positions == 2048


def test_register_architecture(monkeypatch):
    monkeypatch.setattr(hf_config, "ARCHITECTURES", dict(hf_config.ARCHITECTURES))
    register_architecture("MyForCausalLM", lambda config: parse_hf_config(tiny_config()).replace(family="mine"))
    assert parse_hf_config({"architectures": ["MyForCausalLM"]}).family == "mine"


@pytest.mark.parametrize("value", [[], None, "llama"])
def test_a_config_that_is_no_object(value):
    with pytest.raises(UnsupportedModelError, match=re.escape("must be an object")):
        parse_hf_config(value)


def test_parsing_does_not_import_jax():
    code = (
        "import sys, llmjax.model.hf_config, llmjax.model.checkpoint.describe;"
        "print([name for name in ('jax', 'flax', 'orbax', 'transformers', 'gguf') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
