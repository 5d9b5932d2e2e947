"""The code in docs/own_model.md runs as it stands, is short, and is served exactly."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

DOC = Path(__file__).resolve().parents[2] / "docs" / "own_model.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) < 100
    module = types.ModuleType("own_model")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(code, str(DOC), "exec"), module.__dict__)
    return module.__dict__


def dense_logits(scope: dict[str, Any], params: Any, ids: list[int]) -> np.ndarray:
    """The same decoder with a full score matrix."""
    config, norm = scope["config"], scope["norm"]
    x = params["tokens"][jnp.asarray(ids)] + params["positions"][: len(ids)]
    for layer in params["layers"]:
        q, k, v = (a.reshape(-1, config.num_kv_heads, config.head_dim) for a in jnp.split(norm(x) @ layer["qkv"], 3, axis=-1))
        scores = jnp.einsum("tnh,snh->nts", q, k) * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(np.tri(len(ids), dtype=bool), scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("nts,snh->tnh", weights, v).reshape(len(ids), -1) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
    return np.asarray(norm(x) @ params["tokens"].T)


def test_served_tokens_and_logprobs_equal_the_dense_decoder(names: dict[str, Any]) -> None:
    params = names["llm"].engine.runner.params
    for output in names["outputs"]:
        ids = list(output.prompt_token_ids)
        for token, logprob in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
            logits = dense_logits(names, params, ids)[-1]
            assert token == int(np.argmax(logits))
            assert logprob.chosen.logprob == pytest.approx(float(jax.nn.log_softmax(logits)[token]), abs=1e-4)
            ids.append(token)


def test_new_weights_are_used_and_wrong_ones_refused(names: dict[str, Any]) -> None:
    llm, config = names["llm"], names["config"]
    params = names["init"](config, jax.random.key(1))
    llm.update_params(params)
    (output,) = llm.generate([[1, 2, 3]], names["SamplingParams"](max_tokens=4, temperature=0.0))
    assert output.outputs[0].token_ids[0] == int(np.argmax(dense_logits(names, params, [1, 2, 3])[-1]))
    with pytest.raises(Exception, match=r"tokens.* expected float32\[128, 32\]"):
        llm.update_params(params | {"tokens": jnp.zeros((64, 32))})
