"""int8 models on their way through files: bit for bit, and everything refused that would be computed differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fake_checkpoints import random_weights, tiny_config, write_hf
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIGS, random_params

from llmjax.errors import ConfigError, ModelError, StoreError, UnsupportedModelError
from llmjax.model.checkpoint.describe import describe
from llmjax.model.checkpoint.export import export_safetensors
from llmjax.model.checkpoint.hf_export import hf_config
from llmjax.model.checkpoint.load import load_model, param_structs
from llmjax.model.checkpoint.orbax import save_model
from llmjax.model.config import ModelConfig, RopeScaling
from llmjax.model.hf_config import parse_hf_config
from llmjax.model.param_spec import param_bytes
from llmjax.model.quantization import Quantization
from llmjax.quantization.quantize import plan_quantization, quantize_params
from pallas_kernels import tuning
from pallas_kernels.quantized import QuantizedTensor, pack


def quantised(name: str = "qwen2", scheme: Any = "w8a8", dtype: str = "bfloat16", **plan: Any) -> tuple[Any, ModelConfig]:
    config = CONFIGS[name].replace(dtype=dtype)
    return quantize_params(random_params(config), config, plan_quantization(config, scheme, **plan))


def is_int8(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedTensor)


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


MIXED = {"keep": {"mlp.down": "float32", "layers.1.mlp": "bfloat16", "embeddings": "float32", "head": "int8"}}


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_round_trips_are_exact(scheme: str, tmp_path: Path) -> None:
    params, config = quantised(scheme=scheme, **MIXED)
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "merges.txt").write_text("x")
    save_model(tmp_path / "orbax", in_kernel_order(params), config, eos_token_ids=(4,))
    export_safetensors(tmp_path / "hf", in_kernel_order(params), config, eos_token_ids=(4,), files_from=tmp_path / "from")
    assert (tmp_path / "hf" / "merges.txt").read_text() == "x"
    for folder in ("orbax", "hf"):
        loaded = load_model(path=tmp_path / folder, dtype="bfloat16")
        assert (loaded.config, loaded.eos_token_ids) == (config, (4,))
        assert_same(loaded.params, params)
        facts = describe(path=tmp_path / folder)
        assert facts["config"] == config
        assert facts["tensor_types"].keys() >= {"int8" if folder == "orbax" else "I8"}
    wide = load_model(path=tmp_path / "orbax", dtype="float32", wait=False).params.result()
    assert wide["layers"][0]["attention"]["qkv"]["weight"].qvalue.dtype == jnp.int8
    assert wide["layers"][1]["mlp"]["down"]["weight"].dtype == jnp.bfloat16  # as planned, whatever it is loaded in
    assert wide["layers"][1]["attention"]["qkv"]["bias"].dtype == jnp.float32
    with pytest.raises(StoreError, match="exists already"):
        export_safetensors(tmp_path / "hf", params, config)


def test_the_exported_layout(tmp_path: Path) -> None:
    params, config = quantised("llama", "w8a8", keep={"layers.1.mlp": "bfloat16"})
    export_safetensors(tmp_path / "out", params, config)
    tensors = load_file(tmp_path / "out" / "model.safetensors")  # the format's own library reads it
    k_proj = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert (k_proj.dtype, k_proj.shape) == (np.int8, (32, 48))
    np.testing.assert_array_equal(k_proj, np.asarray(params["layers"][0]["attention"]["qkv"]["weight"].qvalue)[64:96])
    scale = tensors["model.layers.0.self_attn.k_proj.weight_scale"]
    assert (scale.dtype, scale.shape) == (np.float32, (32, 1))
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    section = content["quantization_config"]
    assert section["ignore"] == [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")] + ["lm_head"]
    assert section["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    assert section["format"] == "int-quantized"


def test_what_cannot_be_exported_or_saved_is_named(tmp_path: Path) -> None:
    params, config = quantised(keep={"embeddings": "int8"})
    with pytest.raises(ModelError, match="an embedding in int8 has no place"):
        export_safetensors(tmp_path / "out", params, config)
    params, config = quantised()
    with pytest.raises(ModelError, match=r"layers.0.attention.qkv.weight should be bfloat16\[128, 48\]"):
        export_safetensors(tmp_path / "out", params, config.replace(quantization=None))
    with pytest.raises(ModelError, match=r"8 parameters are missing: layers.0.attention.out.weight"):
        save_model(tmp_path / "out", params, config.replace(quantization=None))
    with pytest.raises(StoreError, match="nowhere: is no directory"):
        export_safetensors(tmp_path / "out", params, config, files_from=tmp_path / "nowhere")
    with pytest.raises(ModelError, match="family 'llama' cannot say qkv_bias"):
        hf_config(CONFIGS["llama"].replace(qkv_bias=True), ())
    with pytest.raises(ModelError, match="rope scaling 'factors' is not supported"):
        hf_config(CONFIGS["llama"].replace(rope_scaling=RopeScaling(kind="factors", frequency_factors=(1.0,) * 8)), ())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_says_what_it_was_made_from(name: str) -> None:
    config = CONFIGS[name]
    if name == "llama-dynamic":  # a config.json stretches from the length that it declares
        config = config.replace(max_positions=48)
    content = json.loads(json.dumps(hf_config(config, (1, 2))))
    assert parse_hf_config(content).replace(num_tokens=config.num_tokens) == config


def compressed(folder: Path, *, per_tensor: bool = False, **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint as llm-compressor writes one: (its directory, what its linears stand for)."""
    config = tiny_config("qwen2", torch_dtype="bfloat16")
    weights, stored, meant = random_weights(config), {}, {}
    for name, value in weights.items():
        stored[name] = value.astype(ml_dtypes.bfloat16)
        if "_proj.weight" in name:
            largest = np.abs(value).max() if per_tensor else np.abs(value).max(1, keepdims=True)
            scale = np.asarray(largest / 127.5, ml_dtypes.bfloat16).reshape((1,) if per_tensor else (-1, 1))
            qvalue = np.clip(np.round(value / scale.astype(np.float32)), -128, 127)
            stored[name], stored[f"{name}_scale"] = qvalue.astype(np.int8), scale
            meant[name] = qvalue * scale.astype(np.float64)
    number = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "actorder": None, "observer": "minmax"}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "tensor" if per_tensor else "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    section = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"], "kv_cache_scheme": None,
        "config_groups": {"group_0": group}, "quantization_status": "compressed", "global_compression_ratio": 1.4,
    }  # fmt: skip
    for key, value in changes.items():
        node, *parts = key.split("__")
        at = {"section": section, "group": group, "weights": group["weights"], "inputs": group["input_activations"]}[node]
        at["__".join(parts)] = value
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    save_file(stored, folder / "model.safetensors")
    return folder, meant


