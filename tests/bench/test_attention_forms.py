"""The table of attention's forms compares like with like: naive attention is exact, and the forward is the model's."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, naive_logits, random_params

from bench import attention_forms
from bench.attention_forms import ATTENTIONS, biased_scores, exact, forward, naive_attention
from bench.flash_cases import Form, forms
from llmjax.model.checkpoint.load import LoadedModel

CONFIG = dataclasses.replace(CONFIGS["qwen2"], num_tokens=301)


@pytest.mark.parametrize("form", [*forms(CONFIG).values(), Form(2, window=7), Form(4, slopes=True, bias=5)], ids=str)
@pytest.mark.parametrize("tokens", [1, 33])
def test_every_attention_is_what_float64_says(form: Form, tokens: int) -> None:
    seed = time.time_ns() % 2**31
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(tokens, count, 16) for count in (4, form.kv_heads, form.kv_heads)]
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    options = form.options(4, seed + 1)
    expected = exact(q, k, v, np.arange(tokens), **options)
    for name, attention in ATTENTIONS.items():
        np.testing.assert_allclose(attention(q, k, v, **options), expected, atol=2e-5, err_msg=f"{name}, seed {seed}")


def test_scores_get_their_biases_and_later_keys_are_not_seen() -> None:
    """By hand: two queries, at positions 1 and 3, of four keys."""
    options = {"alibi_slopes": np.array([0.5]), "relative_bias": np.array([[10.0, 20.0]]), "window": 3}
    found = biased_scores(np, np.zeros((1, 2, 4)), np.array([1, 3]), 4, **options)
    assert found.tolist() == [[[19.5, 10.0, -np.inf, -np.inf], [-np.inf, 19.0, 19.5, 10.0]]]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_forward_is_the_models(name: str) -> None:
    params = random_params(CONFIG)
    ids = np.random.default_rng().integers(0, 301, 40).tolist()
    logits = naive_logits(params, ids, CONFIG)[-1]
    (found,) = forward(CONFIG, ATTENTIONS[name], params, jnp.asarray(ids))
    assert logits[found] > logits.max() - 1e-3, ids


def test_naive_attention_rounds_its_weights_as_flash_attention_does() -> None:
    """bfloat16 in, bfloat16 out; both within its rounding."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 3)
    q, k, v = (jax.random.normal(key, (64, heads, 16), jnp.bfloat16) for key, heads in zip(keys, (4, 2, 2), strict=True))
    found = naive_attention(q, k, v)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact(q, k, v, np.arange(64)), atol=0.05)


def test_a_run_prints_forms_and_forwards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS["llama"]
    loaded = LoadedModel(config=config, params=random_params(config), path=None, kind="random", eos_token_ids=())
    monkeypatch.setattr(attention_forms, "load_model", lambda **options: loaded)
    out = tmp_path / "out.json"
    attention_forms.main(["--tokens", "16", "--form-tokens", "32", "--calls", "1", "--json", str(out)])
    first, *rows = json.loads(out.read_text())["rows"]
    assert first["preset"] == "llama-8b"
    assert [row["of"] for row in rows] == [*forms(config), "forward"]
    for row in rows[:-1]:
        assert max(row["flash_error"], row["naive_error"]) < 1e-4, (first, row)
        assert row["of_plain"] > 0
    assert rows[0]["of_plain"] == 1
    assert all(rows[-1][f"{kind}_{figure}"] > 0 for kind in ATTENTIONS for figure in ("ms", "mib"))
    assert "saves_percent" in capsys.readouterr().out
