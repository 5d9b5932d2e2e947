"""What records mean: latencies, throughput, goodput, errors. Pure arithmetic over `Trace`; every formula is in `FORMULAS`.

Time to first token, time per output token, inter-token latency and end-to-end time are defined as in vLLM's `bench serve`, so
that figures can be laid side by side; where GuideLLM or others differ, the formulas say so.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmjax.loadtest.driver import Record, Trace

PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "itl", "itl_token", "tpot", "e2e", "queue")
FORMULAS = {
    "ttft": "time to first token: first event with a token - due. Due is when the request came, not when it was sent.",
    "itl": "inter-token latency: the gap between two events with tokens that follow each other, pooled over all requests. The "
    "time to the first token is none of them. An event may carry several tokens.",
    "itl_token": "inter-token latency a token: each such gap / the tokens of the event that ends it, counted once a token.",
    "tpot": "time per output token, one figure a request: (e2e - ttft) / (output tokens - 1). The first token is left out; "
    "requests of one token have none.",
    "e2e": "end to end: last event with a token - due.",
    "queue": "due until the request had a row, and again whenever it lost it; where the target does not tell, none.",
    "percentiles": "linear between the two nearest (numpy's default); over completed requests only.",
    "requests/s": "completed requests / duration; output tokens/s and total tokens/s likewise, over completed requests.",
    "duration": "from the start of the run to the end of the last request.",
    "goodput": "completed requests/s of which ttft, tpot and e2e, and the request's own P95 of inter-token gaps, are each within "
    "the level asked for.",
    "allocation success": "share of ended requests that were neither refused nor failed nor lost their pages on the way.",
    "pages": "peak pages that hold tokens and peak pages that nobody else may have, of the pool's.",
}


@dataclasses.dataclass(frozen=True)
class Distribution:
    """Of seconds: how many, mean, percentiles, largest. All None without a value."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Distribution:
        """Of these values."""
        array = np.asarray(values, np.float64)
        if not array.size:
            return cls(0)
        p50, p90, p95, p99 = np.percentile(array, PERCENTILES).tolist()
        return cls(array.size, float(array.mean()), p50, p90, p95, p99, float(array.max()))


@dataclasses.dataclass(frozen=True)
class ServiceLevels:
    """What a run must reach: seconds at the 95th percentile, and failed requests at most. None asks for nothing."""

    ttft_p95: float | None = None
    itl_p95: float | None = None
    tpot_p95: float | None = None
    e2e_p95: float | None = None
    errors: int | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in dataclasses.astuple(self))

    def good(self, record: Record) -> bool:
        """Whether one completed request is within all of them."""
        gaps = inter_token(record)
        values = {
            "ttft_p95": ttft(record),
            "tpot_p95": tpot(record),
            "e2e_p95": e2e(record),
            "itl_p95": float(np.percentile(gaps, 95)) if gaps else None,
        }
        for name, value in values.items():
            limit = getattr(self, name)
            if limit is not None and value is not None and value > limit:
                return False
        return True


@dataclasses.dataclass(frozen=True)
class Figures:
    """A run in figures. Times are seconds, latencies by the names of `METRICS`."""

    sent: int
    completed: int
    unfinished: int
    errors: dict[str, int]
    duration: float
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float | None
    goodput: float | None
    allocation_success: float | None
    preemptions: int
    peak_concurrency: int
    prompt_tokens: dict[str, float]
    output_tokens: dict[str, float]
    peak_pages_used: int
    peak_pages_reserved: int
    num_pages: int
    latencies: dict[str, Distribution]

    @property
    def failed(self) -> int:
        """Requests that ended in error."""
        return sum(self.errors.values())

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def ttft(record: Record) -> float | None:
    """Seconds until the first token; None without one."""
    return record.times[0] - record.due if record.times else None


def e2e(record: Record) -> float | None:
    """Seconds until the last token; None without one."""
    return record.times[-1] - record.due if record.times else None


def tpot(record: Record) -> float | None:
    """Seconds a token after the first; None with fewer than two."""
    tokens = record.output_tokens
    return (record.times[-1] - record.times[0]) / (tokens - 1) if tokens > 1 else None


def inter_token(record: Record) -> list[float]:
    """Gaps between events."""
    return [after - before for before, after in zip(record.times, record.times[1:], strict=False)]


