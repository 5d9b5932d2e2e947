"""The command `tune`: a pipeline's engine with a `tune` stage behind it, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmjax.cli.options import File, Log, Overlays, Sets
from llmjax.cli.pipelines import run_here
from llmjax.errors import ConfigError

if TYPE_CHECKING:
    from llmjax.pipeline import Pipeline


def tune(
    file: File,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines of prompts; by default the input of the pipeline's batch stage.")
    ] = None,
    temperatures: Annotated[
        str | None, typer.Option(help="Temperatures of the draft to try, relative to the requests', such as 0.5,0.8,1.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted at a time, instead of the file's; fewer are judged too.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts that are asked.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Tokens of an answer, at most.")] = None,
    engine: Annotated[str | None, typer.Option(help="The engine stage, where several draft.")] = None,
    sets: Sets = None,
    overlay: Overlays = None,
    log: Log = None,
) -> None:
    """Find the best settings of speculative decoding for your own prompts."""
    from llmjax.pipeline import load

    pipeline = load(file, overlays=overlay or (), sets=sets or ())
    name = engine or _only_drafting(pipeline)
    given = {
        "prompts": str(prompts) if prompts is not None else None,
        "temperatures": None if temperatures is None else _numbers(temperatures),
        "limit": limit,
        "output_tokens": output_tokens,
    }
    values: dict[str, Any] = {
        f"stages.{stage.name}": None for stage in pipeline.stages if stage.kind.gives in ("files", "serve", "report")
    }
    values |= {"stages.tune.uses": "tune", "stages.tune.engine": name}
    values |= {f"stages.tune.{field}": value for field, value in given.items() if value is not None}
    if prompts is None:
        values |= _prompts_of(pipeline, name)
    if tokens is not None:
        values[f"stages.{name}.speculative.tokens"] = tokens
    code = run_here(
        file, log=log, sets=sets or (), overlays=overlay or (), values=values, until="tune", force=(), frozen=False, trace=None
    )
    raise typer.Exit(code)


def _only_drafting(pipeline: Pipeline) -> str:
    sections: dict[str, Any] = {stage.name: stage.config for stage in pipeline.stages if stage.kind.gives == "engine"}
    found = [name for name, section in sections.items() if section is not None and section.speculative.method != "off"]
    if not found:
        raise ConfigError(f"{pipeline.path}: no engine stage has speculative decoding: set its speculative.method")
    if len(found) > 1:
        raise ConfigError(f"{pipeline.path}: several engine stages draft ({', '.join(found)}): say which with --engine")
    return found[0]


def _prompts_of(pipeline: Pipeline, engine: str) -> dict[str, Any]:
    """The input of the batch that the engine answers, and its defaults."""
    for stage in pipeline.stages:
        if stage.kind.name == "batch" and stage.inputs.get("engine") == engine:
            config: Any = stage.config
            found = {f"stages.tune.defaults.{name}": value for name, value in config.defaults.as_mapping().items()}
            return {"stages.tune.prompts": str(config.input), **found}
    raise ConfigError(f"{pipeline.path}: no batch stage of '{engine}' has prompts to try: give some with --prompts FILE")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--temperatures are numbers with commas between them, such as 0.5,0.8,1; got {text!r}") from None
