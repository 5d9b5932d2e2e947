"""A report as one HTML page: plots as inline SVG, no script, nothing from the network, readable on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from llmjax.loadtest.measure import FORMULAS, Figures
from llmjax.loadtest.suite import Report, Run
from llmjax.page.html import document, figure, table
from llmjax.page.svg import Series, line_chart, number

_LATENCIES = (
    ("ttft", "TTFT"),
    ("itl", "inter-token"),
    ("itl_token", "inter-token a token"),
    ("tpot", "time per output token"),
    ("e2e", "end to end"),
    ("queue", "queue"),
)


def render(report: Report) -> str:
    """The page as text."""
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="soft">{escape(report.date)} UTC; {escape("; ".join(f"{k} {v}" for k, v in report.facts.items()))}</p>',
    ]
    if report.interrupted:
        parts.append('<p class="bad">Interrupted: the last run is in here as far as it came, later ones are missing.</p>')
    if report.levels:
        parts.append(_levels(report))
    parts += [
        f"<h2>Systems</h2>{_systems(report)}",
        f'<h2>Over the load</h2>{_key(report)}<div class="plots">{_over_load(report)}</div>',
    ]
    parts.append(f"<h2>Throughput and errors</h2>{_throughput_table(report.runs)}")
    parts.append(f"<h2>Latencies, ms</h2>{_latency_table(report.runs)}")
    parts.append(
        f'<h2>Distributions</h2><p class="soft">Share of requests at or below a time.</p>{_key(report)}'
        f'<div class="plots">{_curves(report)}</div>'
    )
    if any(run.gauges for run in report.runs):
        parts.append(f'<h2>Rows and pages in time</h2><div class="plots">{_gauges(report)}</div>')
    formulas = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in FORMULAS.items())
    parts.append(f"<h2>Formulas</h2><dl>{formulas}</dl>")
    return document(report.title, "".join(parts))


def _levels(report: Report) -> str:
    if not report.missed:
        if report.interrupted or not report.runs:
            return ""
        return "<p>All service levels were reached.</p>"
    return "".join(f'<p class="bad">{escape(line)}</p>' for line in report.missed)


def _systems(report: Report) -> str:
    lines = [
        f"<dt>{escape(system.name)}</dt><dd>{escape(system.about)}{escape(_not_run(system.same_as))}</dd>"
        for system in report.systems
    ]
    return f"<dl>{''.join(lines)}</dl>"


def _not_run(same_as: str) -> str:
    return f" Not run: the same policy as '{same_as}'." if same_as else ""


def _colours(report: Report) -> dict[str, int]:
    return {system.name: index for index, system in enumerate(s for s in report.systems if not s.same_as)}


def _key(report: Report) -> str:
    items = [f'<span><i style="background:var(--c{c % 6})"></i>{escape(name)}</span>' for name, c in _colours(report).items()]
    return f'<p class="key">{"".join(items)}</p>'


def _over_load(report: Report) -> str:
    def latency(metric: str, which: str) -> Callable[[Figures], float | None]:
        def seconds(figures: Figures) -> float | None:
            value = getattr(figures.latencies[metric], which)
            return None if value is None else float(value) * 1e3

        return seconds

    plots: list[tuple[str, str, Callable[[Figures], float | None]]] = [
        ("Requests/s", "requests/s", lambda f: f.requests_per_second),
        ("Output tokens/s", "tokens/s", lambda f: f.output_tokens_per_second),
        ("Goodput", "requests/s", lambda f: f.goodput),
        ("TTFT, P95", "ms", latency("ttft", "p95")),
        ("Inter-token, P95", "ms", latency("itl", "p95")),
        ("End to end, P95", "ms", latency("e2e", "p95")),
        ("Queue, mean", "ms", latency("queue", "mean")),
    ]
    return "".join(_load_plot(report, *plot) for plot in plots)


def _load_plot(report: Report, title: str, unit: str, value: Callable[[Figures], float | None]) -> str:
    ticks = sorted({run.level for run in report.runs})
    series = []
    for name, colour in _colours(report).items():
        found = [(run.level, value(run.figures)) for run in report.runs if run.system == name]
        points = sorted((x, y) for x, y in found if y is not None)
        if points:
            series.append(Series(name, points, colour))
    if not series:
        return ""
    label = "requests a second" if report.runs[0].load.startswith("poisson") else "load"
    label = "clients" if report.runs[0].load.startswith("closed") else label
    return figure(f"{title}", line_chart(series, x_label=label, unit=unit, ticks=ticks))


def _curves(report: Report) -> str:
    colours, out = _colours(report), []
    for load in dict.fromkeys(run.load for run in report.runs):
        for metric, name in (("ttft", "TTFT"), ("e2e", "End to end")):
            series = []
            for run in report.runs:
                values = run.curves.get(metric, ())
                if run.load == load and values:
                    points = [(v * 1e3, 100 * i / (len(values) - 1)) for i, v in enumerate(values)]
                    series.append(Series(run.system, points, colours[run.system]))
            if series:
                chart = line_chart(series, x_label="ms", unit="% of requests", dots=False)
                out.append(figure(f"{name}, {load}", chart))
    return "".join(out)


def _gauges(report: Report) -> str:
    out = []
    for run in report.runs:
        if not run.gauges:
            continue
        names = ("running", "waiting", "pages that hold tokens", "pages reserved")
        lines = [Series(name, [(row[0], row[column]) for row in run.gauges], column - 1) for column, name in enumerate(names, 1)]
        for pair, unit in ((lines[:2], "requests"), (lines[2:], "pages")):
            key = "".join(f'<span><i style="background:var(--c{s.colour})"></i>{escape(s.label)}</span>' for s in pair)
            chart = line_chart(pair, x_label="seconds", unit=unit, dots=False)
            out.append(figure(f"{run.load}, {run.system}", f'<p class="key soft">{key}</p>{chart}'))
    return "".join(out)


def _throughput_table(runs: Sequence[Run]) -> str:
    head = (
        "load", "system", "completed", "failed", "unfinished", "seconds", "requests/s", "output tokens/s", "total tokens/s",
        "goodput/s", "allocation success", "preemptions", "pages used / reserved", "prompt tokens P50 / P99", "output P50 / P99",
    )  # fmt: skip
    rows = []
    for run in runs:
        f = run.figures
        success = "–" if f.allocation_success is None else f"{100 * f.allocation_success:.2f} %"
        errors = ", ".join(f"{count} {reason}" for reason, count in f.errors.items()) or "0"
        rows.append((
            run.load, run.system, f"{f.completed} of {f.sent}", errors, str(f.unfinished), number(f.duration),
            number(f.requests_per_second), number(f.output_tokens_per_second), _or_dash(f.total_tokens_per_second),
            _or_dash(f.goodput), success, str(f.preemptions), _pages(f),
            _pair(f.prompt_tokens), _pair(f.output_tokens),
        ))  # fmt: skip
    return table(head, rows)


def _pages(figures: Figures) -> str:
    if not figures.num_pages:
        return "–"
    used, reserved = figures.peak_pages_used, figures.peak_pages_reserved
    return f"{used} / {reserved} of {figures.num_pages}"


def _pair(spread: dict[str, float]) -> str:
    return f"{spread['p50']:.0f} / {spread['p99']:.0f}" if spread else "–"


def _latency_table(runs: Sequence[Run]) -> str:
    head = ("load", "system", "", "count", "mean", "P50", "P90", "P95", "P99", "max")
    rows = []
    for run in runs:
        for metric, name in _LATENCIES:
            d = run.figures.latencies[metric]
            values = [_or_dash(None if v is None else v * 1e3) for v in (d.mean, d.p50, d.p90, d.p95, d.p99, d.max)]
            rows.append((run.load, run.system, name, str(d.count), *values))
    return table(head, rows)


def _or_dash(value: float | None) -> str:
    return "–" if value is None else number(value)
