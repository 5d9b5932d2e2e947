"""Device time of every operation at the shapes of a decode step: our candidates, the reference, and peers, complete and checked.

    python -m bench.kernels --ops dense,paged_attention --shapes llama-8b --budget 500 --tune --json out.json

Every candidate's results are compared with the float32 reference; a wrong one is reported and never wins. Free pages, the null
page and the slots behind each row's end hold NaN. A rate above the memory's own is INVALID. How time is taken is told in
`bench/kernel_timing.py`.

`--tune` writes the winners (the reference where it wins, too) into the device's table, or into the file it is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.flash_cases import FLASH_GROUPS
from bench.int8_cases import INT8_GROUPS
from bench.kernel_cases import GROUPS as STEP_GROUPS
from bench.kernel_cases import Case, Group
from bench.kernel_peers import peers
from bench.kernel_timing import Measured, config_fields, floor_seconds, run_group, winner
from bench.rows import Rows, command_line
from pallas_kernels import tuning
from pallas_kernels.dispatch import REFERENCE
from pallas_kernels.matmul import DENSE

GROUPS = {**STEP_GROUPS, **FLASH_GROUPS, **INT8_GROUPS}

STEP_GOAL_MS = {("llama-8b", 256): 6.2}  # all matmuls of a step

Outcome = tuple[Case, Measured, Measured | None]  # a case, its winner, and the reference


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    deadline = time.monotonic() + args.budget
    rows = Rows(args.json)
    seed = int(np.random.SeedSequence().generate_state(1)[0] >> 1) if args.seed is None else args.seed
    device = tuning.target()
    rows.add(seed=seed)
    if args.tune and device is None:
        raise SystemExit("--tune needs a GPU: there is no table for a CPU")
    command = command_line(["python", "-m", "bench.kernels", *(sys.argv[1:] if argv is None else argv)])
    groups = [_of_rows(group, args.rows) for model in args.shapes for name in args.ops for group in GROUPS[name](model)]
    waiting = sorted((g for g in groups if g.cases and re.search(args.match, g.name)), key=lambda group: group.rank)
    entries: dict[str, list[tuning.Entry]] = {}
    outcomes: list[Outcome] = []
    while waiting and time.monotonic() < deadline:
        group = waiting.pop(0)
        found = run_group(
            group, seed=seed, launch_seconds=args.launch_ms / 1e3, limit=args.candidates,
            peers=(lambda case: ()) if args.no_peers else peers, deadline=deadline, avoid=args.avoid,
        )  # fmt: skip
        earlier = {name: list(known) for name, known in entries.items()}
        together: list[tuple[Case, tuning.Key | None, list[Measured]]] = []
        for case, key, measured in found:
            _report(rows, case, measured, device)
            best, xla = winner(measured)
            if best is None:
                continue
            outcomes.append((case, best, xla))
            together.append((case, key, measured))
            # Cases of a group that a key does not tell apart (a full batch, one row in it) choose together. Those of other
            # groups (a window, slopes) follow the plain one, whose choice it is.
            same = [(case, measured) for case, other, measured in together if other == key]
            known = earlier.get(case.operation.name, [])
            best, xla = winner(*(measured for _, measured in same))
            if key is not None and best is not None and xla is not None and all(entry["key"] != key for entry in known):
                kept = [entry for entry in entries.get(case.operation.name, []) if entry["key"] != key]
                entries[case.operation.name] = [*kept, _entry(same[0][0], best, xla, key, command)]
                if args.tune and device is not None:  # at once: a run that is cut off keeps what it has
                    tuning.save(tuning.path_of(device) if args.tune is True else Path(args.tune), device, entries)
    if waiting:
        rows.add(left_out=[group.name for group in waiting])
    _report_steps(rows, outcomes)
    rows.close(["case", "floor_us", "best_us", "TBs", "TFLOPs", "xla_us", "must", "goal", "best"])


def _of_rows(group: Group, rows: Sequence[int]) -> Group:
    return dataclasses.replace(group, cases=tuple(case for case in group.cases if not rows or case.rows in rows))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ops", type=names, default=list(GROUPS))
    parser.add_argument("--shapes", type=names, default=["llama-8b", "qwen2.5-1.5b"])
    parser.add_argument("--match", default="", help="a regular expression that the names of the groups must contain")
    parser.add_argument("--rows", type=lambda text: [int(n) for n in names(text)], default=[], help="tokens of the calls timed")
    parser.add_argument("--avoid", default="", help="a regular expression for labels of candidates that are left out")
    parser.add_argument("--candidates", type=int, default=12, help="configurations tried for a shape")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds; what matters most comes first")
    parser.add_argument("--launch-ms", type=float, default=20.0, help="device time of one timed launch")
    parser.add_argument("--tune", nargs="?", const=True, help="write the device's table, or this file")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json")
    return parser.parse_args(argv)


def _report(rows: Rows, case: Case, measured: Sequence[Measured], device: str | None) -> None:
    """A row for each contender, and the case's row of the table."""
    for one in measured:
        figures = {"us": one.seconds * 1e6, **_rates(case, one), "spread": one.spread, "error": one.error}
        known = {name: value for name, value in figures.items() if not math.isnan(value)}
        rows.add(contender=one.contender.label, of=f"{case.model} {case.name}", **known, problem=one.problem)
    best, xla = winner(measured)
    if best is None:
        rows.add(case=f"{case.model} {case.name}", best="nothing ran")
        return
    if case.must is None:
        must = f"beat xla {_verdict(best is not xla)}"
    else:
        must = f"{case.must} {_verdict(_rate(case, best) >= case.must)}"
    floor = floor_seconds(case, device)
    rows.add(
        case=f"{case.model} {case.name}",
        floor_us=None if floor is None else floor * 1e6,
        best_us=best.seconds * 1e6,
        **_rates(case, best),
        xla_us=None if xla is None else xla.seconds * 1e6,
        must=must,
        goal=None if case.goal is None else f"{case.goal} {_verdict(_rate(case, best) >= case.goal)}",
        best=best.contender.label,
    )


