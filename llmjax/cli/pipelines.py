"""Commands on pipelines: run, validate, plan, explain, schema, config show, new, serve, batch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmjax.cli.options import (
    AsJson,
    DTypeOption,
    File,
    Force,
    Log,
    LogForm,
    MaxContext,
    MaxTokens,
    ModelPath,
    Overlays,
    Package,
    PlatformOption,
    Random,
    Sets,
    Temperature,
    Trace,
    Until,
    check_one_model,
)
from llmjax.cli.terminal import as_json, open_trace, table, warn
from llmjax.errors import ConfigError, LlmjaxError

if TYPE_CHECKING:
    from llmjax.pipeline import Pipeline, RunResult
    from llmjax.pipeline.stages import Front

ENGINE_PROCESS = "llmjax.cli.engine_process"
RECALIBRATION_PROCESS = "llmjax.cli.recalibration_process"


def run(
    file: File,
    sets: Sets = None,
    overlay: Overlays = None,
    until: Until = None,
    force: Force = None,
    frozen: Annotated[bool, typer.Option("--frozen", help="Fail when a stage's key differs from the lock's.")] = False,
    log: Log = None,
    trace: Trace = None,
) -> None:
    """Run a pipeline."""
    run_pipeline(
        file, log=log, sets=sets or (), overlays=overlay or (), until=until, force=force or (), frozen=frozen, trace=trace
    )


def validate(file: File, sets: Sets = None, overlay: Overlays = None) -> None:
    """Check a pipeline file; tells all mistakes at once."""
    from llmjax.pipeline import load, missing_inputs

    pipeline = load(file, overlays=overlay or (), sets=sets or (), unset_env="warn")
    warn([*pipeline.warnings, *missing_inputs(pipeline)])
    typer.echo(f"{pipeline.path}: valid, stages {', '.join(stage.name for stage in pipeline.stages)}")


def plan(
    file: File,
    sets: Sets = None,
    overlay: Overlays = None,
    until: Until = None,
    force: Force = None,
    to_json: AsJson = False,
) -> None:
    """Tell what a run would do, and why."""
    from llmjax.pipeline import load
    from llmjax.pipeline import plan as make_plan

    pipeline = load(file, overlays=overlay or (), sets=sets or (), unset_env="warn")
    warn(pipeline.warnings)
    made = make_plan(pipeline, force=force or (), until=until)
    typer.echo(as_json(made.as_json()) if to_json else "\n".join(made.lines()))


def explain(key: Annotated[str, typer.Argument(help="Such as engine, engine.kv_cache.memory or runtime.seed.")]) -> None:
    """Tell what a key of a pipeline file means."""
    from llmjax.pipeline import explain as explain_key

    typer.echo(explain_key(key).text())


def schema() -> None:
    """Print the JSON Schema of pipeline files, for editors."""
    from llmjax.pipeline import json_schema

    typer.echo(as_json(json_schema()))


def show(
    file: File,
    sets: Sets = None,
    overlay: Overlays = None,
    origin: Annotated[bool, typer.Option("--origin", help="Tell where each value comes from.")] = False,
) -> None:
    """Print a pipeline as it is after merging."""
    from llmjax.pipeline import load
    from llmjax.pipeline import show as show_pipeline

    pipeline = load(file, overlays=overlay or (), sets=sets or (), unset_env="warn")
    warn(pipeline.warnings)
    typer.echo(show_pipeline(pipeline, origin=origin).rstrip("\n"))


def new(name: Annotated[str, typer.Argument(help="Name of the pipeline, and of its file.")] = "pipeline") -> None:
    """Write a first pipeline of your own into this folder."""
    from llmjax.pipeline.starter import write_starter

    for path in write_starter(Path(), name):
        typer.echo(f"wrote {path}")
    typer.echo(f"run it: llmjax run {name}.yaml")


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
    if what is not None and is_pipeline(what):
        if package is not None or random is not None:
            raise ConfigError("give a pipeline or a model, not both")
        file = what
    else:
        model = None if what is None else Path(what)
        check_one_model(model, package, random)
        file = "serve"
        values["stages.model.source.path"] = what  # None takes the file's own path away
    if print_yaml:
        from llmjax.pipeline import load
        from llmjax.pipeline import show as show_pipeline

        pipeline = load(file, overlays=overlay or (), sets=sets or (), values=values, unset_env="warn")
        warn(pipeline.warnings)
        typer.echo(show_pipeline(pipeline).rstrip("\n"))
        return
    run_pipeline(file, log=log, sets=sets or (), overlays=overlay or (), values=values)


def is_pipeline(what: str) -> bool:
    """Whether an argument that may also be a model names a pipeline: a file, or a shipped one no folder has the name of."""
    from llmjax.pipeline import shipped_names

    return what.endswith((".yaml", ".yml")) or (what in shipped_names() and not os.path.exists(what))


def batch(
    input: Annotated[Path, typer.Option("--input", "-i", help="JSON lines: OpenAI batch lines, or prompts.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON lines of results.")],
    errors: Annotated[Path | None, typer.Option(help="A file of its own for failed lines.")] = None,
    model: ModelPath = None,
    package: Package = None,
    random: Random = None,
    resume: Annotated[
        bool | None, typer.Option("--resume/--no-resume", help="Do what an existing output lacks (the default), or refuse.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite an existing output.")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    max_context: MaxContext = None,
    platform: PlatformOption = None,
    dtype: DTypeOption = None,
    sets: Sets = None,
    log: Log = None,
    trace: Trace = None,
) -> None:
    """Answer a file of requests: the shipped pipeline 'batch', with its main values as options."""
    check_one_model(model, package, random)
    if resume is not None and replace:
        raise ConfigError("give --resume or --replace, not both")
    given = {
        "runtime.platform": platform,
        "stages.model.source.package": package,
        "stages.model.source.random.preset": random,
        "stages.model.dtype": dtype,
        "stages.engine.max_context": max_context,
        "stages.batch.input": str(input),
        "stages.batch.output": str(output),
        "stages.batch.errors": None if errors is None else str(errors),
        "stages.batch.resume": "replace" if replace else resume,
        "stages.batch.defaults.max_tokens": max_tokens,
        "stages.batch.defaults.temperature": temperature,
    }
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    values["stages.model.source.path"] = None if model is None else str(model)  # None takes the file's own path away
    run_pipeline("batch", log=log, sets=sets or (), values=values, trace=trace)


def run_pipeline(
    file: str,
    *,
    log: LogForm | None,
    sets: Sequence[str],
    overlays: Sequence[Path] = (),
    values: Mapping[str, Any] | None = None,
    until: str | None = None,
    force: Sequence[str] = (),
    frozen: bool = False,
    trace: Path | None = None,
) -> None:
    """Load and run a pipeline with progress on stderr and its result on stdout; exits with its code.

    One that ends with a server is run by processes of its own.
    """
    from llmjax.pipeline import load
    from llmjax.pipeline.service import final_server, run_service
    from llmjax.telemetry.logs import configure_logging

    values = dict(values or {}) | ({} if log is None else {"runtime.log": log})
    options: dict[str, Any] = {
        "file": file, "log": log, "sets": sets, "overlays": overlays, "values": values, "until": until, "force": force,
        "frozen": frozen, "trace": trace,
    }  # fmt: skip
    with _errors_in(log):
        pipeline = load(file, overlays=overlays, sets=sets, values=values)
        server = final_server(pipeline, until)
        if server is not None:
            configure_logging(pipeline.runtime.log, verbose=True)
            job = {"run": options}
            modules = {"engine_module": ENGINE_PROCESS, "recalibration_module": RECALIBRATION_PROCESS}
            raise typer.Exit(run_service(pipeline, server, engine_job=job, **modules))
    raise typer.Exit(run_here(**options))


def run_here(
    file: str,
    *,
    log: LogForm | None,
    sets: Sequence[str],
    overlays: Sequence[Path],
    values: Mapping[str, Any],
    until: str | None,
    force: Sequence[str],
    frozen: bool,
    trace: Path | None,
    front: Front | None = None,
) -> int:
    """`run_pipeline` in this process; the exit code. With a `front`, that is where the last stage serves."""
    from llmjax.pipeline import load, make_reporter
    from llmjax.pipeline import run as run_stages
    from llmjax.telemetry.logs import configure_logging

    with _errors_in(log):
        pipeline = load(file, overlays=overlays, sets=sets, values=values)
        form = pipeline.runtime.log
        configure_logging(form, verbose=True)
        reporter = make_reporter(form)
        for warning in pipeline.warnings:
            reporter.message("warning", warning)
        with open_trace(trace) as writer:
            result = run_stages(pipeline, until=until, force=force, frozen=frozen, reporter=reporter, trace=writer, front=front)
    if form == "json":
        stages = [dataclasses.asdict(stage) for stage in result.stages]
        typer.echo(as_json({"pipeline": pipeline.name, "exit_code": result.exit_code, "stages": stages}))
    else:
        _show_result(pipeline, result)
    return result.exit_code


def _show_result(pipeline: Pipeline, result: RunResult) -> None:
    """The stages, and what those that give files or a report have to tell."""
    rows = [(stage.name, stage.kind, stage.status, f"{stage.seconds:.1f}", stage.error) for stage in result.stages]
    columns = ("stage", "kind", "status", "seconds", "error")
    table(columns if any(row[-1] for row in rows) else columns[:-1], rows)
    for stage in result.stages:
        if stage.summary and pipeline.stage(stage.name).kind.gives in ("files", "report"):
            figures = {name: value for name, value in stage.summary.items() if not isinstance(value, list)}
            for lines in stage.summary.values():
                if isinstance(lines, list) and lines:
                    table(tuple(lines[0]), [tuple(map(str, line.values())) for line in lines])
            table(("stage", *figures), [(stage.name, *map(str, figures.values()))])


@contextlib.contextmanager
def _errors_in(log: LogForm | None) -> Iterator[None]:
    """With ``--log json``, errors are objects on stderr too."""
    try:
        yield
    except LlmjaxError as error:
        if log != "json":
            raise
        from llmjax.pipeline import make_reporter

        for line in str(error).splitlines():
            make_reporter("json").message("error", line)
        raise typer.Exit(error.exit_code) from None
