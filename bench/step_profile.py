"""What the device does in a steady decode: busy and idle share, kernels by time and count a step, and the gaps between them.

    python -m bench.step_profile --preset llama-8b --batch 64 --kv-gib 20
    python -m bench.step_profile --preset llama-8b --batch 256 --joining 1792 --tokens-per-step 2048 --kv-gib 40

Every row decodes, and with `--joining` a prompt of so many tokens joins each launch, which is one step then. `--launches` of them
are recorded by JAX's profiler, from an idle device to an idle device, and read back from its xplane file (on a GPU the streams'
kernels; on a CPU the operations of XLA's thread pool, which only shows that the bench works). Two figures of idleness, because
recording costs time:

- idle: 1 - union of the kernel intervals / the window from the first kernel to the last one, as recorded;
- idle_untraced: 1 - the recorded busy time of a step / the wall time of a step without the profiler.

XLA runs its CUDA graphs as single kernels while a profiler is on, unless it is told not to; here they stay graphs, as in
serving, and `--no-graphs` shows the difference.

Copies between host and device are listed but do not count as busy. Kernels that differ by a trailing number count as one.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.rows import Rows
from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.llm import LLM
from llmjax.model.checkpoint.load import load_model
from llmjax.sampling_params import SamplingParams

HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")
GAP_CLASSES_US = (1.0, 2.0, 5.0, 20.0, 100.0)
SETTLE_LAUNCHES = 4  # after the prompts, before anything is timed
JOINED_ROWS = 4  # for prompts that join: the host reads of their end a launch later


@dataclasses.dataclass(frozen=True)
class Interval:
    """One kernel on the device; times in ns."""

    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """Kernels of one name: how often in all, and their summed time in ns."""

    name: str
    count: int
    total: float


@dataclasses.dataclass(frozen=True)
class Gap:
    """Gaps between one kernel and another in which the device had no kernel: how often, summed and longest, in ns."""

    before: str
    after: str
    count: int
    total: float
    longest: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """A window of device time, in ns, from its first kernel's start to its last one's end.

    Attributes:
        busy: length of the union of the kernels; kernels of several streams at once count once.
        kernels: by summed time, longest first; copies between host and device too.
        gaps: by summed time, longest first.
        gap_classes: (upper limit in us, count, summed ns) of single gaps; the last limit is infinite.
    """

    window: float
    busy: float
    kernels: list[KernelTime]
    gaps: list[Gap]
    gap_classes: list[tuple[float, int, float]]

    @property
    def idle(self) -> float:
        """Share of the window without a kernel."""
        return 1.0 - self.busy / self.window if self.window else 0.0


def family(name: str) -> str:
    """A kernel's name without what only numbers it: `loop_fusion_12` and `loop_fusion_7` are one."""
    return re.sub(r"([._]\d+)+$", "", name) or name


def analyse(intervals: Iterable[Interval]) -> Profile:
    """The profile of kernels in any order, of any number of streams. No kernels make an empty window."""
    everything = sorted(intervals, key=lambda i: (i.start, i.end))
    totals: dict[str, list[float]] = collections.defaultdict(list)
    for interval in everything:
        totals[family(interval.name)].append(interval.end - interval.start)
    kernels = sorted((KernelTime(name, len(t), sum(t)) for name, t in totals.items()), key=lambda k: -k.total)
    work = [i for i in everything if not i.name.startswith(HOST_COPIES)]
    if not work:
        return Profile(0.0, 0.0, kernels, [], [])

    between: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    last = work[0]  # of those so far, the one that ends last
    for interval in work[1:]:
        if interval.start > last.end:
            between[family(last.name), family(interval.name)].append(interval.start - last.end)
        if interval.end > last.end:
            last = interval
    window = last.end - work[0].start
    gaps = sorted((Gap(*names, len(t), sum(t), max(t)) for names, t in between.items()), key=lambda g: -g.total)
    single = [t for times in between.values() for t in times]
    classes = []
    low = 0.0
    for high in (*GAP_CLASSES_US, float("inf")):
        inside = [t for t in single if low < t / 1e3 <= high]
        classes.append((high, len(inside), sum(inside)))
        low = high
    return Profile(window, window - sum(single), kernels, gaps, classes)


def read_trace(folder: Path) -> list[Interval]:
    """The device's kernels in the newest xplane file under `folder`.

    Raises:
        ValueError: no file, or no kernel in it.
    """
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"{folder}: the profiler left no xplane file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's event types name no module
        planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
        found = [
            _interval(event)
            for plane in planes
            if plane.name.startswith("/device:GPU:")
            for line in plane.lines
            if line.name.startswith("Stream #")  # the other lines (modules, operations) repeat the kernels
            for event in line.events
        ]
        if not found:  # a CPU has no device plane: its operations are host events that name their HLO
            found = [
                _interval(event)
                for plane in planes
                if plane.name == "/host:CPU"
                for line in plane.lines
                for event in line.events
                if any(key == "hlo_op" for key, _ in event.stats)
            ]
    if not found:
        lines = [f"{plane.name}: {', '.join(line.name for line in plane.lines)}" for plane in planes]
        raise ValueError(f"{files[-1]}: no kernels; its planes and lines are {lines}")
    return found


def _interval(event: Any) -> Interval:
    return Interval(event.name, event.start_ns, event.start_ns + event.duration_ns)