@pytest.mark.parametrize("per_tensor", [False, True])
def test_a_compressed_tensors_checkpoint_is_read(per_tensor: bool, tmp_path: Path) -> None:
    folder, meant = compressed(tmp_path / "ct", per_tensor=per_tensor)
    loaded = load_model(path=folder)
    assert loaded.config.quantization is not None
    assert loaded.config.quantization.scheme == "w8a8"
    assert len(loaded.config.quantization.weights) == 8
    layer = loaded.params["layers"][1]
    for leaf, names in (
        (layer["attention"]["qkv"]["weight"], ("self_attn.q", "self_attn.k", "self_attn.v")),
        (layer["mlp"]["down"]["weight"], ("mlp.down",)),
    ):
        want = np.concatenate([meant[f"model.layers.1.{name}_proj.weight"] for name in names])
        np.testing.assert_array_equal(np.asarray(leaf.qvalue, np.float64) * np.asarray(leaf.scale, np.float64)[:, None], want)
    assert not isinstance(loaded.params["lm_head"]["weight"], QuantizedTensor)
    weight_only, _ = compressed(tmp_path / "w8a16", group__input_activations=None)
    assert load_model(path=weight_only, wait=False).config.quantization.scheme == "w8a16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"section__format": "pack-quantized"}, "format 'pack-quantized', only int-quantized is read"),
        ({"section__config_groups": {}}, "no config_groups"),
        ({"section__kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"section__sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config 'sparse-24-bitmask'"),
        ({"weights__num_bits": 4}, "group_0.weights: 4 bits of type 'int', only 8-bit int is read"),
        ({"weights__type": "float"}, "8 bits of type 'float'"),
        ({"weights__symmetric": False}, "group_0.weights: asymmetric"),
        ({"weights__strategy": "group"}, "strategy 'group', only channel or tensor is read"),
        ({"weights__group_size": 128}, "group_size 128"),
        ({"group__weights": None}, "group_0.weights is missing"),
        ({"inputs__dynamic": False}, "group_0.input_activations: static scales"),
        ({"inputs__strategy": "tensor"}, "strategy 'tensor', only token is read"),
        ({"inputs__symmetric": False}, "group_0.input_activations: asymmetric"),
        ({"group__output_activations": {"num_bits": 8}}, "output_activations"),
    ],
)
def test_what_would_be_computed_differently_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder, _ = compressed(tmp_path / "ct", **changes)
    with pytest.raises(UnsupportedModelError, match=rf"ct: config.json: quantization_config \(compressed-tensors\): .*{message}"):
        load_model(path=folder)


