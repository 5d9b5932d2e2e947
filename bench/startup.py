"""Start to ready: a new process each time, first without anything kept, then with what the first one left.

    python -m bench.startup --preset llama-8b --json out.json
    python -m bench.startup --preset tiny --platform cpu

A row a start: `ready_seconds` from the start of the process to the first step it could take, `import_seconds` and
`device_seconds` of it, then the engine's own phases, which run beside each other: each has its first second and its last.
`planned_mib` and `peak_mib` are the memory plan without its reserve, and the device's peak. `processor_seconds` are those of the
process and of the ones that lowered for it, over all cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.rows import Rows

TINY = {
    "family": "llama", "vocab_size": 512, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "mlp_size": 128, "max_positions": 512, "dtype": "float32",
}  # fmt: skip

RESOURCES = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def main() -> None:
    args = _arguments()
    if args.child:
        _child(args)
        return
    starts = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cold", *("warm" for _ in range(args.warm))):
            starts.append({"start": kind, **_start(args.compile_cache or folder)})
    rows = Rows(args.json)  # after the starts: it starts JAX, and the device has one owner at a time
    for start in starts:
        rows.add(preset=args.preset, rows=args.rows, **start)
    rows.close(["start", "ready_seconds", "import_seconds", "device_seconds", "planned_mib", "peak_mib", "from_store", "lowered"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="llama-8b", help="a preset's name, or tiny")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--warm", type=int, default=2, help="starts after the cold one")
    parser.add_argument("--compile-cache", help="a folder to keep; by default an empty one that goes away")
    parser.add_argument("--json")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # when its process was started, by time.time
    return parser.parse_args()


def _start(cache: str) -> dict[str, Any]:
    arguments = [*sys.argv[1:], "--child", repr(time.time()), "--compile-cache", cache]
    done = subprocess.run([sys.executable, "-m", "bench.startup", *arguments], stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def _child(args: argparse.Namespace) -> None:
    import jax

    from llmjax.engine.backend import configure_backend
    from llmjax.engine.llm import LLM
    from llmjax.model.config import ModelConfig

    imported = time.time()
    configure_backend(platform=args.platform)
    device = jax.devices()[0]
    initialised = time.time()
    llm = LLM(
        random=ModelConfig(**TINY) if args.preset == "tiny" else args.preset,  # type: ignore[arg-type]
        max_sequences=args.rows,
        max_context=args.max_context,
        kv_cache_bytes=None if args.kv_gib is None else int(args.kv_gib * 2**30),
        compile_cache=args.compile_cache,
    )
    ready = time.time()
    engine = llm.engine
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    spans: dict[str, list[float]] = {}
    for phase in engine.startup.phases:
        first, last = spans.get(phase.name, (phase.start, phase.end))
        spans[phase.name] = [round(min(first, phase.start), 3), round(max(last, phase.end), 3)]
    row = {
        "ready_seconds": ready - args.child,
        "import_seconds": imported - args.child,
        "device_seconds": initialised - imported,
        "phases": spans,
        "processor_seconds": sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, RESOURCES)),
        "compile_seconds": {program.name: round(program.compile_seconds, 2) for program in engine.programs},
        "programs": len(engine.programs),
        "from_store": sum(program.source == "store" for program in engine.programs),
        "lowered": sum(program.source != "store" for program in engine.programs),
        "pages": engine.memory.num_pages,
        "planned_mib": engine.memory.total / 2**20,
        "peak_mib": None if peak is None else peak / 2**20,
        "memory": engine.memory.text(),
    }
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
