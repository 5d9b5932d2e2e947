"""Fixtures for pipelines: files in a temporary folder, and stage kinds that need no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import stage_kinds

from llmjax.pipeline import stages

HEAD = "apiVersion: llmjax/v1\nname: test\n"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a YAML file; `head` puts apiVersion and name before it."""

    def write_file(text: str, name: str = "p.yaml", *, head: bool = True) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((HEAD if head else "") + text, "utf-8")
        return path

    return write_file


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> stage_kinds.Log:
    """Registers the kinds of `stage_kinds` for one test, and gives the log they write to."""
    log = stage_kinds.Log()
    for kind in stage_kinds.make(log):
        monkeypatch.setitem(stages._registered, kind.name, kind)
    return log


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is not the folder of the file, so that a mix-up shows."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
