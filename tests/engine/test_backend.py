"""Setting JAX up: what is too late, and what cannot be had, is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from llmjax.engine import backend
from llmjax.errors import BackendError


@pytest.fixture
def started_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backend_started", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("started_on_gpu")
def test_another_memory_setting_after_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"already started with another memory setting than memory_fraction 0\.5"):
        backend.configure_backend(memory_fraction=0.5)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.50")
    backend.configure_backend(memory_fraction=0.5)  # the same setting is no quarrel
    with pytest.raises(BackendError, match="already started on cuda, the pipeline asks for cpu"):
        backend.configure_backend(platform="cpu")
    backend.configure_backend(platform="cuda")


def test_a_platform_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    with pytest.raises(BackendError, match="already started on cpu, the pipeline asks for cuda"):
        backend.configure_backend(platform="cuda")
    with pytest.raises(BackendError, match="'tpu' is unknown"):
        backend.configure_backend(platform="tpu")
    monkeypatch.setattr(backend, "_backend_started", lambda: False)
    monkeypatch.setattr(jax, "devices", _no_device)
    before = jax.config.jax_platforms
    with pytest.raises(BackendError, match="platform cuda is not available: no such device"):
        backend.configure_backend(platform="cuda")
    assert jax.config.jax_platforms == before


def _no_device() -> None:
    raise RuntimeError("no such device\nand a long explanation")


def test_the_memory_share_is_handed_over_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_backend_started", lambda: False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.75")
    backend.configure_backend(memory_fraction=0.9)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ  # both set is an error of JAX


def test_a_compile_cache_that_cannot_be_made_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    before = jax.config.jax_compilation_cache_dir
    backend.use_compile_cache(blocked / "cache")
    assert "cannot be made" in caplog.text
    assert jax.config.jax_compilation_cache_dir == before


def test_a_gpu_that_is_not_there_is_not_replaced_by_the_cpu_beside_it() -> None:
    code = "from llmjax.engine.backend import configure_backend; configure_backend(platform='cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode == 0:
        pytest.skip("there is a GPU")
    assert "BackendError: platform cuda is not available: " in done.stderr.splitlines()[-1]
