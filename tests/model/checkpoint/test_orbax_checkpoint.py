"""llmjax's own checkpoints: written whole or not at all, damage named."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest
from fake_checkpoints import random_weights, tiny_config, write_hf

from llmjax.errors import ModelError, StoreError
from llmjax.model.checkpoint.describe import describe
from llmjax.model.checkpoint.load import load_model
from llmjax.model.checkpoint.orbax import save_model


def test_orbax_is_written_whole_or_not_at_all(tmp_path):
    config = tiny_config(rope_scaling={"rope_type": "yarn", "factor": 2.0}, num_hidden_layers=11)
    model = load_model(path=write_hf(tmp_path / "hf", config, random_weights(config)))
    target = tmp_path / "saved"
    broken = {**model.params, "lm_head": {"weight": jnp.zeros((3, 3))}}
    with pytest.raises(ModelError, match=r"1 parameters have another shape than the config says: lm_head.weight"):
        save_model(target, broken, model.config)
    with pytest.raises(ModelError, match=r"1 parameters are missing: lm_head.weight"):
        save_model(target, {k: v for k, v in model.params.items() if k != "lm_head"}, model.config)
    with pytest.raises(StoreError, match="cannot write the model"):
        save_model(tmp_path / "absent" / "saved", model.params, model.config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    save_model(target, model.params, model.config, eos_token_ids=(4, 5))
    with pytest.raises(StoreError, match="exists already"):
        save_model(target, model.params, model.config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "saved"]
    loaded = load_model(path=target, dtype="bfloat16")
    assert loaded.config == model.config.replace(dtype="bfloat16")
    assert loaded.eos_token_ids == (4, 5)
    assert loaded.params["embed"]["weight"].dtype == jnp.bfloat16
    assert loaded.params["final_norm"]["weight"].dtype == jnp.float32
    facts = describe(path=target)
    assert (facts["kind"], facts["config"]) == ("orbax", model.config)


def test_damaged_orbax_directory_is_named(tmp_path):
    config = tiny_config(num_hidden_layers=1)
    model = load_model(path=write_hf(tmp_path / "hf", config, random_weights(config)))
    save_model(tmp_path / "saved", model.params, model.config)
    source = tmp_path / "saved" / "config.json"
    content = json.loads(source.read_text())
    source.write_text(json.dumps({**content, "config": {**content["config"], "num_layers": 2, "sliding_windows": []}}))
    with pytest.raises(ModelError, match=r"saved/params: 6 parameters are missing: layers.1.attention.out.weight"):
        load_model(path=tmp_path / "saved")
    source.write_text(json.dumps({**content, "config": {"unknown": 1}}))
    with pytest.raises(ModelError, match=r"config.json: damaged"):
        load_model(path=tmp_path / "saved")
    source.write_text(json.dumps({**content, "version": 9}))
    with pytest.raises(ModelError, match="version 9 is not supported"):
        load_model(path=tmp_path / "saved")
    source.write_text(json.dumps(content))
    for file in (tmp_path / "saved" / "params").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    with pytest.raises(ModelError, match="damaged orbax checkpoint"):
        load_model(path=tmp_path / "saved")
