"""What HTTP costs: the same traffic on the engine in process and on `llmjax serve` over HTTP, streamed, tokenizer on.

    python -m bench.serve --preset llama-8b --kv-gib 60 --json out.json
    python -m bench.serve --preset tiny --rates 20 --requests 24 --streams 8 --rounds 2 --rows 8 --context 256    # a CPU
    python -m bench.serve --model /models/Llama-3.1-8B-Instruct

- open loop: Poisson arrivals (`default_rng(7)`) of 160 requests with the lengths of the documented mixed trace, at each rate; the
  P99 of the time to the first token and of the inter-token latency over HTTP should be within 10 % of the engine's own;
- streams: 256 clients without a pause, prompt and output 128: HTTP should cost less than 5 % of the tokens a second.

Both sides run the same pipeline file through `llmjax bench` and `llmjax serve`, one after the other, in processes of their own:
the client of the server is not the server's process. Requests are texts on both sides, so that both tokenise. Random weights have
no tokenizer: they get one made for their vocabulary (`bench/made_tokenizer.py`), with which texts have exactly the lengths drawn.
The prefix cache is off. `--workers` is the number of processes that speak HTTP; the rows name it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.made_tokenizer import text_of, write_tokenizer
from bench.rows import Rows
from llmjax.loadtest.target import TrafficRequest
from llmjax.loadtest.workload import Lengths, Synthetic
from llmjax.model.checkpoint.presets import PRESETS

TINY = {
    "family": "llama", "vocab_size": 1024, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "mlp_size": 128, "max_positions": 4096,
}  # fmt: skip
COLUMNS = (
    "case", "load", "workers", "output_tokens_per_second", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms",
    "tpot_p99_ms", "e2e_p99_ms", "failed",
)  # fmt: skip
_READY = 600.0  # seconds for a start
_LLMJAX = [sys.executable, "-c", "from llmjax.cli import main; main()"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    args = _arguments(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = _pipeline(args, folder)
        loads = _loads(args, folder)
        with _server(file, args, folder) as url:
            over_http = [_bench(["serve", "--base-url", url, *load], folder) for load in loads]
        in_process = [_bench(["latency", str(file), *load], folder) for load in loads]
    rows = Rows(args.json)  # it starts JAX, and the card was the others' until now
    for case, runs in (("engine", in_process), ("http", over_http)):
        for run in (run for part in runs for run in part):
            rows.add(**_row(case, run, args.workers if case == "http" else 0))
    open_loop, streams = (list(zip(*pair, strict=True)) for pair in zip(in_process, over_http, strict=True))
    for engine, http in open_loop:
        ratios = {f"{metric}_p99_ratio": _p99(http, metric) / _p99(engine, metric) for metric in ("ttft", "itl")}
        rows.add(load=engine["load"], workers=args.workers, **ratios, wanted="at most 1.1")
    ((engine, http),) = streams
    cost = 1 - http["figures"]["output_tokens_per_second"] / engine["figures"]["output_tokens_per_second"]
    rows.add(load=engine["load"], workers=args.workers, http_cost=cost, wanted="below 0.05")
    rows.close(COLUMNS)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="llama-8b", help="random weights of this shape, or tiny")
    parser.add_argument("--model", help="a real model's folder instead")
    parser.add_argument("--rates", default="8,16,32", help="requests a second of the open loop")
    parser.add_argument("--requests", type=int, default=160, help="of the open loop")
    parser.add_argument("--streams", type=int, default=256, help="clients of the closed loop")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each of them")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=4352)
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--decode-steps", type=int, help="tokens of a launch; 1 is an event a token")
    parser.add_argument("--workers", type=int, default=1, help="processes that speak HTTP")
    parser.add_argument("--dtype")
    parser.add_argument("--artifacts", help="where compiled programs are kept")
    parser.add_argument("--json")
    return parser.parse_args(argv)


def _vocab_size(args: argparse.Namespace) -> int:
    return int(TINY["vocab_size"]) if args.preset == "tiny" else PRESETS[args.preset].vocab_size


def _pipeline(args: argparse.Namespace, folder: Path) -> Path:
    """The file that both sides run (JSON is YAML)."""
    source: dict[str, Any] = {"path": args.model}
    if args.model is None:
        made = write_tokenizer(folder / "tokenizer", _vocab_size(args))
        shape = {"config": TINY} if args.preset == "tiny" else {"preset": args.preset}
        source = {"random": {**shape, "scale": 0.001, "tokenizer": str(made)}}
    batching: dict[str, Any] = {"max_sequences": args.rows}
    if args.decode_steps is not None:
        batching["decode_steps"] = args.decode_steps
    cache: dict[str, Any] = {"prefix_cache": False}
    if args.kv_gib is not None:
        cache["memory"] = f"{int(args.kv_gib * 2**20)}KiB"
    serve: dict[str, Any] = {"port": 0, "limits": {"waiting": 4096}}
    if args.workers != 1:
        serve["http_workers"] = args.workers
    stages = {
        "model": {"source": source} | ({} if args.dtype is None else {"dtype": args.dtype}),
        "engine": {"max_context": args.context, "kv_cache": cache, "batching": batching},
        "serve": serve,
    }
    file = folder / "pipeline.yaml"
    whole = {"apiVersion": "llmjax/v1", "name": "bench", "stages": stages}
    file.write_text(json.dumps(whole | ({} if args.artifacts is None else {"artifacts": str(Path(args.artifacts).resolve())})))
    return file


def _loads(args: argparse.Namespace, folder: Path) -> list[list[str]]:
    """Options of `llmjax bench` for the open loop and for the streams, and the texts they name."""
    longest = args.context - 1
    prompts = Lengths(256, 1.0, 16, min(3072, longest * 3 // 4))
    mixed = Synthetic(prompts, Lengths(128, 0.8, 8, min(1024, longest // 4))).requests(args.requests, 2**31)
    each = min(128, longest // 2)
    count = args.streams * args.rounds
    alike = Synthetic(Lengths(each), Lengths(each), seed=1).requests(count, 2**31)
    rates = [part for rate in args.rates.split(",") for part in ("--request-rate", rate)]
    return [
        [*rates, "--num-prompts", str(args.requests), "--dataset", str(_write(folder / "mixed.jsonl", mixed, args))],
        [
            "--concurrency",
            str(args.streams),
            "--num-prompts",
            str(count),
            "--dataset",
            str(_write(folder / "alike.jsonl", alike, args)),
        ],
    ]


def _write(path: Path, requests: Sequence[TrafficRequest], args: argparse.Namespace) -> Path:
    """The requests as texts."""
    if args.model is None:
        texts = [text_of([int(token) for token in request.prompt], _vocab_size(args)) for request in requests]
    else:
        from llmjax.engine.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(args.model)
        texts = [tokenizer.decode([token % tokenizer.vocab_size for token in request.prompt]) for request in requests]
    lines = (json.dumps({"prompt": text, "output_tokens": r.output_tokens}) for text, r in zip(texts, requests, strict=True))
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


@contextlib.contextmanager
def _server(file: Path, args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """`llmjax serve` in a process of its own; its URL once it answers."""
    log = folder / "serve.log"
    with (
        log.open("wb") as out,
        subprocess.Popen([*_LLMJAX, "serve", str(file), "--log", "json"], stdout=out, stderr=out) as process,
    ):
        try:
            deadline = time.monotonic() + _READY
            while (url := _url(log)) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
                time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _url(log: Path) -> str | None:
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            if url := json.loads(line).get("url"):
                return str(url)
    return None


def _bench(command: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """The runs of one `llmjax bench`; its log goes on to stderr."""
    report = folder / "report.html"
    done = subprocess.run([*_LLMJAX, "bench", *command, "--report", str(report)], stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        raise SystemExit(f"llmjax bench {' '.join(command)} failed")
    runs: list[dict[str, Any]] = json.loads(report.with_suffix(".json").read_text("utf-8"))["runs"]
    return runs


def _row(case: str, run: dict[str, Any], workers: int) -> dict[str, Any]:
    figures = run["figures"]
    row: dict[str, Any] = {"case": case, "load": run["load"], "workers": workers}
    row |= {name: figures[name] for name in ("requests_per_second", "output_tokens_per_second", "completed")}
    for metric in ("ttft", "itl", "itl_token", "tpot", "e2e"):
        for which in ("p50", "p90", "p99"):
            value = figures["latencies"][metric][which]
            row[f"{metric}_{which}_ms"] = None if value is None else value * 1e3
    return row | {"failed": sum(figures["errors"].values()), "errors": figures["errors"]}


def _p99(run: dict[str, Any], metric: str) -> float:
    value = run["figures"]["latencies"][metric]["p99"]
    return float("nan") if value is None else float(value)


if __name__ == "__main__":
    main()
