"""Line charts as SVG text, coloured by the page's own style. Knows numbers and labels, nothing of load tests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 40
COLOURS = 6  # --c0 to --c5 of the page


@dataclasses.dataclass(frozen=True)
class Series:
    """Points (x, y) joined by a line; `colour` is the number of a colour of the page, `label` its name for people."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0


def line_chart(series: Sequence[Series], *, x_label: str, unit: str, dots: bool = True, ticks: Sequence[float] = ()) -> str:
    """A chart from zero up.

    Args:
        unit: of y, behind the largest tick.
        dots: mark each point, with its values as a tooltip.
        ticks: places on the x axis that get a number; evenly placed, whatever their values, as points are then too. Without
            them x is to scale.
    """
    points = [point for one in series for point in one.points]
    if not points:
        return f'<p class="none">no values for {escape(x_label)}</p>'
    top = _round_up(max(y for _, y in points))
    low, high = min(x for x, _ in points), max(x for x, _ in points)

    def place(x: float) -> float:
        if ticks:
            share = 0.5 if len(ticks) == 1 else ticks.index(x) / (len(ticks) - 1)
        else:
            share = (x - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def height(y: float) -> float:
        return HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)} over {escape(x_label)}">']
    for step in range(5):
        value = top * step / 4
        y = height(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>')
    for x in ticks or (low, (low + high) / 2, high):
        text = number(x)
        parts.append(f'<text class="tick" x="{place(x):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{text}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    for one in series:
        colour = f"var(--c{one.colour % COLOURS})"
        path = " ".join(f"{place(x):.1f},{height(y):.1f}" for x, y in one.points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        for x, y in one.points if dots else ():
            tip = f"{one.label}, {x_label} {number(x)}: {number(y)} {unit}"
            parts.append(
                f'<circle cx="{place(x):.1f}" cy="{height(y):.1f}" r="3.5" fill="{colour}"><title>{escape(tip)}</title></circle>'
            )
    return "".join([*parts, "</svg>"])


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8, 10 times a power of ten, so that quarters are round."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * (1 - 1e-12))
