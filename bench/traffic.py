"""What each way of serving traffic is worth: the same requests, programs and pages, one technique taken away at a time.

    python -m bench.traffic --preset llama-8b --json out.json --html out.html
    python -m bench.traffic --preset tiny --clients 12,36 --requests 80 --rows 16    # a CPU; all lengths an eighth

- continuous batching: instead, static batches of 8 that are waited for (`static`);
- pages on demand: instead, the pages of a request's full length are reserved when it starts (`whole_length`);
- lanes: instead, first come, first served (`fifo`); not run with one lane (`--lanes all`), for it would be the same.

Clients in a closed loop (30, and three times as many), lengths of the documented mixed trace.
Requests ask for the trace's largest output and are stopped when they have their own, so that lengths cannot be foreseen. The pool
is limited to 1.2 times the mean demand (the pages of as many requests as there are clients, on average), or nothing would show.

Beside each technique stands what two field reports told of their own systems. `pages_used` (they hold tokens) and
`pages_reserved` are peaks in shares of the pool.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from bench.rows import Rows
from llmjax.engine.config import EngineConfig
from llmjax.engine.llm import LLM
from llmjax.loadtest import arrivals
from llmjax.loadtest.measure import ServiceLevels
from llmjax.loadtest.page import render
from llmjax.loadtest.subjects import EngineSubject
from llmjax.loadtest.suite import Run, run_suite
from llmjax.loadtest.target import TrafficRequest
from llmjax.loadtest.workload import Lengths, Synthetic
from llmjax.model.checkpoint.load import load_model
from llmjax.model.config import ModelConfig
from llmjax.model.kv_cache import cache_bytes_per_page
from llmjax.scheduling.lane_config import LaneConfig

TINY = ModelConfig(
    family="llama", vocab_size=256, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=128,
    max_positions=4096,
)  # fmt: skip
REPORTED = {
    "static": "continuous batching: mean queue 900 -> < 200 ms; 12 -> 36 requests/s",
    "whole_length": "pages: memory 92 -> 74 %",
    "fifo": "two queues: P95 1.3 -> 0.5 s, P99 2.2 -> 0.8 s, with the others",
}
COLUMNS = (
    "system", "clients", "requests_per_second", "output_tokens_per_second", "queue_ms", "e2e_p95_ms", "e2e_p99_ms", "ttft_p95_ms",
    "pages_used", "pages_reserved", "preemptions", "failed",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = _arguments(argv)
    rows = Rows(args.json)
    clients = [int(part) for part in args.clients.split(",")]
    # A smaller model gets a shorter trace, so that a CPU is done in minutes.
    scale = 1 if args.preset != "tiny" else 8
    trace = mixed_trace(scale)
    llm = _llm(args, trace.requests(args.requests, 2), clients[0], scale)
    engine = llm.engine
    rows.add(pages=engine.stats.num_pages, mean_demand=_demand(trace.requests(args.requests, 2), clients[0], args.page_size))
    subject = EngineSubject(engine, ["static", "whole_length", "fifo"], static_batch=args.static_batch)
    report = run_suite(
        subject.target,
        lambda index: trace.requests(args.requests, engine.model_config.num_tokens, variant=index),
        title=f"Traffic on {args.preset}",
        facts={"pages": str(engine.stats.num_pages), "requests of each run": str(args.requests)},
        systems=subject.systems,
        loads=[arrivals.closed_loop(number) for number in clients],
        levels=ServiceLevels(),
        tell=lambda run: rows.add(**_row(run)),
    )
    for system in subject.systems:
        if system.same_as:
            rows.add(not_run=system.name, why=system.about, reported=REPORTED[system.name])
    rows.add(compiles_after_ready=engine.runner.compiles_after_ready)
    rows.close(COLUMNS)
    if args.html is not None:
        Path(args.html).write_text(render(report), "utf-8")
    if report.interrupted:
        raise KeyboardInterrupt


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="llama-8b", help="or tiny")
    parser.add_argument("--clients", default="30,90", help="the first is the declared peak")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--static-batch", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--pool", type=float, default=1.2, help="pages, as a multiple of the mean demand")
    parser.add_argument("--lanes", default="short:640:3,long", help="name:max_tokens:weight, the last takes the rest")
    parser.add_argument("--dtype")
    parser.add_argument("--compile-cache")
    parser.add_argument("--json")
    parser.add_argument("--html")
    return parser.parse_args(argv)


def mixed_lengths(scale: int) -> tuple[Lengths, Lengths]:
    """Prompts and outputs of the documented mixed trace, divided by `scale`."""
    return (
        Lengths(256 / scale, 1.0, max(1, 16 // scale), 3072 // scale),
        Lengths(128 / scale, 0.8, max(1, 8 // scale), 1024 // scale),
    )


def mixed_trace(scale: int) -> Synthetic:
    """The documented mixed trace; requests ask for its largest output."""
    return Synthetic(*mixed_lengths(scale), max_tokens=1024 // scale)


def read_lanes(text: str, scale: int) -> tuple[LaneConfig, ...]:
    """Lanes as the command line names them, sizes divided by `scale`."""
    lanes = []
    for part in text.split(","):
        name, most, weight = [*part.split(":"), "", ""][:3]
        lanes.append(LaneConfig(name=name, max_tokens=int(most) // scale if most else None, weight=int(weight or 1)))
    return tuple(lanes)


def _llm(args: argparse.Namespace, requests: Sequence[TrafficRequest], clients: int, scale: int) -> LLM:
    loaded = load_model(random=TINY if args.preset == "tiny" else args.preset, dtype=args.dtype, scale=0.001)
    pages = 1 + math.ceil(args.pool * _demand(requests, clients, args.page_size))
    config = EngineConfig(
        max_context=4096 // scale,
        page_size=args.page_size,
        kv_cache_bytes=pages * cache_bytes_per_page(loaded.config, args.page_size),
        max_sequences=args.rows,
        compile_cache=args.compile_cache,
        lanes=read_lanes(args.lanes, scale),
    )
    return LLM(loaded, engine_config=config)


def _demand(requests: Sequence[TrafficRequest], clients: int, page_size: int) -> float:
    """Pages of `clients` requests at the length they come to, on average."""
    pages = [math.ceil((len(r.prompt) + r.output_tokens) / page_size) for r in requests]
    return clients * sum(pages) / len(pages)


def _row(run: Run) -> dict[str, object]:
    figures = run.figures
    latencies = {name: dataclasses.asdict(found) for name, found in figures.latencies.items()}

    def ms(metric: str, which: str) -> float | None:
        value = latencies[metric][which]
        return None if value is None else value * 1e3

    return {
        "system": run.system,
        "clients": int(run.level),
        "requests_per_second": figures.requests_per_second,
        "output_tokens_per_second": figures.output_tokens_per_second,
        "queue_ms": ms("queue", "mean"),
        "e2e_p95_ms": ms("e2e", "p95"),
        "e2e_p99_ms": ms("e2e", "p99"),
        "ttft_p95_ms": ms("ttft", "p95"),
        "pages_used": figures.peak_pages_used / figures.num_pages if figures.num_pages else None,
        "pages_reserved": figures.peak_pages_reserved / figures.num_pages if figures.num_pages else None,
        "preemptions": figures.preemptions,
        "allocation_success": figures.allocation_success,
        "failed": figures.failed,
        "reported": REPORTED.get(run.system),
    }


if __name__ == "__main__":
    main()
