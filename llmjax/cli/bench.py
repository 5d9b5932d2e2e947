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
NumPrompts = Annotated[int | None, typer.Option(help="Requests of each run; by default those of the file, or 100.")]
Concurrency = Annotated[list[int] | None, typer.Option(help="Clients that each wait for their answer. Repeatable.")]
RequestRate = Annotated[list[float] | None, typer.Option(help="Requests a second, at random times. Repeatable.")]
Burstiness = Annotated[float | None, typer.Option(help="Of --request-rate: 1 is Poisson, below it come clusters.")]
InputLen = Annotated[int | None, typer.Option(help="Tokens of each prompt; by default log-normal around 256.")]
OutputLen = Annotated[int | None, typer.Option(help="Tokens of each answer; by default log-normal around 128.")]
Dataset = Annotated[Path | None, typer.Option(help='JSONL of requests: texts, or {"prompt": …, "output_tokens": …}.')]
Baselines = Annotated[list[str] | None, typer.Option("--baseline", help="static, fifo or whole_length beside it. Repeatable.")]
SeedOption = Annotated[int | None, typer.Option(help="Of lengths, contents and arrivals.")]
ReportPath = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Where the report goes; by default out/bench.html.")]

STAGE = "bench"
REQUESTS = 100


def throughput(
    source: Source = None,
    package: Package = None,
    random: Random = None,
    num_prompts: NumPrompts = None,
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
    profile: dict[str, Any] = {"profile": "burst", "burst": {"every": "1s"}}
    workload = _workload(profile, num_prompts, input_len, output_len, dataset, baseline, seed, report)
    _bench(source, package, random, workload, _engine(max_context, platform, dtype), sets, log)


def latency(
    source: Source = None,
    package: Package = None,
    random: Random = None,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = None,
    num_prompts: NumPrompts = None,
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
    profile = _profile(concurrency, request_rate, burstiness)
    workload = _workload(profile, num_prompts, input_len, output_len, dataset, baseline, seed, report)
    _bench(source, package, random, workload, _engine(max_context, platform, dtype), sets, log)


def serve(
    base_url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://localhost:8000",
    model: Annotated[str | None, typer.Option(help="The model's name there; by default the first it serves.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Of prompts that are texts: completions or chat.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder or .gguf: random prompts are texts, not ids.")] = None,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    burstiness: Burstiness = None,
    num_prompts: NumPrompts = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    dataset: Dataset = None,
    retries: Annotated[int | None, typer.Option(help="How often a request answered with 429 or 503 is sent again.")] = None,
    seed: SeedOption = None,
    report: ReportPath = None,
    sets: Sets = None,
    log: Log = None,
) -> None:
    """Load any OpenAI-compatible server with streams. A key comes from the variable LLMJAX_API_KEY."""
    profile = _profile(concurrency, request_rate, burstiness)
    workload = _workload(profile, num_prompts, input_len, output_len, dataset, None, seed, report)
    path = None if tokenizer is None else str(tokenizer)
    http = {"model": model, "endpoint": endpoint, "tokenizer": path, "retries": retries}
    given = {name: value for name, value in http.items() if value is not None}
    section = {"requests": REQUESTS, **workload, "target": base_url, "http": given}
    run_pipeline("bench_serve", log=log, sets=sets or (), values=_flat(f"stages.{STAGE}", section))


def _profile(concurrency: list[int] | None, request_rate: list[float] | None, burstiness: float | None) -> dict[str, Any]:
    if concurrency and request_rate:
        raise ConfigError("give --concurrency or --request-rate, not both")
    if burstiness is not None and not request_rate:
        raise ConfigError("--burstiness belongs to --request-rate")
    if not request_rate:
        return {"profile": "closed", "concurrency": concurrency or [1]}
    return {"profile": "poisson", "rate": request_rate} | ({} if burstiness is None else {"burstiness": burstiness})


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
    """The section of the load test: what was given on the command line, and None for what must not stay of a file's own."""
    if dataset is not None and input_len is not None:
        raise ConfigError("give --dataset or --input-len, not both: the file has its own prompts")
    unused = {"concurrency": None, "rate": None, "burst": None}  # what a file's own stage says of another profile goes away
    section = {"uses": "loadtest", **unused, **profile, "report": str(report or Path("out", "bench.html"))}
    if num_prompts is not None:
        section |= {"requests": num_prompts, "duration": None}  # so many, however long they take
    alike = {"sigma": None, "min": None, "max": None}
    if dataset is not None:
        section["prompts"] = {"file": str(dataset), "tokens": None, "shared_prefix": None}
    elif input_len is not None:
        section["prompts"] = {"file": None, "tokens": {"median": input_len, **alike}}
    if output_len is not None:
        section["output_tokens"] = {"median": output_len, **alike}
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
    count = REQUESTS
    if source is not None and is_pipeline(source):
        if package is not None or random is not None:
            raise ConfigError("give a pipeline, or --package or --random, not both")
        file = source
        model, runs, own = _stages_of(file, values)
        count = own or count
    else:
        check_one_model(None if source is None else Path(source), package, random)
        file, model, runs = "bench", "model", "engine"
        values["stages.model.source.path"] = source  # None takes the file's own path away
        for name, value in (("package", package), ("random.preset", random)):
            if value is not None:
                values[f"stages.model.source.{name}"] = value
    places = {"dtype": f"stages.{model}.dtype", "max_context": f"stages.{runs}.max_context"}
    values |= {places.get(name, name): value for name, value in engine.items()}
    section = {"requests": count, **workload, "target": runs}
    if section["profile"] == "burst":
        section["burst"] = {**section["burst"], "size": section["requests"]}
    values |= _flat(f"stages.{STAGE}", section)
    run_pipeline(file, log=log, sets=sets or (), values=values)


def _stages_of(file: str, values: dict[str, Any]) -> tuple[str, str, int | None]:
    """The model's and the engine's stage of a file, and the requests that its own stage `bench` asks for; what else it would do
    with its engine is switched off in `values`."""
    from llmjax.pipeline import load

    pipeline = load(file, unset_env="warn")
    engines = [stage for stage in pipeline.stages if stage.kind.gives == "engine" and stage.when != "never"]
    if len(engines) != 1:
        raise ConfigError(
            f"{file} has {len(engines)} engines and bench takes a file with one: use a loadtest stage with 'target'"
        )
    own: int | None = None
    for stage in pipeline.stages:
        config: Any = stage.config
        if stage.name == STAGE and stage.kind.name == "loadtest" and "requests" in config.model_fields_set:
            own = config.requests
        if stage.name == STAGE and stage.kind.name != "loadtest":
            raise ConfigError(f"{file} has a stage '{STAGE}' that is no load test: rename it")
        if stage.kind.gives in ("files", "report", "serve") and stage.name != STAGE:
            values[f"stages.{stage.name}.when"] = "never"
    return engines[0].inputs["model"], engines[0].name, own


def _flat(prefix: str, section: dict[str, Any]) -> dict[str, Any]:
    """`section` as dotted paths."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        found |= _flat(f"{prefix}.{name}", value) if isinstance(value, dict) else {f"{prefix}.{name}": value}
    return found
