"""The same weights through every format give the same tree; missing, wrong and damaged files are named."""

from __future__ import annotations

import json
import os
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_checkpoints import bigram_model, chain_logits, random_weights, tiny_config, write_gguf, write_hf
from safetensors.numpy import load_file, save_file

from llmjax.errors import ConfigError, ModelError, UnsupportedModelError
from llmjax.model.checkpoint.describe import describe
from llmjax.model.checkpoint.load import load_model
from llmjax.model.checkpoint.orbax import save_model
from llmjax.model.param_spec import iter_params


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same(first, second):
    first, second = flat(first), flat(second)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        np.testing.assert_array_equal(value, second[name], err_msg=name)


VARIANTS = {
    "llama": tiny_config(),
    "llama 9 heads on 3": tiny_config(num_attention_heads=9, num_key_value_heads=3),
    "llama tied": tiny_config(tie_word_embeddings=True),
    "llama biases": tiny_config(attention_bias=True, mlp_bias=True),
    "llama head_dim 10": tiny_config(head_dim=10),
    "mistral window": tiny_config("mistral", sliding_window=8),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_safetensors_gguf_and_orbax_agree(name, tmp_path):
    config = VARIANTS[name]
    weights = random_weights(config)
    hf = load_model(path=write_hf(tmp_path / "hf", config, weights))
    sharded = load_model(path=write_hf(tmp_path / "sharded", config, weights, shards=3))
    metadata = {"llama.attention.sliding_window": 8} if config.get("sliding_window") else {}
    packed = load_model(path=write_gguf(tmp_path / "m.gguf", config, weights, metadata=metadata))
    save_model(tmp_path / "orbax", hf.params, hf.config, eos_token_ids=hf.eos_token_ids)
    own = load_model(path=tmp_path / "orbax")

    assert (hf.kind, sharded.kind, packed.kind, own.kind) == ("safetensors", "safetensors", "gguf", "orbax")
    for other in (sharded, packed, own):
        assert_same(hf.params, other.params)
        assert other.eos_token_ids == hf.eos_token_ids == (2,)
    assert own.config == sharded.config == hf.config
    family = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    assert packed.config.replace(norm_eps=1e-5) == hf.config.replace(family=family)
    assert packed.config.norm_eps == pytest.approx(1e-5, rel=1e-6)
    for path, shape, dtype in iter_params(hf.config):
        leaf = hf.params
        for part in path:
            leaf = leaf[part]
        assert isinstance(leaf, jax.Array)
        assert (leaf.shape, str(leaf.dtype)) == (shape, dtype)


def test_rows_are_stacked_in_order(tmp_path):
    config = VARIANTS["llama biases"]
    weights = random_weights(config)
    layer = load_model(path=write_hf(tmp_path, config, weights)).params["layers"][1]
    prefix = "model.layers.1."
    for kind in ("weight", "bias"):
        rows = [weights[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        np.testing.assert_array_equal(layer["attention"]["qkv"][kind], np.concatenate(rows))
        rows = [weights[f"{prefix}mlp.{name}_proj.{kind}"] for name in ("gate", "up")]
        np.testing.assert_array_equal(layer["mlp"]["gate_up"][kind], np.concatenate(rows))
        np.testing.assert_array_equal(layer["attention"]["out"][kind], weights[f"{prefix}self_attn.o_proj.{kind}"])
        np.testing.assert_array_equal(layer["mlp"]["down"][kind], weights[f"{prefix}mlp.down_proj.{kind}"])


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_are_cast_one_by_one_and_norms_stay_float32(stored, dtype, tmp_path):
    config = tiny_config(num_hidden_layers=1, torch_dtype=stored)
    weights = random_weights(config)
    model = load_model(path=write_hf(tmp_path, config, weights, dtype=stored), dtype=dtype)
    assert model.config.dtype == dtype
    expected = weights["model.embed_tokens.weight"].astype(jnp.dtype(stored)).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(model.params["embed"]["weight"], expected)
    assert model.params["embed"]["weight"].dtype == dtype
    assert model.params["final_norm"]["weight"].dtype == jnp.float32
    assert model.params["layers"][0]["attention_norm"]["weight"].dtype == jnp.float32


def test_on_cpu_float32_is_the_default(tmp_path):
    config = tiny_config(torch_dtype="bfloat16")
    assert load_model(path=write_hf(tmp_path, config, random_weights(config), dtype="bfloat16")).config.dtype == "float32"
    with pytest.raises(UnsupportedModelError, match="dtype 'int8'"):
        load_model(path=tmp_path, dtype="int8")


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantised_gguf_matches_quantised_weights(quant, family, tmp_path):
    import gguf

    config = tiny_config(family, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    weights = random_weights(config)
    kind = gguf.GGMLQuantizationType[quant]
    rounded = {
        name: value if value.ndim == 1 else gguf.dequantize(gguf.quantize(value, kind), kind) for name, value in weights.items()
    }
    packed = load_model(path=write_gguf(tmp_path / "m.gguf", config, weights, quant=quant))
    assert_same(packed.params, load_model(path=write_hf(tmp_path / "hf", config, rounded)).params)


def test_progress_reaches_all_bytes(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    calls = []
    load_model(path=write_hf(tmp_path, config, weights, shards=2), progress=lambda done, total: calls.append((done, total)))
    total = sum(value.nbytes for value in weights.values())
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    assert len(calls) == len(list(iter_params(load_model(path=tmp_path).config)))


def test_bigram_logits_are_the_table(tmp_path):
    table = chain_logits({1: 2, 2: 3, 3: 1}, 20, default=4)
    config, weights = bigram_model(table, scale=3.0)
    params = load_model(path=write_hf(tmp_path, config, weights)).params
    x = np.asarray(params["embed"]["weight"])
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-8)
    np.testing.assert_allclose(normed @ np.asarray(params["lm_head"]["weight"]).T, table, atol=1e-4)


# Tied embeddings (B36)


def test_tied_model_needs_no_head(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    model = load_model(path=write_hf(tmp_path, config, random_weights(config)))
    assert model.config.tie_embeddings
    assert "lm_head" not in model.params


def test_tied_model_ignores_a_stored_head(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(tiny_config())
    assert "lm_head" not in load_model(path=write_hf(tmp_path, config, weights)).params


def test_untied_model_without_a_head_is_an_error_that_names_it(tmp_path):
    weights = random_weights(tiny_config(tie_word_embeddings=True))
    with pytest.raises(ModelError, match=r"1 of 21 tensors are missing: lm_head\.weight"):
        load_model(path=write_hf(tmp_path, tiny_config(), weights))


# Missing and damaged files (B40)


def test_missing_shards_are_listed_with_bytes(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, config, random_weights(config), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    total = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    message = rf"1 of 3 shards are missing: model-00002-of-00003.safetensors \(7 tensors\); \d+ bytes are there of {total}"
    with pytest.raises(ModelError, match=message):
        load_model(path=tmp_path)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"2 of 3 shards are missing: model-00002.*model-00003"):
        load_model(path=tmp_path)


def test_a_tensor_missing_from_its_shard_is_named_even_if_another_has_it(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, config, random_weights(config), shards=2)
    first, second = (tmp_path / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    ours, theirs = load_file(first), load_file(second)
    name = "model.embed_tokens.weight"
    save_file({**theirs, name: ours.pop(name)}, second)
    save_file(ours, first)
    with pytest.raises(ModelError, match=r"not in the shard the index names: model.embed_tokens.weight \(in model-00001"):
        load_model(path=tmp_path)


def test_the_index_decides_which_copy_is_taken(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    write_hf(tmp_path, config, weights, shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), "model.embed_tokens.weight": np.zeros((3, 3), np.float32)}, second)
    np.testing.assert_array_equal(load_model(path=tmp_path).params["embed"]["weight"], weights["model.embed_tokens.weight"])


def test_all_missing_tensors_are_listed_at_once(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        del weights[name]
    with pytest.raises(ModelError, match=r"2 of 21 .*: model.layers.1.mlp.up_proj.weight, model.norm.weight"):
        load_model(path=write_hf(tmp_path, config, weights))


def test_wrong_shape_is_named_with_both_shapes(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 48), np.float32)
    message = r"model.layers.0.self_attn.k_proj.weight is \[16, 48\], the config says \[32, 48\]"
    with pytest.raises(ModelError, match=message):
        load_model(path=write_hf(tmp_path, config, weights))


def test_harmless_extra_tensors_are_fine_but_parameters_of_a_layer_are_not(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    weights["model.layers.2.mlp.up_proj.weight"] = np.zeros(8, np.float32)  # a layer the config does not have
    weights["extra.weight"] = np.zeros(8, np.float32)
    load_model(path=write_hf(tmp_path, config, weights))
    weights["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    with pytest.raises(ModelError, match=r"would change results: model.layers.0.self_attn.q_proj.bias"):
        load_model(path=write_hf(tmp_path, config, weights))


@pytest.mark.parametrize("cut", [1, 1000])
def test_truncated_safetensors_is_named_with_bytes(cut, tmp_path):
    config = tiny_config()
    file = write_hf(tmp_path, config, random_weights(config)) / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - cut)
    with pytest.raises(ModelError, match=rf"model.safetensors: truncated .* needs {size} bytes, the file has {size - cut}"):
        load_model(path=tmp_path)


BAD_HEADERS = {
    "empty": b"",
    "length beyond the file": struct.pack("<Q", 2**40) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"{..}",
    "deep JSON": struct.pack("<Q", 200000) + b"[" * 200000,
    "no object": struct.pack("<Q", 2) + b"[]",
    "no dtype": struct.pack("<Q", 8) + b'{"a":{}}',
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_damaged_safetensors_header(name, tmp_path):
    write_hf(tmp_path, tiny_config(), {})
    (tmp_path / "model.safetensors").write_bytes(BAD_HEADERS[name])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(path=tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**50]},
        {"dtype": "F32", "shape": 4, "data_offsets": [0, 16]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
    ],
)
def test_impossible_safetensors_entries(entry, tmp_path):
    write_hf(tmp_path, tiny_config(), {})
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(path=tmp_path)


def test_integer_weights_are_refused(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    write_hf(tmp_path, config, weights)
    save_file({**weights, "model.norm.weight": np.ones(48, np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"'model\.norm\.weight' is I8"):
        load_model(path=tmp_path)


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "", 7])
def test_an_index_may_not_leave_its_directory(shard, tmp_path):
    write_hf(tmp_path, tiny_config(), {}, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelError, match="not the name of a file in the same directory"):
        load_model(path=tmp_path)


def test_directories_that_are_no_models(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(path=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    with pytest.raises(ModelError, match=r"no model.safetensors and no model.safetensors.index.json"):
        load_model(path=tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\).*save the model as safetensors"):
        load_model(path=tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[1]", b"", b'{"a":' * 100000])
def test_unreadable_config_json(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "params").mkdir()
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(path=tmp_path)


def test_unknown_architecture_is_refused_before_any_weight_is_opened(tmp_path):
    write_hf(tmp_path, tiny_config(architectures=["FooForCausalLM"]), {})
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(
        UnsupportedModelError, match=f"{re.escape(str(tmp_path))}: .*'FooForCausalLM' is not supported; known: Llama"
    ):
        load_model(path=tmp_path)


# What else the directory says


def test_eos_ids_from_all_files(tmp_path):
    config = tiny_config(eos_token_id=[5, 7])
    weights = random_weights(config)
    assert load_model(path=write_hf(tmp_path / "a", config, weights)).eos_token_ids == (5, 7)
    generation = {"eos_token_id": [9, 5, -1, 100000]}
    assert load_model(path=write_hf(tmp_path / "b", config, weights, generation_config=generation)).eos_token_ids == (9, 5, 7)
    config = tiny_config(eos_token_id=None)
    assert load_model(path=write_hf(tmp_path / "c", config, weights, generation_config={"eos_token_id": 3})).eos_token_ids == (3,)
    assert load_model(path=write_hf(tmp_path / "d", config, weights)).eos_token_ids == ()
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id must be a token id"):
        load_model(path=write_hf(tmp_path / "e", config, weights, generation_config={"eos_token_id": "</s>"}))


def test_padding_rows_are_known_from_the_tokenizer(tmp_path):
    config = tiny_config()
    write_hf(tmp_path, config, random_weights(config))
    assert describe(path=tmp_path)["config"].num_tokens == 301
    tokenizer = {"model": {"vocab": {"a": 0, "b": 288}}, "added_tokens": [{"id": 289, "content": "<s>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert describe(path=tmp_path)["config"].num_tokens == 290
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0.0]] * 280}, "added_tokens": []}))
    assert describe(path=tmp_path)["config"].num_tokens == 280


def test_paths_with_spaces_and_other_letters(tmp_path):
    folder = tmp_path / "模型 é" / " tiny"
    config = tiny_config()
    weights = random_weights(config)
    hf = load_model(path=str(write_hf(folder, config, weights, shards=2)))
    packed = load_model(path=str(write_gguf(folder / "模型 tiny.gguf", config, weights)))
    save_model(str(folder / "gespeichert ü"), hf.params, hf.config)
    assert_same(hf.params, packed.params)
    assert_same(hf.params, load_model(path=str(folder / "gespeichert ü")).params)


def test_describe_reads_no_weights(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    facts = describe(path=write_hf(tmp_path / "hf", config, weights, shards=2, dtype="bfloat16"))
    assert (facts["kind"], facts["num_tensors"], facts["tensor_types"]) == ("safetensors", 21, {"BF16": 21})
    assert facts["file_bytes"] == 2 * facts["num_params"] == 2 * sum(value.size for value in weights.values())
    assert facts["eos_token_ids"] == (2,)
    facts = describe(path=write_gguf(tmp_path / "m.gguf", config, weights, quant="F16"))
    assert (facts["kind"], facts["tensor_types"]) == ("gguf", {"F16": 16, "F32": 5})
    assert describe(random="llama-8b")["file_bytes"] == 16_060_522_496 + 65 * 4096 * 2
    with pytest.raises(ConfigError, match="exactly one of path, package, random; got none"):
        describe()
