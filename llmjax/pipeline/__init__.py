"""YAML pipelines: read, check, plan and run them. Host only: nothing in here imports JAX before a stage runs.

Importing this package imports neither pydantic nor ruamel.yaml; the first use of a name below does. No module is named like one
of these functions, so that `from llmjax.pipeline import load` is always the function.

API
---
``load(source, *, overlays=(), sets=(), values=None, unset_env="error", environ=None) -> Pipeline``
    `source` is a path or the name of a shipped pipeline. `overlays` are files, `sets` are ``a.b.c=value`` texts read by
    YAML's rules, `values` maps dotted paths to Python values (for command line flags; applied last, None deletes). With
    ``unset_env="warn"`` (validate, plan, show) an unset environment variable is an entry of `Pipeline.warnings`, with
    ``"error"`` (run) an error. Raises `ConfigErrors`, whose `.messages` are all mistakes of all files in one pass, each
    ``file:line:col: path: message``.
``Pipeline``
    `.name`, `.path`, `.runtime` (platform, seed, memory_fraction, log), `.artifacts` (folder), `.warnings`, `.stages` (each
    with `.name`, `.kind.name`, `.config`, `.inputs`, `.needs`, `.when`), `.mask(text)` for texts that may hold secrets.
``missing_inputs(pipeline) -> list[str]``
    One located line for each input file that does not exist: warnings in `validate`, errors in `plan` and `run`.
``plan(pipeline, *, force=(), until=None) -> Plan``
    `.stages`: each with `.name`, `.kind`, `.key` (None when a variable is unset), `.action` ("run", "reuse", "off",
    "unused", "beyond"), `.reasons`; `.as_json() -> dict`, `.lines() -> list[str]` for people.
``run(pipeline, *, until=None, force=(), frozen=False, reporter=None, trace=None) -> RunResult``
    `.exit_code` (0, 2, 3, 4, 5, 130), `.ok`, `.stages` (each with `.name`, `.status`, `.seconds`, `.summary`, `.error`).
    A stage's failure is in the result, not raised; `ConfigErrors` is raised before the first stage for a wrong `until` or
    `force`, a missing input file, or a key that `frozen` refuses.
``show(pipeline, *, origin=False) -> str``
    The merged YAML; with `origin`, each value with the place it came from as a comment. Secrets are masked.
``explain(key) -> Explanation``
    `.key`, `.type`, `.default`, `.doc`, `.children` (pairs of key and doc), `.text()`; `key` is ``engine.kv_cache.memory``,
    ``runtime.seed``, ``batch``, ...
``json_schema() -> dict``
    JSON Schema of a pipeline file, for editors.
``shipped_names() -> list[str]``, ``find_pipeline(name) -> Path``
    Pipelines that come with llmjax.
``make_reporter(log="text", *, stream=None) -> Reporter``
    Progress on stderr: rich on a terminal, one line an event otherwise, JSON lines with ``log="json"``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmjax.pipeline.describe import Explanation as Explanation
    from llmjax.pipeline.describe import explain as explain
    from llmjax.pipeline.describe import json_schema as json_schema
    from llmjax.pipeline.loading import Pipeline as Pipeline
    from llmjax.pipeline.loading import load as load
    from llmjax.pipeline.loading import missing_inputs as missing_inputs
    from llmjax.pipeline.orchestrator import RunResult as RunResult
    from llmjax.pipeline.orchestrator import run as run
    from llmjax.pipeline.planning import Plan as Plan
    from llmjax.pipeline.planning import plan as plan
    from llmjax.pipeline.render import show as show
    from llmjax.pipeline.report import Reporter as Reporter
    from llmjax.pipeline.report import make_reporter as make_reporter
    from llmjax.pipeline.shipped import find_pipeline as find_pipeline
    from llmjax.pipeline.shipped import shipped_names as shipped_names
    from llmjax.pipeline.tree import ConfigErrors as ConfigErrors

_HOMES = {
    "ConfigErrors": "tree",
    "Explanation": "describe",
    "Pipeline": "loading",
    "Plan": "planning",
    "Reporter": "report",
    "RunResult": "orchestrator",
    "explain": "describe",
    "find_pipeline": "shipped",
    "json_schema": "describe",
    "load": "loading",
    "make_reporter": "report",
    "missing_inputs": "loading",
    "plan": "planning",
    "run": "orchestrator",
    "shipped_names": "shipped",
    "show": "render",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
