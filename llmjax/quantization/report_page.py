"""A quantisation as one HTML page: verdict, sizes, samples side by side, sensitivity, errors, ranges. All of it escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from llmjax.page.html import document, figure, table
from llmjax.page.svg import Series, line_chart, number
from llmjax.quantization.agreement import finite_or_none
from llmjax.quantization.report import LayerFigures, QuantizationReport, Range

_STYLE = """
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,320px),1fr));gap:.8rem;margin:.5rem 0 1.2rem}
pre{margin:.2rem 0;padding:.5rem;background:var(--card);border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;
font-size:.82rem}summary{cursor:pointer;color:var(--soft)}td:last-child.reason{text-align:left}
"""
_SAMPLES = {
    "loop": ("Open outputs", "loops", "does not loop"),
    "exact_match": ("Tasks", "right", "wrong"),
    "arithmetic": ("Sums", "right", "wrong"),
}
_MEBIBYTE = 2**20


def render(report: QuantizationReport) -> str:
    """The page as text: nothing in it comes from elsewhere, and nothing in it runs."""
    facts = "; ".join(f"{name} {value}" for name, value in report.facts.items())
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="soft">{escape(report.date)} UTC{escape("; " + facts if facts else "")}</p>',
    ]
    if report.verdict is not None:
        parts.append(_verdict(report.verdict))
    parts.append(_sizes(report))
    if report.verdict is not None:
        parts.append(_samples(report.verdict))
    parts += [_sensitivity(report), _errors(report), _ranges(report)]
    return document(report.title, "".join(parts), style=_STYLE)


def _verdict(verdict: Mapping[str, Any]) -> str:
    said = {
        "pass": "The candidate passed the gate.",
        "stop": "The candidate was refused, and nothing is served.",
        "fallback": "The candidate was refused: the baseline is served.",
    }[verdict["decision"]]
    rows = [
        (
            check["name"], "passed" if check["passed"] else "FAILED", _figure_of(check["value"]),
            f"{'at most' if check['bound'] == 'max' else 'at least'} {number(check['limit'])}",
            number(check["allowance"]) if check["allowance"] else "", check["reason"],
        )
        for check in verdict["checks"]
    ]  # fmt: skip
    skipped = ", ".join(verdict["skipped"])
    return "".join((
        "<h2>Gate</h2>", f"<p{'' if verdict['passed'] else ' class="bad"'}>{escape(said)}</p>",
        table(("check", "", "value", "limit", "allowance", "in words"), rows),
        f'<p class="soft">Not measured: {escape(skipped)}.</p>' if skipped else "", _reading(verdict["quality"]["agreement"]),
    ))  # fmt: skip


def _reading(agreement: Mapping[str, Any]) -> str:
    text = (
        f"Read: {agreement['tokens']} tokens of {agreement['texts']} texts. "
        f"Perplexity {_figure_of(agreement['baseline_perplexity'])} -> {_figure_of(agreement['candidate_perplexity'])}, "
        f"ratio {_fine(agreement['perplexity_ratio'])} "
        f"± {_figure_of(agreement['perplexity_ratio_error'])}; the same best token {_percent(agreement['top1_agreement'])}; "
        f"KL {_figure_of(agreement['kl_mean'])} nats a token, "
        f"99 % below {_figure_of(agreement['kl_p99'])}, at most {_figure_of(agreement['kl_max'])}"
        f"{'' if agreement['kl_exact'] else ' (lower bounds, from the best tokens alone)'}."
    )
    return f"<p>{escape(text)}</p>"


def _sizes(report: QuantizationReport) -> str:
    before, after, count = Counter[str](), Counter[str](), Counter[str]()
    for layer in report.layers:
        before[layer.dtype_before] += layer.bytes_before
        after[layer.dtype_after] += layer.bytes_after
        count[layer.dtype_after] += 1
    rows = [
        (dtype, str(count[dtype]), number(before[dtype] / _MEBIBYTE), number(after[dtype] / _MEBIBYTE), "")
        for dtype in sorted({*before, *after})
    ]
    ratio = _fine(report.bytes_after / report.bytes_before) if report.bytes_before else "–"
    total = (number(report.bytes_before / _MEBIBYTE), number(report.bytes_after / _MEBIBYTE))
    rows.append(("all", str(len(report.layers)), *total, ratio))
    kept = [(layer.name, layer.dtype_after, layer.kept) for layer in report.layers if layer.kept]
    share = (
        "" if report.linear_share is None else f"<p>{_percent(report.linear_share)} of the linear parameters were quantised.</p>"
    )
    stayed = f"<h2>Stayed in high precision</h2>{table(('layer', 'type', 'why'), kept)}" if kept else ""
    return f"<h2>Size, MiB</h2>{table(('type', 'layers after', 'before', 'after', 'ratio'), rows)}{share}{stayed}"


def _samples(verdict: Mapping[str, Any]) -> str:
    out = []
    for kind, (title, yes, no) in _SAMPLES.items():
        found = [sample for sample in verdict["quality"]["samples"] if sample["kind"] == kind]
        if found:
            out.append(f"<h2>{escape(title)}, side by side</h2>")
        out += [_sample(sample, yes, no) for sample in found]
    return "".join(out)


def _sample(sample: Mapping[str, Any], yes: str, no: str) -> str:
    expected = "" if sample["expected"] is None else f'<p class="soft">expected: {escape(sample["expected"])}</p>'
    sides = "".join(
        f"<div><b>{side}</b> <span class='soft'>{escape(yes if sample[f'{side}_yes'] else no)}</span>"
        f"<pre>{escape(sample[side])}</pre></div>"
        for side in ("baseline", "candidate")
    )
    return f'<pre>{escape(sample["prompt"])}</pre>{expected}<div class="pair">{sides}</div>'


def _sensitivity(report: QuantizationReport) -> str:
    ranking = report.ranking()
    if not ranking:
        return ""
    rows = [
        (layer.name, layer.dtype_after, str(place), _figure_of(layer.relative_l2), _fine(layer.cosine), _figure_of(layer.kl))
        for place, layer in enumerate(ranking, 1)
    ]
    chart = _chart(ranking, [("relative L2 error", lambda layer: layer.relative_l2)], "rank")
    head = ("layer", "type now", "rank", "relative L2 of its output", "cosine", "KL of the logits, nats")
    return (
        '<h2>Sensitivity</h2><p class="soft">Each layer quantised alone, the worst first.</p>'
        f'<div class="plots">{figure("Error of the output, by rank", chart)}</div>{table(head, rows)}'
    )


def _errors(report: QuantizationReport) -> str:
    measured = [layer for layer in report.layers if layer.error_before is not None or layer.error_after is not None]
    if not measured:
        return ""
    lines: list[tuple[str, Callable[[LayerFigures], float | None]]] = [
        ("rounding everywhere", lambda layer: layer.error_before),
        ("now", lambda layer: layer.error_after),
    ]
    rows = [(layer.name, layer.dtype_after, _figure_of(layer.error_before), _figure_of(layer.error_after)) for layer in measured]
    chart = _chart(measured, lines, "layer")
    head = ("layer", "type now", "rounding everywhere", "now")
    return (
        '<h2>Error of each layer</h2><p class="soft">Relative L2 error of its output in the quantised model, those of earlier '
        f'layers included.</p><div class="plots">{figure("Error, in the order of the model", chart)}</div>'
        f"<details><summary>{len(rows)} layers</summary>{table(head, rows)}</details>"
    )


def _ranges(report: QuantizationReport) -> str:
    measured = [layer for layer in report.layers if layer.weight_range is not None or layer.input_range is not None]
    if not measured:
        return ""
    charts = [
        figure(title, _chart(measured, [("largest magnitude", of)], "layer"))
        for title, of in (
            ("Largest weight", lambda layer: _largest(layer.weight_range)),
            ("Largest input", lambda layer: _largest(layer.input_range)),
        )
    ]
    rows = [
        (layer.name, layer.dtype_after, *_ends(layer.weight_range), *_ends(layer.input_range), _figure_of(layer.input_clip))
        for layer in measured
    ]
    head = ("layer", "type now", "weight, from", "to", "input, from", "to", "kept up to")
    return (
        f'<h2>Ranges</h2><div class="plots">{"".join(charts)}</div>'
        f"<details><summary>{len(rows)} layers</summary>{table(head, rows)}</details>"
    )


def _chart(
    layers: Sequence[LayerFigures], lines: Sequence[tuple[str, Callable[[LayerFigures], float | None]]], x_label: str
) -> str:
    series = []
    for colour, (label, of) in enumerate(lines):
        values = ((float(place), finite_or_none(of(layer))) for place, layer in enumerate(layers, 1))
        points = [(x, y) for x, y in values if y is not None]
        if points:
            series.append(Series(label, points, colour))
    key = "".join(f'<span><i style="background:var(--c{one.colour})"></i>{escape(one.label)}</span>' for one in series)
    unit = lines[0][0] if len(lines) == 1 else "relative L2 error"
    return (f'<p class="key soft">{key}</p>' if len(lines) > 1 else "") + line_chart(series, x_label=x_label, unit=unit)


def _largest(ends: Range | None) -> float | None:
    return None if ends is None else max(abs(end) for end in ends)


def _ends(ends: Range | None) -> tuple[str, str]:
    return ("–", "–") if ends is None else (_figure_of(ends[0]), _figure_of(ends[1]))


def _figure_of(value: float | None) -> str:
    return "–" if value is None else number(value)


def _fine(value: float | None) -> str:
    """Four places: of ratios near 1, three digits tell nothing."""
    known = finite_or_none(value)
    return "–" if known is None else f"{known:.4f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"