def queue(record: Record) -> float | None:
    """Seconds without a row, those before it was sent included; None where the target did not tell."""
    if record.queue_seconds is None or record.sent is None:
        return None
    return record.sent - record.due + record.queue_seconds


def measure(trace: Trace, levels: ServiceLevels) -> Figures:
    """The figures of a run."""
    records = trace.records
    done = [record for record in records if record.completed]
    ended = [record for record in records if record.ended is not None]
    duration = trace.ended - trace.started
    whole = [record for record in ended if not record.error and not record.preemptions]
    prompts = [record.prompt_tokens for record in done if record.prompt_tokens is not None]
    outputs = [record.output_tokens for record in done]

    def per_second(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    return Figures(
        sent=len(records),
        completed=len(done),
        unfinished=len(records) - len(ended),
        errors=dict(Counter(_reason(record.error) for record in ended if record.error)),
        duration=duration,
        requests_per_second=per_second(len(done)),
        output_tokens_per_second=per_second(sum(outputs)),
        total_tokens_per_second=per_second(sum(outputs) + sum(prompts)) if len(prompts) == len(done) else None,
        goodput=per_second(sum(map(levels.good, done))) if levels else None,
        allocation_success=len(whole) / len(ended) if ended else None,
        preemptions=sum(record.preemptions for record in records),
        peak_concurrency=_peak_concurrency(records),
        prompt_tokens=_spread(prompts),
        output_tokens=_spread(outputs),
        peak_pages_used=trace.peak_used,
        peak_pages_reserved=trace.peak_reserved,
        num_pages=max((gauge.num_pages for gauge in trace.gauges), default=0),
        latencies=_latencies(done),
    )


def missed(figures: Figures, levels: ServiceLevels) -> list[str]:
    """The service levels that a run missed, one text each."""
    lines = []
    for metric in ("ttft", "itl", "tpot", "e2e"):
        limit, reached = getattr(levels, f"{metric}_p95"), figures.latencies[metric].p95
        if limit is not None and reached is not None and reached > limit:
            lines.append(f"{metric} P95 {reached * 1e3:.1f} ms is above {limit * 1e3:g} ms")
        elif limit is not None and not figures.completed:
            lines.append(f"{metric} P95 is not known: no request was completed")
    if levels.errors is not None and figures.failed > levels.errors:
        lines.append(f"{figures.failed} requests failed, at most {levels.errors} may")
    return lines


def _latencies(done: Sequence[Record]) -> dict[str, Distribution]:
    gaps, a_token, counts = [], [], []
    for record in done:
        for gap, count in zip(inter_token(record), record.counts[1:], strict=True):
            gaps.append(gap)
            a_token.append(gap / count)
            counts.append(count)
    return {
        "ttft": Distribution.of([v for r in done if (v := ttft(r)) is not None]),
        "itl": Distribution.of(gaps),
        "itl_token": Distribution.of(np.repeat(np.asarray(a_token, np.float64), np.asarray(counts, np.int64))),
        "tpot": Distribution.of([v for r in done if (v := tpot(r)) is not None]),
        "e2e": Distribution.of([v for r in done if (v := e2e(r)) is not None]),
        "queue": Distribution.of([v for r in done if (v := queue(r)) is not None]),
    }


def _reason(error: str) -> str:
    """What kind of error it was: the class of a refusal, or the finish reason."""
    return error.partition(":")[0]


def _peak_concurrency(records: Sequence[Record]) -> int:
    """Requests that had come and not ended at the same moment, at most."""
    marks = [(record.due, 1) for record in records]
    marks += [(record.ended if record.ended is not None else math.inf, -1) for record in records]
    peak = now = 0
    for _, change in sorted(marks):  # of one moment, ends come first
        now += change
        peak = max(peak, now)
    return peak


def _spread(lengths: Sequence[int]) -> dict[str, float]:
    """The lengths as they came out: what a generator was told and what it drew are not the same."""
    if not lengths:
        return {}
    points = np.percentile(np.asarray(lengths, np.float64), (50, 90, 99)).tolist()
    return {"sum": float(sum(lengths)), "p50": points[0], "p90": points[1], "p99": points[2], "max": float(max(lengths))}
