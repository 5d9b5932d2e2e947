"""A start: what runs beside the loading, what other processes lower, and what happens when one of them does not."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fake_checkpoints import random_weights, tiny_config, write_hf
from tiny_models import CONFIGS, naive_greedy, random_params

from llmjax.engine import compile_pool, startup
from llmjax.engine import compile_programs as compile_programs_module
from llmjax.engine.compile_pool import LoweringFailed, LoweringPool, useful_workers
from llmjax.engine.compile_programs import (
    FEW_MATMULS,
    FEW_ROWS,
    Key,
    Shapes,
    abstract,
    compile_programs,
    export,
    lower,
    lower_exported,
    step_function,
)
from llmjax.engine.compile_worker import Target, _export
from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.errors import BackendError, LlmjaxError, ModelError
from llmjax.model.checkpoint.load import PendingParams, load_model, param_structs
from llmjax.model.checkpoint.presets import preset_config
from llmjax.model.layers import abstract_params
from llmjax.model.registry import get_model
from llmjax.quantization.quantize import plan_quantization, quantize_params
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.startup import Timeline
from pallas_kernels import smoke

CONFIG = CONFIGS["llama"]
OPTIONS: dict[str, Any] = {
    "max_context": 64, "max_sequences": 2, "max_tokens_per_step": 16, "decode_steps": 1, "row_buckets": (2,),
    "token_buckets": (16,),
}  # fmt: skip


def shapes(config: Any = CONFIG, **options: Any) -> Shapes:
    resolved = EngineConfig(**OPTIONS | options).resolved(gpu=False, model_max_context=config.max_positions)
    return Shapes(config, param_structs(config), resolved, 9)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shapes_known_before_loading_are_those_of_the_weights(name: str) -> None:
    config = CONFIGS[name]
    assert param_structs(config) == abstract_params(config)
    assert jax.tree.structure(param_structs(config)) == jax.tree.structure(random_params(config))
    assert param_structs(config) == abstract(random_params(config))


def test_an_engine_is_made_while_its_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """And computes what it would have."""
    params = random_params(CONFIG)
    compiled = threading.Event()

    def load() -> dict[str, Any]:
        assert compiled.wait(300)
        return params

    def compile_and_tell(*args: Any, **options: Any) -> Any:
        made = compile_programs(*args, **options)
        compiled.set()
        return made

    monkeypatch.setattr(startup, "compile_programs", compile_and_tell)
    engine = Engine(CONFIG, PendingParams(CONFIG, load), None, EngineConfig(**OPTIONS))
    names = set(engine.startup.seconds())
    assert names >= {"plan memory", "lower", "compile", "load weights", "wait for weights", "allocate", "warm up", "self check"}
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=6, temperature=0.0))
    tokens: list[int] = []
    while engine.has_unfinished:
        for output in engine.step(closed=True):
            tokens += output.new_token_ids[0]
    assert tokens == naive_greedy(params, [5, 6, 7], CONFIG, 6)


def test_what_loading_raises_comes_out_of_the_engine() -> None:
    def load() -> dict[str, Any]:
        raise ModelError("the file is cut off")

    with pytest.raises(ModelError, match="the file is cut off"):
        Engine(CONFIG, PendingParams(CONFIG, load), None, EngineConfig(**OPTIONS))


def test_a_start_that_fails_does_not_read_the_weights_to_their_end(tmp_path: Path) -> None:
    """The process could not end before: the reading thread stops at the next tensor."""
    config = tiny_config()
    write_hf(tmp_path / "model", config, random_weights(config))
    failed = threading.Event()
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        assert failed.wait(60)

    loaded = load_model(path=tmp_path / "model", progress=progress, wait=False)
    with pytest.raises(LlmjaxError):
        Engine(loaded.config, loaded.params, None, EngineConfig(**{**OPTIONS, "kv_cache_bytes": 1}))
    failed.set()
    with pytest.raises(ModelError, match="not wanted any more"):
        loaded.params.result()
    assert len(seen) <= 1


def test_a_model_that_is_not_waited_for_is_the_same() -> None:
    sooner = load_model(random=CONFIG, seed=3, scale=0.5, wait=False)
    assert isinstance(sooner.params, PendingParams)
    jax.tree.map(np.testing.assert_array_equal, sooner.params.result(), load_model(random=CONFIG, seed=3, scale=0.5).params)
    assert sooner.params.begun <= sooner.params.ended


def computation(text: str) -> str:
    """What a module computes: its main function, with a digest of the function called in place of every name.

    Names and numbers, and whether two calls share one function, depend on what a process traced before.
    """
    functions = {
        found[1]: found[2] for found in re.finditer(r"^  func\.func \w+ @(\w+)(\(.*?^  })$", text, re.MULTILINE | re.DOTALL)
    }

    def named_by_content(body: str) -> str:
        return re.sub(r"call @(\w+)", lambda found: f"call {digest(found[1])}", body)

    @functools.cache
    def digest(name: str) -> str:
        return hashlib.sha256(named_by_content(functions[name]).encode()).hexdigest()

    return named_by_content(functions["main"])


def test_what_another_process_lowers_is_what_is_lowered_here() -> None:
    """Programs are text before they are compiled, so they can be compared without compiling."""
    tiny = shapes(CONFIG.replace(num_layers=1, sliding_windows=(0,)))
    pool = LoweringPool(1)
    try:
        futures = {key: pool.submit(key, tiny) for key in (("reset", 8, 1), ("decode", 2, 1))}
        unknown = dataclasses.replace(tiny, config=tiny.config.replace(family="mistral"))
        broken = pool.submit(("decode", 3, -1), unknown)
        model = get_model("llama")
        for key, future in futures.items():
            theirs = lower_exported(future.result(), key, model, tiny)
            ours = lower_exported(export(key, model, tiny, "cpu"), key, model, tiny)
            same = computation(theirs.as_text()) == computation(ours.as_text())
            assert same  # not the texts themselves: pytest would explain a difference of two of this length for an hour
            assert (
                theirs.as_text().count("tf.aliasing_output") >= lower(key, model, tiny).as_text().count("tf.aliasing_output") > 0
            )
        with pytest.raises(LoweringFailed):
            broken.result()
        assert pool.submit(("reset", 8, 1), tiny).result().fun_name == "reset_rows"  # a failed task costs only itself
        pool._processes[0].kill()
        with pytest.raises(LoweringFailed, match="the process that lowers ended"):
            pool.submit(("reset", 8, 1), tiny).result()
    finally:
        pool.close()
    assert all(process.poll() is not None for process in pool._processes)


def test_processes_that_fail_cost_only_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(startup, "useful_workers", lambda programs, cores: 2)
    monkeypatch.setattr(compile_pool, "_CODE", "raise SystemExit(1)  # {path} {handle}")
    engine = Engine(CONFIG, random_params(CONFIG), None, EngineConfig(**OPTIONS))
    assert caplog.text.count("is lowered again in this process") == len(engine.programs) == 5


def test_processes_are_started_only_for_the_device_they_can_lower_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert useful_workers(12, 64) == 0  # on a CPU
    for capability, cores, workers in (("9.0", 16, 8), ("9.0", 4, 0), ("10.0", 16, 0), ("8.0", 16, 0)):
        device = type("Device", (), {"platform": "gpu", "compute_capability": capability})()
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        assert useful_workers(12, cores) == workers
    assert useful_workers(0, 64) == 0


@pytest.mark.slow
@pytest.mark.parametrize("key", [("decode", 16, 1), ("decode", 16, 8), ("extend", 2048, 1)])
def test_another_process_lowers_for_the_card(key: tuple[str, int, int]) -> None:
    config = preset_config("llama-8b").replace(num_layers=2, sliding_windows=(0, 0))
    sizes = shapes(config, max_context=4096, max_sequences=16, max_tokens_per_step=2048, row_buckets=(16,), token_buckets=(2048,))
    exported = pickle.loads(pickle.dumps(_export(key, sizes, Target("cuda", "NVIDIA H200", 132, {}))))
    kernels = exported.mlir_module().count("mosaic_gpu_v2")
    assert kernels > 0 or key[0] == "extend"
    assert "sdy." not in exported.mlir_module()
    arguments = step_function(key, get_model("llama"), sizes)[1]
    here = jax.jit(exported.call, donate_argnums=(1, 3)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert here.count("mosaic_gpu_v2") == kernels
    assert "tf.aliasing_output" in here


def test_kernels_are_compared_once_for_each_device_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmjax.engine.compile_store import ProgramStore

    calls: list[Any] = []

    def wrong(*, int8: bool) -> None:
        calls.append("wrong")
        raise BackendError("dense is wrong")

    def check(store: ProgramStore | None, *, int8: bool = False) -> None:
        startup._check_kernels(store, Timeline(), None, int8=int8)

    monkeypatch.setattr(startup, "check_kernels", wrong)
    for _ in range(2):  # what was wrong is looked at again
        with pytest.raises(BackendError):
            check(ProgramStore(tmp_path))
    monkeypatch.setattr(startup, "check_kernels", lambda *, int8: calls.append(int8))
    for int8 in (False, False, True, True):  # what an engine without int8 never looked at is not known to be right
        check(ProgramStore(tmp_path), int8=int8)
    check(None)
    assert calls == ["wrong", "wrong", False, True, False]


@pytest.mark.parametrize(("scheme", "kv_cache_dtype"), [(None, None), ("w8a16", None), (None, "int8")])
def test_kernels_of_int8_are_compared_where_they_may_be_chosen(
    scheme: str | None, kv_cache_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(smoke, "check", lambda probes: compared.append(probes) or [])
    config, params = CONFIG, random_params(CONFIG)
    if scheme is not None:
        params, config = quantize_params(params, config, plan_quantization(config, scheme))
    Engine(config, params, None, EngineConfig(**OPTIONS, kv_cache_dtype=kv_cache_dtype))
    (probes,) = compared
    assert set(smoke.FLOAT_PROBES) <= set(probes)
    assert (set(smoke.INT8_PROBES) <= set(probes)) == bool(scheme or kv_cache_dtype)


@pytest.mark.slow
def test_b79_a_second_process_takes_everything_from_the_store(tmp_path: Path) -> None:
    import json

    command = [
        sys.executable,
        "-m",
        "bench.startup",
        "--preset",
        "tiny",
        "--platform",
        "cpu",
        "--rows",
        "2",
        "--max-context",
        "64",
    ]
    out = tmp_path / "rows.json"
    subprocess.run([*command, "--warm", "1", "--json", str(out)], check=True, capture_output=True, env=dict(os.environ))
    cold, warm = json.loads(out.read_text())["rows"]
    assert (cold["from_store"], cold["lowered"]) == (0, cold["programs"])
    assert (warm["from_store"], warm["lowered"]) == (warm["programs"], 0)
    assert "lower" not in warm["phases"]
    assert warm["pages"] == cold["pages"]


_ON_A_GPU = """
import sys, types
import jax
from llmjax.engine import compile_programs
from llmjax.telemetry.startup import Timeline
compile_programs.wanted = lambda config: [("reset", 8, 1)]
compile_programs.lower = lambda *_: jax.jit(lambda: 0).lower()
for platform, loaded in (("cpu", False), ("cuda", True)):
    compile_programs.platform = lambda: platform
    compile_programs.compile_programs(None, types.SimpleNamespace(engine_config=None), timeline=Timeline())
    assert ("jax.experimental.mosaic.gpu" in sys.modules) is loaded
