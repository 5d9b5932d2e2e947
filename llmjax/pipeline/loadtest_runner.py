"""From a `loadtest` section to a suite, its report on disk, and rows for a terminal. Measuring itself is `llmjax/loadtest`'s."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmjax.errors import ConfigError, StoreError
from llmjax.loadtest import arrivals
from llmjax.loadtest.arrivals import Load
from llmjax.loadtest.http_target import ServerAddress
from llmjax.loadtest.measure import Distribution, ServiceLevels
from llmjax.loadtest.page import render
from llmjax.loadtest.subjects import EngineSubject, ServerSubject, Subject
from llmjax.loadtest.suite import Report, Run, run_suite
from llmjax.loadtest.target import TrafficRequest
from llmjax.loadtest.workload import Lengths, SharedPrefixes, Synthetic, as_texts, check_fits, read_traffic
from llmjax.pipeline.stages import StageContext

if TYPE_CHECKING:
    from llmjax.engine.tokenizer import Tokenizer
    from llmjax.pipeline.stages.loadtest import LengthsSection, LoadtestSection

PROMPTS = Lengths(256, 1.0, 16, 1024)
OUTPUTS = Lengths(128, 0.8, 8, 512)


def run_loadtest(target: Any, context: StageContext[LoadtestSection]) -> Report:
    """Run the suite of a section, and write the report.

    Args:
        target: an `LLM` that nobody else uses, a server (it has a `url`), or None for the URL in the section.

    Raises `ConfigError` for a workload that does not fit the target, `StoreError` for files that cannot be read or written; the
    report's folder is made before anything is sent. An interrupt is told by `Report.interrupted`.
    """
    config = context.config
    path = Path(config.report)
    _check_writable(path)
    subject = _subject(target, config)
    try:
        report = _run(subject, _Traffic(config, subject), path, context)
    finally:
        subject.close()
    for system in subject.systems:
        if system.same_as:
            context.reporter.message("info", f"{context.name}: {system.name} is not run: {system.about}")
    write_report(report, path)
    context.reporter.message("info", f"{context.name}: the report is {path}, its figures {path.with_suffix('.json')}")
    return report


def _run(subject: Subject, traffic: _Traffic, path: Path, context: StageContext[LoadtestSection]) -> Report:
    config = context.config
    first = traffic.requests(0)
    if subject.max_context is not None:
        check_fits(first, subject.max_context)
    return run_suite(
        subject.target,
        lambda index: first if index == 0 else traffic.requests(index),
        title=f"Load test {context.name}",
        facts={**subject.facts, "report": str(path)},
        systems=subject.systems,
        loads=make_loads(config, first),
        levels=ServiceLevels(**{f.name: getattr(config.slo, f.name) for f in dataclasses.fields(ServiceLevels)}),
        demanded=lambda load: config.peak is None or load.concurrency is None or load.concurrency <= config.peak,
        duration=config.duration,
        progress=lambda name, done, total: context.reporter.progress(f"{context.name}: {name}", done, total),
        tell=lambda run: context.reporter.message("info", f"{context.name}: {run.line()}"),
    )


def _subject(target: Any, config: LoadtestSection) -> Subject:
    url = config.target if target is None else getattr(target, "url", None)
    if url is None:
        name = str(getattr(target, "name", None) or "model")
        return EngineSubject(target.engine, config.baselines, static_batch=config.static_batch, name=name)
    http = config.http
    address = ServerAddress(
        url,
        model=http.model,
        api_key=None if http.api_key is None else http.api_key.get_secret_value() or None,
        endpoint=http.endpoint,
        usage_per_event=http.usage_per_event,
        retries=http.retries,
        silence=http.silence,
    )
    return ServerSubject(address, config.baselines, num_tokens=http.vocabulary, static_batch=config.static_batch)


def make_loads(config: LoadtestSection, requests: Sequence[TrafficRequest]) -> list[Load]:
    """The runs of a profile."""
    count = len(requests)
    if config.profile in ("closed", "sweep"):
        levels = config.concurrency or arrivals.levels_to_triple(config.peak or 1)
        return [arrivals.closed_loop(level) for level in levels]
    if config.profile == "poisson":
        return [arrivals.poisson(rate, count, burstiness=config.burstiness, seed=config.seed) for rate in config.rate]
    if config.profile == "burst":
        assert config.burst is not None
        return [arrivals.bursts(config.burst.size, config.burst.every, count)]
    if any(request.arrival is None for request in requests):
        raise ConfigError(f"the traffic file {config.prompts.file} has no 'arrival' in its lines, and the profile is 'recorded'")
    return [arrivals.recorded(requests)]


class _Traffic:
    """The requests of a section, for one subject."""

    def __init__(self, config: LoadtestSection, subject: Subject) -> None:
        self._config = config
        self._num_tokens = subject.num_tokens
        self._tokenizer: Tokenizer | None = None
        if config.http.tokenizer is not None and config.prompts.file is None:
            from llmjax.engine.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(Path(config.http.tokenizer))
            self._num_tokens = self._tokenizer.vocab_size

    def requests(self, variant: int) -> list[TrafficRequest]:
        """Those of run number `variant`: the lengths are the same each time."""
        config, prompts = self._config, self._config.prompts
        if prompts.file is not None:
            default = config.output_tokens.median if config.output_tokens is not None else int(OUTPUTS.median)
            made = read_traffic(Path(prompts.file), output_tokens=default, limit=config.requests, max_tokens=config.max_tokens)
        else:
            shared = prompts.shared_prefix
            made = Synthetic(
                prompts=_lengths(prompts.tokens, PROMPTS),
                outputs=_lengths(config.output_tokens, OUTPUTS),
                shared=None if shared is None else SharedPrefixes(shared.tokens, shared.share, shared.groups),
                max_tokens=config.max_tokens,
                seed=config.seed,
            ).requests(config.requests, self._num_tokens, variant=variant)
            if self._tokenizer is not None:
                made = as_texts(made, self._tokenizer)
        return [dataclasses.replace(request, ignore_eos=config.ignore_eos) for request in made]


def _lengths(section: LengthsSection | None, default: Lengths) -> Lengths:
    return default if section is None else Lengths(section.median, section.sigma, section.min, section.max)


def table_row(run: Run) -> dict[str, str]:
    """A run for a terminal: latencies in ms, P50 / P95 / P99."""
    figures = run.figures
    row = {"load": run.load, "system": run.system, "completed": f"{figures.completed} of {figures.sent}"}
    row |= {"failed": str(figures.failed), "requests/s": f"{figures.requests_per_second:.2f}"}
    row["output tokens/s"] = f"{figures.output_tokens_per_second:.1f}"
    if figures.goodput is not None:
        row["goodput/s"] = f"{figures.goodput:.2f}"
    for metric in ("ttft", "itl", "tpot", "e2e"):
        row[f"{metric} ms"] = _three(figures.latencies[metric])
    queue = figures.latencies["queue"].mean
    row["queue ms"] = "–" if queue is None else f"{queue * 1e3:.1f}"
    return row


def _three(found: Distribution) -> str:
    return " / ".join("–" if v is None else f"{v * 1e3:.1f}" for v in (found.p50, found.p95, found.p99))


def _check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the folder of the report {path} cannot be made: {error.strerror or error}") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise StoreError(f"the report {path} cannot be written: choose another place")


def write_report(report: Report, path: Path) -> None:
    """The page at `path` and the figures beside it with the suffix ``.json``, each written aside and renamed.

    Raises `StoreError`.
    """
    for place, text in (
        (path, render(report)),
        (path.with_suffix(".json"), json.dumps(report.as_json(), ensure_ascii=False, indent=1) + "\n"),
    ):
        aside = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            aside.write_text(text, "utf-8")
            os.replace(aside, place)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise StoreError(f"the report {place} cannot be written: {error.strerror or error}") from None