def test_damaged_int8_tensors_are_named(tmp_path: Path) -> None:
    folder, _ = compressed(tmp_path / "ct")
    good = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"

    def loads(**changes: Any) -> None:
        tensors = {key: value for key, value in (good | changes).items() if value is not None}
        save_file(tensors, folder / "model.safetensors")
        load_model(path=folder)

    with pytest.raises(ModelError, match=f"1 of 41 tensors are missing: {name}_scale"):
        loads(**{f"{name}_scale": None})
    with pytest.raises(ModelError, match=rf"{name}_scale is \[8, 2\], a scale for each of 32 rows or one for all fits"):
        loads(**{f"{name}_scale": np.ones((8, 2), np.float32)})
    for bad in (np.nan, -1.0, np.inf):
        with pytest.raises(ModelError, match=f"{name}_scale has a scale that is NaN, infinite or negative"):
            loads(**{f"{name}_scale": np.full((32, 1), bad, np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"ct: config.json: .*some are int8 and some are not"):
        loads(**{name: np.ones((32, 48), np.float32)})
    for unscaled in (name, "lm_head.weight"):
        floats = {key: np.asarray(value, np.float32) for key, value in good.items() if key.endswith(".weight")}
        with pytest.raises(UnsupportedModelError, match=r"weight_scale without an int8 weight of this model \(\d+ like it\)"):
            loads(**(floats if unscaled == name else {f"{unscaled}_scale": np.ones(1, np.float32)}))
    with pytest.raises(UnsupportedModelError, match=f"tensor {name}_zero_point"):
        loads(**{f"{name}_zero_point": np.zeros((32, 1), np.int8)})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "llmjax": {"weights": 3}}))
    with pytest.raises(UnsupportedModelError, match="llmjax is damaged"):
        loads()
    for own, message in (
        ({"num_tokens": 400, "weights": {}}, "400 tokens do not fit 301 vocabulary rows"),
        ({"num_tokens": 300, "weights": {"lm_head.weight": "float8"}}, "lm_head.weight in 'float8'"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, "llmjax": own}))
        with pytest.raises(UnsupportedModelError, match=f"ct: .*{message}"):
            loads()


@pytest.mark.parametrize("way", ["orbax", "hf", "random", "quantize"])
def test_weights_lie_on_a_gpu_as_shapes_say(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed where sixteen divides the columns, in their own order in files; programs are compiled from the shapes alone."""
    config = CONFIGS["qwen2"].replace(dtype="bfloat16", mlp_size=88)
    plan = plan_quantization(config, "w8a8", keep={"head": "int8", "embeddings": "int8" if way == "random" else "float32"})
    original = random_params(config)
    params, target = quantize_params(original, config, plan)
    save = save_model if way == "orbax" else export_safetensors
    if way in ("orbax", "hf"):
        save(tmp_path / "cpu", params, target)
    monkeypatch.setattr(tuning, "target", lambda: "a GPU")
    if way == "quantize":
        loaded, given = quantize_params(original, config, plan)
    else:
        source = {"random": config, "quantization": plan} if way == "random" else {"path": tmp_path / "cpu"}
        model = load_model(**source, dtype="bfloat16")
        loaded, given = model.params, model.config
    assert given == target
    structs = param_structs(given)
    assert jax.tree.structure(loaded) == jax.tree.structure(structs)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(loaded)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(structs)
    ]
    mlp = loaded["layers"][1]["mlp"]
    assert (mlp["gate_up"]["weight"].packed, mlp["down"]["weight"].packed) == (True, False)
    if way == "random":
        return
    assert_same(loaded, in_kernel_order(params))
    if way != "quantize":
        save(tmp_path / "gpu", loaded, given)
        monkeypatch.undo()
        assert_same(load_model(path=tmp_path / "gpu", dtype="bfloat16").params, params)


def in_kernel_order(params: Any) -> Any:
    return jax.tree.map(lambda leaf: pack(leaf) if is_int8(leaf) and leaf.shape[1] % 16 == 0 else leaf, params, is_leaf=is_int8)


def test_a_float_model_is_exported_with_the_ids_its_tokenizer_knows(tmp_path: Path) -> None:
    config = CONFIGS["qwen2"]
    assert config.num_tokens < config.vocab_size
    params = random_params(config)
    export_safetensors(tmp_path / "out", params, config)
    loaded = load_model(path=tmp_path / "out", dtype="float32")
    assert loaded.config == config
    assert_same(loaded.params, params)


def test_random_int8_weights_and_their_sizes(tmp_path: Path) -> None:
    config = CONFIGS["qwen2"]
    plan = plan_quantization(config, "w8a16")
    loaded = load_model(random=config, dtype="bfloat16", quantization=plan)
    assert loaded.config.quantization == plan
    structs = param_structs(loaded.config)
    assert jax.tree.structure(structs) == jax.tree.structure(loaded.params)
    assert all(leaf.dtype == struct.dtype and leaf.shape == struct.shape
               for leaf, struct in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(structs), strict=True))  # fmt: skip
    assert param_bytes(loaded.config) == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    linear = loaded.params["layers"][1]["mlp"]["gate_up"]["weight"]
    values = np.unique(np.asarray(linear.qvalue))
    assert values.min() == -127
    assert values.max() == 127
    assert len(values) == 255
    assert float(linear.scale[0]) == pytest.approx(1e-3 / 127)
    folder = write_hf(tmp_path / "hf", tiny_config(), random_weights(tiny_config()))
    other = Quantization("w8a16", (("layers.9.mlp.down.weight", "int8"),))
    with pytest.raises(ConfigError, match=r"the model has no layers.9.mlp.down.weight"):
        load_model(random=config, quantization=other)
    with pytest.raises(ConfigError, match="quantization is for random weights"):
        load_model(path=folder, quantization=plan)