"""


def test_kernels_that_others_lowered_can_be_linked_on_a_gpu() -> None:
    """Their runtime is found by what importing Mosaic sets, and a process that lowers nothing itself would not import it."""
    done = subprocess.run([sys.executable, "-c", _ON_A_GPU], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_on_a_gpu_a_program_of_several_steps_is_compiled_after_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same kernels and matmuls: compiled side by side each would be made twice."""
    many = shapes(decode_steps=4, row_buckets=(1, 2, 32), max_sequences=32, max_tokens_per_step=32, token_buckets=(32,))
    done: dict[str, tuple[float, float]] = {}
    options: dict[Key, dict[str, Any]] = {}
    idle = threading.Event()
    executable = jax.jit(lambda: 0).lower().compile()  # once: threads would write and read one file of JAX's cache at a time

    class Slow:
        def __init__(self, key: Any) -> None:
            self.key = key
            self.args_info = {"params": np.zeros(1, np.int8)} if key == ("extend", 32, 1) else ()

        def as_text(self) -> str:
            matmuls = FEW_MATMULS if self.key[1] == 2 else FEW_MATMULS + 1  # those of two rows are kernels, nearly all
            return "%0 = stablehlo.dot_general %a, %b" * matmuls

        def compile(self, *, compiler_options: Any) -> Any:
            options[self.key] = compiler_options
            start = time.perf_counter()
            time.sleep(0.05)
            if "steps" in compile_programs_module.name(self.key):
                assert idle.wait(60), "other work may begin before the last programs are compiled"
            done[compile_programs_module.name(self.key)] = (start, time.perf_counter())
            return executable

    monkeypatch.setattr(compile_programs_module, "platform", lambda: "cuda")
    monkeypatch.setattr(compile_programs_module, "lower", lambda key, model, sizes: Slow(key))

    def on_idle_cores() -> None:
        assert any(name.startswith(("decode", "extend")) for name in done)
        idle.set()

    executables, programs = compile_programs(get_model("llama"), many, timeline=Timeline(), on_idle_cores=on_idle_cores)
    assert [program.name for program in programs] == [compile_programs_module.name(key) for key in executables]
    for rows in ("1 rows", "2 rows"):
        one, several = (
            next(done[n] for n in done if n.startswith(f"decode {rows}") and ("steps" in n) is s) for s in (False, True)
        )
        assert one[1] <= several[0]
    # What XLA is told has to be known to this version, or nothing would compile; Triton is for matmuls of few rows, if there
    # are more than a few, or of int8.
    for told in options.values():
        jax.jit(lambda: 0).lower().compile(compiler_options=told)
    of_few = {key for key in options if key[0] == "decode" and key[1] <= FEW_ROWS and key[1] != 2}
    assert len(of_few) == 2
    assert {key for key, told in options.items() if told["xla_gpu_enable_triton_gemm"]} == {*of_few, ("extend", 32, 1)}
