"""`llmjax bench`: a load test from the command line, with the options that users of other engines' benches know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llmjax.cli.options import (
    DTypeOption,
    Log,
    LogForm,
    MaxContext,
    Package,
    PlatformOption,
    Random,
    Sets,
    check_one_model,
)
from llmjax.cli.pipelines import is_pipeline, run_pipeline
from llmjax.errors import ConfigError

Source = Annotated[
    str | None, typer.Argument(metavar="MODEL-or-FILE", help="A model folder, a .gguf file, or a pipeline with one engine.")
]
NumPrompts = Annotated[int | None, typer.Option(help="Requests of each run.")]
InputLen = Annotated[int | None, typer.Option(help="Tokens of each prompt; by default log-normal around 256.")]
OutputLen = Annotated[int | None, typer.Option(help="Tokens of each answer; by default log-normal around 128.")]
Dataset = Annotated[Path | None, typer.Option(help='JSONL of requests: texts, or {"prompt": …, "output_tokens": …}.')]
Baselines = Annotated[list[str] | None, typer.Option("--baseline", help="static, fifo or whole_length beside it. Repeatable.")]
SeedOption = Annotated[int | None, typer.Option(help="Of lengths, contents and arrivals.")]
ReportPath = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Where the report goes; by default out/bench.html.")]

STAGE = "bench"


def throughput(
    source: Source = None,
    package: Package = None,
    random: Random = None,
    num_prompts: NumPrompts = 200,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    dataset: Dataset = None,
    baseline: Baselines = None,
    seed: SeedOption = None,
    report: ReportPath = None,
    max_context: MaxContext = None,
    platform: PlatformOption = None,
    dtype: DTypeOption = None,
    sets: Sets = None,
    log: Log = None,
) -> None:
    """All requests at once: how much gets through."""
    profile: dict[str, Any] = {"profile": "burst", "burst": {"size": num_prompts, "every": "1s"}}
    workload = _workload(profile, num_prompts, input_len, output_len, dataset, baseline, seed, report)
    _bench(source, package, random, workload, _engine(max_context, platform, dtype), sets, log)


def latency(
    source: Source = None,
    package: Package = None,
    random: Random = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Clients that each wait for their answer. Repeatable.")] = None,
    request_rate: Annotated[list[float] | None, typer.Option(help="Requests a second, at random times. Repeatable.")] = None,
    burstiness: Annotated[float | None, typer.Option(help="Of --request-rate: 1 is Poisson, below it come clusters.")] = None,
    num_prompts: NumPrompts = 100,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    dataset: Dataset = None,
    baseline: Baselines = None,
    seed: SeedOption = None,
    report: ReportPath = None,
    max_context: MaxContext = None,
    platform: PlatformOption = None,
    dtype: DTypeOption = None,
    sets: Sets = None,
    log: Log = None,
) -> None:
    """Requests of so many clients, or at a rate: how long they take. By default one client."""
    if concurrency and request_rate:
        raise ConfigError("give --concurrency or --request-rate, not both")
    if burstiness is not None and not request_rate:
        raise ConfigError("--burstiness belongs to --request-rate")
    profile: dict[str, Any] = {"profile": "closed", "concurrency": concurrency or [1]}
    if request_rate:
        profile = {"profile": "poisson", "rate": request_rate} | ({} if burstiness is None else {"burstiness": burstiness})
    workload = _workload(profile, num_prompts, input_len, output_len, dataset, baseline, seed, report)
    _bench(source, package, random, workload, _engine(max_context, platform, dtype), sets, log)


def _workload(
    profile: dict[str, Any],
    num_prompts: int | None,
    input_len: int | None,
    output_len: int | None,
    dataset: Path | None,
    baseline: list[str] | None,
    seed: int | None,
    report: Path | None,
) -> dict[str, Any]:
    """The section of the load test."""
    if dataset is not None and input_len is not None:
        raise ConfigError("give --dataset or --input-len, not both: the file has its own prompts")
    unused = {"concurrency": None, "rate": None, "burst": None}  # what a file's own stage says of another profile goes away
    section = {
        "uses": "loadtest",
        **unused,
        **profile,
        "requests": num_prompts,
        "report": str(report or Path("out", "bench.html")),
    }
    if dataset is not None:
        section["prompts"] = {"file": str(dataset)}
    elif input_len is not None:
        section["prompts"] = {"tokens": {"median": input_len}}
    if output_len is not None:
        section["output_tokens"] = {"median": output_len}
    if baseline:
        section["baselines"] = baseline
    if seed is not None:
        section["seed"] = seed
    return section


def _engine(max_context: int | None, platform: str | None, dtype: str | None) -> dict[str, Any]:
    """What was given of the engine; `_bench` knows the stages these belong to."""
    given = {"runtime.platform": platform, "dtype": dtype, "max_context": max_context}
    return {name: value for name, value in given.items() if value is not None}


def _bench(
    source: str | None,
    package: str | None,
    random: str | None,
    workload: dict[str, Any],
    engine: dict[str, Any],
    sets: list[str] | None,
    log: LogForm | None,
) -> None:
    """Run the load test on the engine of a file, or on the shipped pipeline 'bench' with a model of its own."""
    values: dict[str, Any] = {}
    if source is not None and is_pipeline(source):
        if package is not None or random is not None:
            raise ConfigError("give a pipeline, or --package or --random, not both")
        file = source
        model, runs = _stages_of(file, values)
    else:
        check_one_model(None if source is None else Path(source), package, random)
        file, model, runs = "bench", "model", "engine"
        values["stages.model.source.path"] = source  # None takes the file's own path away
        for name, value in (("package", package), ("random.preset", random)):
            if value is not None:
                values[f"stages.model.source.{name}"] = value
    places = {"dtype": f"stages.{model}.dtype", "max_context": f"stages.{runs}.max_context"}
    values |= {places.get(name, name): value for name, value in engine.items()}
    values |= _flat(f"stages.{STAGE}", {**workload, "target": runs})
    run_pipeline(file, log=log, sets=sets or (), values=values)


def _stages_of(file: str, values: dict[str, Any]) -> tuple[str, str]:
    """The model's and the engine's stage of a file; what else it would do with its engine is switched off in `values`."""
    from llmjax.pipeline import load

    pipeline = load(file, unset_env="warn")
    engines = [stage for stage in pipeline.stages if stage.kind.gives == "engine" and stage.when != "never"]
    if len(engines) != 1:
        raise ConfigError(
            f"{file} has {len(engines)} engines and bench takes a file with one: use a loadtest stage with 'target'"
        )
    for stage in pipeline.stages:
        if stage.name == STAGE and stage.kind.name != "loadtest":
            raise ConfigError(f"{file} has a stage '{STAGE}' that is no load test: rename it")
        if stage.kind.gives in ("files", "report", "serve") and stage.name != STAGE:
            values[f"stages.{stage.name}.when"] = "never"
    return engines[0].inputs["model"], engines[0].name


def _flat(prefix: str, section: dict[str, Any]) -> dict[str, Any]:
    """`section` as dotted paths."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _flat(f"{prefix}.{name}", value) if isinstance(value, dict) else {f"{prefix}.{name}": value}
    return found