def main() -> None:
    args = _arguments()
    # Read when the backend starts, which `Rows` does; there is no other way to hand it over.
    graphs = f"--xla_enable_command_buffers_during_profiling={str(args.graphs).lower()}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {graphs}".strip()
    rows = Rows(args.json)
    output = (SETTLE_LAUNCHES + 2 * args.launches + 4) * args.decode_steps
    sequences = args.batch + (JOINED_ROWS if args.joining else 0)
    config = EngineConfig(
        max_context=max(args.prompt + output, args.joining + 1),
        page_size=args.page_size,
        kv_cache_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
        max_sequences=sequences,
        max_tokens_per_step=max(args.tokens_per_step, sequences),
        prefill_chunk=args.tokens_per_step,
        decode_steps=args.decode_steps,
        row_buckets=tuple(sorted({args.batch, sequences})),
        token_buckets=(max(args.tokens_per_step, sequences),),
        compile_cache=args.compile_cache,
        prefix_cache=False,  # the same prompts again must cost what they did
    )
    loaded = load_model(path=args.model, random=None if args.model else args.preset, dtype=args.dtype, scale=0.001)
    engine = LLM(loaded, engine_config=config).engine
    random = np.random.default_rng(args.batch)
    sampling = SamplingParams(
        max_tokens=output, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, ignore_eos=True
    )
    for _ in range(args.batch):
        engine.add_request([int(i) for i in random.integers(0, engine.model_config.num_tokens, args.prompt)], sampling)

    full = args.batch * args.decode_steps
    while _step(engine) < full:  # prompts, and launches in which not every row decodes
        pass
    for _ in range(SETTLE_LAUNCHES):
        _step(engine)
    launches = range(args.launches)
    steps = 1 if args.joining else args.decode_steps  # of a launch
    joining = random.integers(0, engine.model_config.num_tokens, (2 * args.launches, args.joining)).tolist()
    one_token = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

    def launch() -> int:
        if args.joining:
            engine.add_request(joining.pop(), one_token)
        return _step(engine)

    started = time.perf_counter()
    tokens = [launch() for _ in launches]
    _drain(engine)
    untraced = (time.perf_counter() - started) / args.launches / steps
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.keep or scratch)
        with jax.profiler.trace(str(folder), profiler_options=_options()):
            started = time.perf_counter()
            for _ in launches:
                tokens.append(launch())
            _drain(engine)
            traced = (time.perf_counter() - started) / args.launches / steps
        profile = analyse(read_trace(folder))
    # The first of the recorded calls reads what the drain before it left; every one launches all rows.
    steady = args.joining or all(count in (0, full, 2 * full) for count in tokens)
    assert steady, f"not a steady decode: tokens a call {tokens}, expected {full}"
    _report(rows, profile, args, args.launches * steps, untraced, traced)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--model", help="a model's path, instead of a preset")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--joining", type=int, default=0, help="tokens of a prompt that joins each launch")
    parser.add_argument("--launches", type=int, default=12)
    parser.add_argument("--decode-steps", type=int, default=8)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype")
    parser.add_argument("--compile-cache")
    parser.add_argument("--top", type=int, default=25, help="kernels and gaps printed, at most")
    parser.add_argument("--keep", help="folder that keeps the profiler's files")
    parser.add_argument("--json")
    return parser.parse_args()


def _step(engine: Engine) -> int:
    """One turn of the engine; the tokens it brought."""
    return sum(len(ids) for output in engine.step(closed=True) for ids in output.new_token_ids)


def _drain(engine: Engine) -> None:
    """Wait for every launch and read it; the next `step` hands the outputs out."""
    engine.update_params(engine.runner.params)


def _options() -> Any:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # the host would slow down and make gaps of its own
    options.host_tracer_level = 1
    return options


def _report(rows: Rows, profile: Profile, args: argparse.Namespace, steps: int, untraced: float, traced: float) -> None:
    busy_ms = profile.busy / steps / 1e6
    for kernel in profile.kernels[: args.top]:
        us = kernel.total / steps / 1e3
        rows.add(
            kernel=kernel.name[:70], us_a_step=us, count_a_step=kernel.count / steps,
            us_each=kernel.total / kernel.count / 1e3, share=kernel.total / profile.busy if profile.busy else None,
        )  # fmt: skip
    _gap_rows(rows, profile.gaps[: args.top], steps)
    for high, count, total in profile.gap_classes:
        rows.add(gaps_up_to_us=str(high), count_a_step=count / steps, us_a_step=total / steps / 1e3)
    summary: dict[str, Any] = {
        "model": args.model or args.preset, "batch": args.batch, "joining": args.joining, "steps": steps,
        "kernels_a_step": sum(k.count for k in profile.kernels) / steps,
        "busy_ms_a_step": busy_ms, "window_ms_a_step": profile.window / steps / 1e6,
        "idle": profile.idle, "idle_untraced": 1.0 - busy_ms / (untraced * 1e3),
        "untraced_step_ms": untraced * 1e3, "traced_step_ms": traced * 1e3,
    }  # fmt: skip
    rows.add(**summary)
    rows.close(["kernel", "us_a_step", "count_a_step", "us_each", "share"])
    print(
        "\n".join(
            f"{name:>17}: {value:.4f}" if isinstance(value, float) else f"{name:>17}: {value}" for name, value in summary.items()
        )
    )


def _gap_rows(rows: Rows, gaps: Sequence[Gap], steps: int) -> None:
    for gap in gaps:
        rows.add(
            gap_after=gap.before[:60], gap_before=gap.after[:60], us_a_step=gap.total / steps / 1e3,
            count_a_step=gap.count / steps, longest_us=gap.longest / 1e3,
        )  # fmt: skip


if __name__ == "__main__":
    main()
