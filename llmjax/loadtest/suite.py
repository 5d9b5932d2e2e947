"""`run_suite`: every load on every system, one after the other, into one `Report`. Owns the order of the runs."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmjax.loadtest.arrivals import Load
from llmjax.loadtest.driver import Trace, drive
from llmjax.loadtest.measure import FORMULAS, Figures, ServiceLevels, e2e, measure, missed, ttft
from llmjax.loadtest.target import Target, TrafficRequest

CURVE_POINTS = 60


@dataclasses.dataclass(frozen=True)
class System:
    """One way to serve the same traffic.

    Attributes:
        name: for people; the first system of a suite is the one under test, the others are what it is compared with.
        about: one line that says what it does.
        policy: fields of the engine's policy that it changes.
        batch: requests of a static batch; None sends each when it comes.
        same_as: the system that it is no different from, with the reason in `about`; it is not run.
    """

    name: str
    about: str
    policy: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch: int | None = None
    same_as: str = ""


@dataclasses.dataclass(frozen=True)
class Run:
    """One load on one system.

    `missed` are the service levels it should have reached and did not. `curves` are, by metric, percentiles in equal steps from
    0 to 100 (seconds), `gauges` rows of seconds, running, waiting, pages used and reserved.
    """

    system: str
    load: str
    level: float
    figures: Figures
    missed: tuple[str, ...]
    interrupted: bool
    curves: Mapping[str, tuple[float, ...]]
    gauges: tuple[tuple[float, ...], ...]

    def line(self) -> str:
        """The run in one line for people."""
        figures = self.figures
        parts = [f"{figures.completed} of {figures.sent} requests in {figures.duration:.1f} s"]
        parts.append(f"{figures.requests_per_second:.2f} requests/s, {figures.output_tokens_per_second:.1f} output tokens/s")
        for metric in ("ttft", "itl", "e2e"):
            found = figures.latencies[metric]
            if found.p50 is not None and found.p95 is not None:
                parts.append(f"{metric} P50 {_ms(found.p50)} P95 {_ms(found.p95)}")
        if figures.failed:
            parts.append("failed: " + ", ".join(f"{count} {reason}" for reason, count in figures.errors.items()))
        head = f"{self.load}, {self.system}" + (" (interrupted)" if self.interrupted else "")
        return f"{head}: {'; '.join([*parts, *self.missed])}"


@dataclasses.dataclass
class Report:
    """Everything a suite found. `facts` are of the target and the workload, for people; `date` is UTC."""

    title: str
    facts: Mapping[str, str]
    systems: Sequence[System]
    levels: ServiceLevels
    runs: list[Run] = dataclasses.field(default_factory=list)
    date: str = ""
    interrupted: bool = False

    @property
    def missed(self) -> list[str]:
        """All service levels that were missed, with the load."""
        return [f"{run.load}: {text}" for run in self.runs for text in run.missed]

    def as_json(self) -> dict[str, Any]:
        """Plain data, formulas included."""
        return {**dataclasses.asdict(self), "missed": self.missed, "formulas": FORMULAS}


def run_suite(
    target_for: Callable[[System], Target],
    traffic: Callable[[int], Sequence[TrafficRequest]],
    *,
    title: str,
    facts: Mapping[str, str],
    systems: Sequence[System],
    loads: Sequence[Load],
    levels: ServiceLevels,
    demanded: Callable[[Load], bool] = lambda load: True,
    duration: float | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    tell: Callable[[Run], None] | None = None,
) -> Report:
    """Run each load on all systems.

    Args:
        target_for: makes a system's target; called anew for each run.
        traffic: the requests of run number i. Same lengths each time.
        demanded: whether the first system must reach the service levels under a load.
        progress: called with the run's name, requests ended and requests in all.
        tell: called after each run.

    An interrupt ends the suite after the run it falls into, whose part is in the report.
    """
    report = Report(title, facts, systems, levels, date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    try:
        for load in loads:
            for system in systems:
                if system.same_as:
                    continue
                _one(report, target_for, traffic, load, system, demanded(load), duration, progress, tell)
                if report.interrupted:
                    return report
    except KeyboardInterrupt:  # between two runs
        report.interrupted = True
    return report


def _one(
    report: Report,
    target_for: Callable[[System], Target],
    traffic: Callable[[int], Sequence[TrafficRequest]],
    load: Load,
    system: System,
    demanded: bool,
    duration: float | None,
    progress: Callable[[str, int, int], None] | None,
    tell: Callable[[Run], None] | None,
) -> None:
    name = f"{load.name}, {system.name}"

    def on_progress(done: int, total: int) -> None:
        if progress is not None:
            progress(name, done, total)

    requests = traffic(len(report.runs))
    trace = drive(target_for(system), requests, load, batch=system.batch, duration=duration, progress=on_progress)
    figures = measure(trace, report.levels)
    ours = demanded and system is report.systems[0] and not trace.interrupted
    run = Run(
        system=system.name,
        load=load.name,
        level=load.level,
        figures=figures,
        missed=tuple(missed(figures, report.levels)) if ours else (),
        interrupted=trace.interrupted,
        curves=_curves(trace),
        gauges=tuple(
            (round(g.time - trace.started, 4), g.running, g.waiting, g.pages_used, g.pages_reserved)
            for g in trace.gauges[:: max(1, len(trace.gauges) // 200)]
        ),
    )
    report.runs.append(run)
    report.interrupted = trace.interrupted
    if tell is not None:
        tell(run)


def _curves(trace: Trace) -> dict[str, tuple[float, ...]]:
    steps = np.linspace(0, 100, CURVE_POINTS + 1)
    curves = {}
    for name, of in (("ttft", ttft), ("e2e", e2e)):
        values = [v for record in trace.records if record.completed and (v := of(record)) is not None]
        curves[name] = tuple(np.percentile(values, steps).tolist()) if values else ()
    return curves


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"
