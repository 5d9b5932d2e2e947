"""A service that calibrates anew from its own traffic, as a user starts it: all of its processes, with a tiny random model."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

SHAPE = (
    "{family: llama, vocab_size: 97, hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 16, mlp_size: 48, "
    "max_positions: 128}"
)
PIPELINE = f"""\
apiVersion: llmjax/v1
name: tiny
runtime: {{platform: cpu}}
stages:
  base: {{uses: model, source: {{random: {{scale: 0.3, config: {SHAPE}}}}}}}
  calibrate: {{data: {{path: held.jsonl}}, samples: 4, sequence_length: 48, recalibrate: {{every: 1s, check: 1s}}}}
  int8: {{uses: quantize, model: base, scheme: w8a16, smoothing: 0.5}}
  gate:
    baseline: base
    candidate: int8
    data: {{path: held.jsonl}}
    outputs: 0
    min_tokens: 50
    limits: [{{metric: loop_rate_increase, max: null}}, {{metric: perplexity_ratio, max: 9}}, {{metric: top1_agreement, min: 0}},
      {{metric: kl, max: 9}}, {{metric: kl_p99, max: 9}}]
  engine:
    model: gate
    max_context: 64
    kv_cache: {{memory: 64KiB}}
    batching: {{max_sequences: 1, max_tokens_per_step: 64, buckets: {{tokens: 64}}}}
  serve: {{port: 0, traffic: {{path: traffic.jsonl, sample: 100%}}}}
"""


@pytest.mark.slow
def test_a_service_serves_what_it_made_of_its_traffic(tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [{"prompt_ids": [draw.randrange(97) for _ in range(30)]} for _ in range(6)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(PIPELINE)
    path = [entry or "." for entry in sys.path]
    code = f"import sys; sys.path[:] = {path!r}; sys.argv[1:] = ['run', 'tiny.yaml']; from llmjax.cli import main; main()"
    log = tmp_path / "log"
    with log.open("wb") as file:
        service = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=file, stderr=file)
    try:

        def until(text: str) -> str:
            deadline = time.monotonic() + 240
            while text not in (said := log.read_text()):
                assert service.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.1)
            return said

        until("serve: done")
        url = next(word for word in until("url http").split() if word.startswith("http"))
        for row in rows[:4]:
            body = {"prompt": row["prompt_ids"], "max_tokens": 4}
            assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        until("the candidate passed and serves now")
        series = httpx2.get(f"{url}/metrics", timeout=60).text
        assert 'llmjax:recalibrations_total{result="passed"} 1.0' in series
        assert httpx2.get(f"{url}/readyz", timeout=60).status_code == 200
        state = json.loads((tmp_path / ".llmjax/recalibration/tiny.json").read_text())
        assert Path(state["data"]).is_file()
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.wait()
