"""The command `serve`: a pipeline with a `serve` stage, or the shipped one around a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from llmjax.cli.options import (
    DTypeOption,
    Log,
    MaxContext,
    Overlays,
    Package,
    PlatformOption,
    Random,
    Sets,
    check_one_model,
)
from llmjax.cli.pipelines import run_pipeline
from llmjax.cli.terminal import warn
from llmjax.errors import ConfigError


def serve(
    what: Annotated[
        str | None, typer.Argument(metavar="[FILE|MODEL]", help="A pipeline file, a shipped pipeline's name, or a model.")
    ] = None,
    package: Package = None,
    random: Random = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for every one of this machine.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    served_name: Annotated[list[str] | None, typer.Option(help="Name of the model for clients. Repeatable.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File of keys that clients must send, one a line.")] = None,
    max_context: MaxContext = None,
    platform: PlatformOption = None,
    dtype: DTypeOption = None,
    sets: Sets = None,
    overlay: Overlays = None,
    print_yaml: Annotated[bool, typer.Option("--print-yaml", help="Print the pipeline that would run, and stop.")] = False,
    log: Log = None,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API, until SIGTERM or Ctrl-C."""
    given = {
        "runtime.platform": platform,
        "stages.model.source.package": package,
        "stages.model.source.random.preset": random,
        "stages.model.dtype": dtype,
        "stages.engine.max_context": max_context,
        "stages.serve.host": host,
        "stages.serve.port": port,
        "stages.serve.served_name": served_name or None,
        "stages.serve.api_key_file": None if api_key_file is None else str(api_key_file),
    }
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if what is not None and _is_pipeline(what):
        if package is not None or random is not None:
            raise ConfigError("give a pipeline or a model, not both")
        file = what
    else:
        model = None if what is None else Path(what)
        check_one_model(model, package, random)
        file = "serve"
        values["stages.model.source.path"] = what  # None takes the file's own path away
    if print_yaml:
        from llmjax.pipeline import load, show

        pipeline = load(file, overlays=overlay or (), sets=sets or (), values=values, unset_env="warn")
        warn(pipeline.warnings)
        typer.echo(show(pipeline).rstrip("\n"))
        return
    run_pipeline(file, log=log, sets=sets or (), overlays=overlay or (), values=values)


def _is_pipeline(what: str) -> bool:
    from llmjax.pipeline import shipped_names

    return what.endswith((".yaml", ".yml")) or (what in shipped_names() and not os.path.exists(what))
