"""How an engine looks from outside: numbers for Prometheus, and a picture for the dashboard. Changes nothing; imports no JAX.

A picture is taken on the engine's thread between two steps, where it only copies; what is made of it is made elsewhere.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.scheduling.speculation import Speculation
from llmjax.telemetry.histogram import Histogram
from llmjax.telemetry.reading import EngineReading, SpeculationReading

if TYPE_CHECKING:
    from llmjax.engine.engine import Engine

MAP_CELLS = 1024
OWNERS = 8  # colours of the map that requests share
LARGEST = 8
EMPTY, CACHED, SHARED, OWNED = range(4)
MAP_SYMBOLS = ".cs" + "01234567"


def read_engine(engine: Engine) -> EngineReading:
    """The numbers of this moment, though not of one step: may be called from any thread, also while the engine is stuck."""
    scheduler, pool, stats, config = engine.scheduler, engine.pool, engine.stats, engine.config
    rows = scheduler.running
    names = [lane.name for lane in config.lanes]
    running = dict.fromkeys(names, 0)
    for request in rows:
        running[names[request.lane]] += 1
    return EngineReading(
        running=running,
        waiting=scheduler.waiting_by_lane,
        preempted=scheduler.num_preempted,
        pages=pool.capacity,
        held=pool.num_used,
        shared=pool.num_shared,
        cached=pool.num_kept,
        contiguity=contiguity([request.pages for request in rows]),
        launches=stats.launches,
        prompt_tokens_computed=stats.prompt_tokens_computed,
        tokens_recomputed=stats.tokens_recomputed,
        prompt_tokens_queried=stats.prompt_tokens_queried,
        prompt_tokens_cached=stats.prompt_tokens_cached,
        output_tokens=stats.output_tokens,
        preemptions=stats.preemptions,
        corrupted=stats.corrupted,
        compiles_after_ready=engine.runner.compiles_after_ready,
        config={
            "page_size": str(config.page_size),
            "num_pages": str(pool.capacity),
            "max_context": str(config.max_context),
            "max_sequences": str(config.max_sequences),
            "prefix_cache": "on" if config.prefix_cache else "off",
            "speculative": "off" if config.speculative is None else config.speculative.method,
        },
        speculation=None if engine.speculation is None else read_speculation(engine.speculation, names),
    )


def read_speculation(speculation: Speculation, lanes: Sequence[str]) -> SpeculationReading:
    """Its numbers of this moment; from any thread."""
    counts, rates = speculation.counts, speculation.rates
    return SpeculationReading(
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        accepted_at=counts.accepted_at(),
        switches=[(to, reason, count) for (to, reason), count in sorted(counts.switches.items())],
        off=speculation.off,
        acceptance=rates.overall(),
        by_lane={lanes[lane]: share for lane, share in rates.by_lane().items() if lane < len(lanes)},
        by_class=rates.by_class(),
    )


def contiguity(tables: Sequence[Sequence[int]]) -> float:
    """Share of the steps along page tables that lead to the next page of the pool; 1 where there are none."""
    steps = near = 0
    for table in tables:
        pages = np.array(table, np.int64)  # a copy: the engine's thread may be adding to it
        steps += max(0, len(pages) - 1)
        near += int(np.count_nonzero(pages[1:] == pages[:-1] + 1))
    return near / steps if steps else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePicture:
    """Copies of what an engine held between two steps.

    Attributes:
        taken: monotonic seconds. started: the same, of when the engine was made, which tells it from others.
        counts: how often each page is held. findable: pages that the prefix cache finds.
        rows: (id, lane, prompt tokens, output tokens, page numbers) of each choice with a row.
        times: counts of `Histogram`s by name; `bounds` belong to them.
    """

    taken: float
    started: float
    counts: list[int]
    findable: list[int]
    rows: list[tuple[str, str, int, int, list[int]]]
    finished: dict[str, int]
    refused: int
    times: dict[str, list[int]]
    sizes: dict[str, list[int]]
    page_size: int


def take_picture(engine: Engine) -> EnginePicture:
    """To be called on the engine's thread. Copies, so that it takes well under a millisecond."""
    counts, findable = engine.pool.uses()
    metrics, lanes, stats = engine.metrics, engine.config.lanes, engine.stats
    return EnginePicture(
        taken=time.monotonic(),
        started=stats.started,
        counts=counts,
        findable=findable,
        rows=[
            (r.request_id, lanes[r.lane].name, r.num_prompt_tokens, len(r.output_ids), list(r.pages))
            for r in engine.scheduler.running
        ],
        finished=metrics.finished_by_reason,
        refused=metrics.num_refused,
        times={"first": _sum(metrics.time_to_first.values()), "between": list(metrics.between_tokens.counts)},
        sizes={"prompt": _sum(metrics.prompt_tokens.values()), "output": _sum(metrics.output_tokens.values())},
        page_size=engine.config.page_size,
    )


def picture_json(picture: EnginePicture, reading: EngineReading) -> dict[str, Any]:
    """Both as numbers, texts, lists and dicts, fit for `json.dumps`."""
    largest = sorted(picture.rows, key=lambda row: -len(row[4]))[:LARGEST]
    cells, pages_per_cell = page_cells(picture)
    return {
        "taken": picture.taken,
        "started": picture.started,
        **dataclasses.asdict(reading),
        "finished": picture.finished,
        "refused": picture.refused,
        "times": picture.times,
        "sizes": picture.sizes,
        "map": cells,
        "pages_per_cell": pages_per_cell,
        "largest": [
            {"id": name, "lane": lane, "prompt": prompt, "output": output, "pages": len(pages), "colour": colour_of(name)}
            for name, lane, prompt, output, pages in largest
        ],
    }


def page_cells(picture: EnginePicture) -> tuple[str, int]:
    """The pool as at most `MAP_CELLS` symbols in order of page number, and how many pages each stands for.

    "." is empty, "c" free but found by the prefix cache, "s" held by several, a digit held by one, of that colour. A cell of
    several pages shows what most of them are.
    """
    num_pages = len(picture.counts) - 1  # without the null page
    state = np.zeros(num_pages + 1, np.int64)
    state[picture.findable] = CACHED
    counts = np.asarray(picture.counts)
    state[counts == 1] = OWNED
    for name, *_, pages in picture.rows:
        state[pages] = OWNED + colour_of(name)
    state[counts > 1] = SHARED
    per_cell = -(-num_pages // MAP_CELLS)
    cells = -(-num_pages // per_cell)
    kinds = OWNED + OWNERS
    votes = np.bincount(np.arange(num_pages) // per_cell * kinds + state[1:], minlength=cells * kinds)
    return "".join(MAP_SYMBOLS[kind] for kind in votes.reshape(cells, kinds).argmax(axis=1)), per_cell


def colour_of(request_id: str) -> int:
    """The colour of a request, always the same one."""
    return zlib.crc32(request_id.encode("utf-8", "surrogatepass")) % OWNERS


def _sum(series: Any) -> list[int]:
    histograms: list[Histogram] = list(series)
    return [sum(counts) for counts in zip(*(one.counts for one in histograms), strict=True)]
