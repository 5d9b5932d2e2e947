"""Pipelines that come with llmjax, by name: package data in a wheel, the `pipelines/` folder in a source tree."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import llmjax
from llmjax.pipeline.tree import ConfigErrors


def shipped_folder() -> Path:
    """Where the shipped pipelines are."""
    package = Path(llmjax.__file__).parent
    data = package / "pipelines_data"
    return data if data.is_dir() else package.parent / "pipelines"


def shipped_names() -> list[str]:
    """Names of the shipped pipelines, sorted."""
    return sorted(path.stem for path in shipped_folder().glob("*.yaml"))


def find_pipeline(name: str | Path) -> Path:
    """The file that `name` means: a path, or the name of a shipped pipeline. Raises `ConfigErrors` when it is neither."""
    text = str(name)
    if os.path.exists(text) or os.sep in text or text.endswith((".yaml", ".yml")) or isinstance(name, Path):
        return Path(text)
    shipped = shipped_names()
    if text in shipped:
        return shipped_folder() / f"{text}.yaml"
    close = difflib.get_close_matches(text, shipped, n=1)
    hint = f"; did you mean '{close[0]}'" if close else ""
    raise ConfigErrors([f"{text}: no such file, and no pipeline of that name is shipped{hint}; shipped: {', '.join(shipped)}"])
