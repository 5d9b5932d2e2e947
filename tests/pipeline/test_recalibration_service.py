"""A service that calibrates anew from its traffic, with all of its processes. The engine is a fake with a name, and what stages
would make of the traffic is in the store already, so that nothing is computed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from llmjax.pipeline import load, plan
from llmjax.pipeline.recalibration import chain_of, with_data

SHAPE = (
    "{family: llama, vocab_size: 97, hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 16, mlp_size: 48, "
    "max_positions: 128}"
)
PIPELINE = f"""\
runtime: {{platform: cpu}}
stages:
  base: {{uses: model, source: {{random: {{scale: 0.3, config: {SHAPE}}}}}}}
  calibrate: {{data: {{path: held.jsonl}}, samples: 4, sequence_length: 64, recalibrate: {{every: 1s, check: 1s}}}}
  int8: {{uses: quantize, model: base, scheme: w8a16, smoothing: 0.5}}
  gate:
    baseline: base
    candidate: int8
    data: {{path: held.jsonl}}
    outputs: 0
    min_tokens: 50
    limits: [{{metric: loop_rate_increase, max: null}}, {{metric: perplexity_ratio, max: 9}}, {{metric: top1_agreement, min: 0}},
      {{metric: kl, max: 9}}, {{metric: kl_p99, max: 9}}]
  engine: {{model: gate, max_context: 64}}
  serve: {{port: 0, traffic: {{path: traffic.jsonl}}}}
"""
SERVE = """\
import sys
sys.path[:] = {path!r}
from llmjax.pipeline import load
from llmjax.pipeline.service import final_server, run_service
from llmjax.telemetry.logs import configure_logging

configure_logging(verbose=True)
options = {{"file": {file!r}, "log": None, "sets": (), "overlays": (), "values": {{}}, "until": None, "force": ()}}
options |= {{"frozen": False, "trace": None}}
pipeline = load({file!r})
modules = {{"engine_module": "fake_service_engine", "recalibration_module": "llmjax.cli.recalibration_process"}}
sys.exit(run_service(pipeline, final_server(pipeline), engine_job={{"run": options}}, **modules))
"""


def in_store(key: str | None, kind: str, **files: Any) -> None:
    """A result of a stage, made a minute ago."""
    folder = Path(".llmjax/store", kind, str(key))
    folder.mkdir(parents=True)
    for name, content in (files | {"manifest": {}}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    os.utime(folder / "manifest.json", (time.time() - 60,) * 2)


def test_what_was_made_of_the_traffic_is_swapped_in(write: Callable[..., Path], tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [{"prompt_ids": [draw.randrange(97) for _ in range(30)]} for _ in range(6)]
    file = write(PIPELINE)
    (file.parent / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = {"time": time.time(), "endpoint": "completions", "output": "", "output_ids": [1]}
    traffic = "".join(json.dumps(line | row) + "\n" for row in rows[:4])  # all of it is the sample
    (tmp_path / "sample.jsonl").write_text(traffic)
    chain, _ = chain_of(load(file).stages)
    assert chain is not None
    in_store({stage.name: stage.key for stage in plan(load(file)).stages}["calibrate"], "calibrate")
    values = with_data(chain, {}, str(tmp_path / "sample.jsonl"))
    keys = {stage.name: stage.key for stage in plan(load(file, values=values)).stages}
    in_store(keys["calibrate"], "calibrate")
    in_store(keys["int8"], "quantize", model={"name": "int8", "tokenizer": None, "chat_template": None})
    in_store(keys["gate"], "gate", verdict={"passed": True, "checks": []})
    log, path = tmp_path / "log", [str(Path(__file__).resolve().parents[1]), *(entry or "." for entry in sys.path)]
    with log.open("wb") as output:
        code = SERVE.format(path=path, file=str(file))
        service = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
    try:

        def until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 240
            while not condition():
                assert service.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)

        def name() -> str:
            try:
                answer = httpx2.get(Path("url").read_text() + "/v1/models", timeout=60)
            except httpx2.TransportError:
                return ""
            return str(answer.json()["data"][0]["id"]) if answer.status_code == 200 else ""

        until(lambda: Path("url").exists() and name() == "first")
        Path("aside").write_text(traffic)
        Path("aside").rename("traffic.1.jsonl")
        until(lambda: "the candidate passed and serves now" in log.read_text())
        until(lambda: name() == "from-traffic")
        passed = 'llmjax:recalibrations_total{result="passed"} 1.0'
        until(lambda: passed in httpx2.get(Path("url").read_text() + "/metrics", timeout=60).text)
        state = json.loads(Path(".llmjax/recalibration/test.json").read_text())
        assert Path(state["data"]).read_text() == traffic
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.wait()
