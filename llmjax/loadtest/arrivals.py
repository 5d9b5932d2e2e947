"""When requests come: closed loops of so many clients, or points in time drawn ahead. Pure functions of a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from llmjax.loadtest.target import TrafficRequest

ARRIVAL_SEED = 7  # arrivals have noise of their own: the same lengths at every rate


@dataclasses.dataclass(frozen=True)
class Load:
    """How one run is loaded: exactly one of `concurrency` and `times` is set.

    Attributes:
        name: for people, such as "closed 8" or "poisson 16/s".
        concurrency: clients, each sending its next request when its last one has ended.
        times: seconds from the start at which requests come, rising, one a request, whatever became of the earlier ones.
        level: the figure that a plot over several loads has on its axis: clients, requests a second, or a burst's size.
    """

    name: str
    level: float
    concurrency: int | None = None
    times: tuple[float, ...] = ()


def closed_loop(concurrency: int) -> Load:
    """`concurrency` clients without a pause between answer and next question."""
    return Load(f"closed {concurrency}", concurrency, concurrency=concurrency)


def poisson(rate: float, count: int, *, burstiness: float = 1.0, seed: int = 0) -> Load:
    """Independent arrivals, `rate` a second: gaps of a gamma distribution with mean 1/rate and shape `burstiness`.

    1 is a Poisson process; below, requests come in clusters; above, more evenly. The first comes after the first gap.
    """
    random = np.random.default_rng(ARRIVAL_SEED + seed)
    if burstiness == 1.0:
        gaps = random.exponential(1.0 / rate, count)
    else:
        gaps = random.gamma(burstiness, 1.0 / (rate * burstiness), count)
    return Load(f"poisson {rate:g}/s", rate, times=tuple(np.cumsum(gaps).tolist()))


def bursts(size: int, every: float, count: int) -> Load:
    """`size` requests at once, every so many seconds, the first at the start."""
    return Load(f"bursts of {size}", size, times=tuple(every * (index // size) for index in range(count)))


def recorded(requests: Sequence[TrafficRequest]) -> Load:
    """As the traffic file says; every request has an `arrival`."""
    times = [request.arrival for request in requests if request.arrival is not None]
    assert len(times) == len(requests)
    rate = len(times) / times[-1] if times and times[-1] > 0 else float(len(times))
    return Load("as recorded", round(rate, 3), times=tuple(times))


def levels_to_triple(peak: int) -> list[int]:
    """Numbers of clients from 1 to three times the declared peak."""
    return sorted({1, max(1, peak // 4), max(1, peak // 2), peak, 2 * peak, 3 * peak})
