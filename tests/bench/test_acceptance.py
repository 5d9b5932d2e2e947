"""The bench of accepted drafts: figures that can be worked out by hand, of an engine whose drafts are always right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes_text import write_byte_tokenizer
from tiny_models import CONFIGS, random_params

from bench import acceptance
from llmjax.model.checkpoint.load import LoadedModel

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> list[dict[str, Any]]:
    config = CONFIGS["llama"]
    loaded = LoadedModel(config=config, params=random_params(config), path=None, kind="random", eos_token_ids=())
    monkeypatch.setattr(acceptance, "load_model", lambda **options: loaded)
    target, out = str(write_byte_tokenizer(folder, chat_template=TEMPLATE)), folder / "out.json"
    acceptance.main(["--target", target, "--kinds", "json", "--kv-mib", "8", "--json", str(out), *more])
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_a_model_accepts_all_that_it_drafts_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For each number of drafts, also those that have no program of their own; cut rounds at the end do not count."""
    rows = run(monkeypatch, tmp_path, "--draft", "itself", "--tokens", "1,2,3", "--temperatures", "0", "--output", "13")
    assert [row["tokens"] for row in rows] == [1, 2, 3]
    for row in rows:
        tokens = row["tokens"]
        assert row["rounds"] == 2 * (12 // (tokens + 1))  # of two texts; the first token comes with the prompt
        assert (row["a_round"], row["tokens_a_round"]) == (tokens, tokens + 1)
        assert row["accepted"] == row["tested"] == row["found"] == 1


def test_prompt_lookup_counts_rounds_without_a_draft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A random model of 301 tokens says bytes that no prompt has, and little of it again."""
    rows = run(monkeypatch, tmp_path, "--method", "ngram", "--tokens", "2", "--temperatures", "1.0", "--output", "20")
    (row,) = rows
    assert 0 < row["found"] < 1
    assert row["a_round"] < 2 * row["found"]


def test_figures() -> None:
    rounds = [(3, 3), (3, 1), (3, 0), (0, 0)]
    assert acceptance.figures(rounds, 3) == {
        "rounds": 4, "found": 0.75, "a_round": 1.0, "accepted": 1 / 3, "tested": 4 / 7, "tokens_a_round": 2.0,
    }  # fmt: skip
    assert acceptance.figures([], 3)["tokens_a_round"] == 1
