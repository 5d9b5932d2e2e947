"""Random weights: made on the device, by few programs, the same for the same seed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_checkpoints import tiny_config

from llmjax.errors import UnsupportedModelError
from llmjax.model.checkpoint import random
from llmjax.model.checkpoint.load import load_model
from llmjax.model.hf_config import parse_hf_config
from llmjax.model.param_spec import iter_params

CONFIG = parse_hf_config(tiny_config("qwen2"))


def test_tree_values_and_dtypes():
    model = load_model(random=CONFIG, dtype="bfloat16", seed=3, scale=0.5)
    assert (model.kind, model.path, model.eos_token_ids, model.config.dtype) == ("random", None, (), "bfloat16")
    for path, shape, dtype in iter_params(model.config):
        leaf = model.params
        for part in path:
            leaf = leaf[part]
        assert (leaf.shape, str(leaf.dtype)) == (shape, dtype)
        values = np.asarray(leaf, np.float32)
        if "norm" in str(path[-2]):
            assert (values == 1).all()
        elif path[-1] == "bias":
            assert (values == 0).all()
        else:
            assert np.abs(values).max() <= 0.5
            assert values.std() == pytest.approx(1 / np.sqrt(12), rel=0.05)


def test_seed_decides_and_leaves_differ():
    first, again, other = (load_model(random=CONFIG, seed=seed).params for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embed"]["weight"], other["embed"]["weight"])
    assert not np.array_equal(first["embed"]["weight"], first["lm_head"]["weight"])
    assert not np.array_equal(first["layers"][0]["mlp"]["down"]["weight"], first["layers"][1]["mlp"]["down"]["weight"])
    assert jnp.abs(first["embed"]["weight"]).max() <= random.DEFAULT_SCALE


def test_one_program_a_distinct_shape():
    config = CONFIG.replace(num_layers=6, sliding_windows=(), mlp_size=80)
    random._uniform.clear_cache()
    random.random_params(config)
    shapes = {shape for path, shape, _ in iter_params(config) if path[-1] == "weight" and not str(path[-2]).endswith("norm")}
    assert random._uniform._cache_size() == len(shapes) == 5


def test_unknown_preset_lists_the_known():
    with pytest.raises(UnsupportedModelError, match=r"'gpt-9' is not known; choose one of llama-8b, qwen2.5-1.5b"):
        load_model(random="gpt-9")
