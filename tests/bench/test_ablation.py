"""The ablation compares like with like: every variant computes the same step, and the step is the model's."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, naive_logits, random_params

from bench import ablation
from bench.ablation import State
from llmjax.model.checkpoint.load import LoadedModel

PROMPTS = ([5, 9, 200, 41, 7], [3, 3, 77], [250] * 17)
ARGS = argparse.Namespace(rows=3, context=32, page_size=16, steps=1)


def test_every_variant_is_the_same_step_of_the_model() -> None:
    config = CONFIGS["qwen2"]
    config = dataclasses.replace(config, num_tokens=config.vocab_size, num_layers=1, sliding_windows=config.sliding_windows[:1])
    params = random_params(config)
    expected = [int(np.argmax(naive_logits(params, ids, config)[-1])) for ids in PROMPTS]
    for name, make in ablation.variants(config, params, ARGS).items():
        state, launch, _ = make()
        for tokens, lengths in fed():
            state = launch(State(jnp.asarray(tokens), jnp.asarray(lengths), state.k, state.v))
        assert list(map(int, state.tokens)) == expected, name


def fed() -> Any:
    """Tokens and positions, one launch after the other, padded in front by repeating the first token at position 0."""
    longest = max(map(len, PROMPTS))
    for index in range(longest):
        where = [max(0, index - longest + len(ids)) for ids in PROMPTS]
        yield np.array([ids[i] for ids, i in zip(PROMPTS, where, strict=True)], np.int32), np.array(where, np.int32)


def test_a_run_prints_each_variant_beside_the_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS["llama"]
    loaded = LoadedModel(config=config, params=random_params(config), path=None, kind="random", eos_token_ids=())
    monkeypatch.setattr(ablation, "load_model", lambda **options: loaded)
    out = tmp_path / "out.json"
    ablation.main(
        ["--rows", "2", "--context", "32", "--steps", "2", "--launches", "1", "--only", "contiguous,op by op", "--json", str(out)]
    )
    rows = json.loads(out.read_text())["rows"]
    assert [row["without"] for row in rows] == ["(nothing)", "contiguous", "op by op"]
    assert all(row["step_ms"] > 0 for row in rows)
    assert rows[1]["reported"] == "-10 to -15 % a step"
    assert "without" in capsys.readouterr().out