def _report_steps(rows: Rows, outcomes: Sequence[Outcome]) -> None:
    """All matmuls of a step in microseconds, for each model and number of tokens whose every matmul was timed."""
    steps: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        case, _, xla = outcome
        if case.operation is DENSE and xla is not None:
            steps.setdefault((case.model, case.rows), []).append(outcome)
    for (model, tokens), found in steps.items():
        if len(found) < 5:  # qkv, out, gate_up, down, head
            continue
        best = sum(case.count * one.seconds for case, one, _ in found)
        xla = sum(case.count * one.seconds for case, _, one in found if one is not None)
        goal = STEP_GOAL_MS.get((model, tokens))
        rows.add(
            case=f"{model} matmuls of a step, {tokens} tokens", best_us=best * 1e6, xla_us=xla * 1e6,
            TBs=sum(case.count * case.bytes for case, _, _ in found) / best / 1e12,
            goal=None if goal is None else f"{goal} ms {_verdict(best * 1e3 <= goal)}",
        )  # fmt: skip


def _entry(case: Case, best: Measured, xla: Measured, key: Mapping[str, int | str], command: str) -> tuning.Entry:
    contender = best.contender
    return {
        "key": dict(key),
        "implementation": contender.implementation or REFERENCE,
        "config": {} if contender.config is None else config_fields(contender.config),
        "microseconds": round(best.seconds * 1e6, 2),
        "xla_microseconds": round(xla.seconds * 1e6, 2),
        "bytes_per_second": float(f"{case.bytes / best.seconds:.4g}"),
        "date": datetime.date.today().isoformat(),
        "command": command,
    }


def _rate(case: Case, measured: Measured) -> float:
    """TB/s."""
    return case.bytes / measured.seconds / 1e12


def _rates(case: Case, measured: Measured) -> dict[str, float]:
    """TB/s, and TFLOP/s of a case that is bound by them."""
    return {"TBs": _rate(case, measured)} | ({"TFLOPs": case.flops / measured.seconds / 1e12} if case.flops else {})


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


if __name__ == "__main__":
    main()
