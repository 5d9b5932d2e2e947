"""The memory plan: what is left for the pool, that doctor and engine have one, and what is said when it does not fit."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import jax
import pytest
from scripted_model import CONTEXT, Scripted, ScriptedConfig
from tiny_models import CONFIGS, random_params

from llmjax.engine import memory, runner, startup
from llmjax.engine.compile_programs import Shapes, compile_programs
from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.memory import MIB, PAGE_STEP, DeviceMemory, MemoryPlan, plan_memory
from llmjax.errors import ConfigError, OutOfMemoryError
from llmjax.model.checkpoint.load import param_structs
from llmjax.model.checkpoint.presets import preset_config
from llmjax.model.registry import get_model
from llmjax.sampling_params import SamplingParams

GIB = 2**30
LLAMA = preset_config("llama-8b")


@pytest.fixture
def known_temporaries(monkeypatch: pytest.MonkeyPatch) -> int:
    """No compiling: the arithmetic alone is looked at."""
    monkeypatch.setattr(memory, "expected_temporaries", lambda *_: 3 * GIB)
    return 3 * GIB


def plan_8b(device: DeviceMemory | None, **options: Any) -> MemoryPlan:
    config = EngineConfig(**options).resolved(gpu=True, model_max_context=LLAMA.max_positions)
    return plan_memory(get_model("llama"), LLAMA, param_structs(LLAMA), config, device)


def test_the_pool_gets_what_is_left(known_temporaries: int) -> None:
    limit, taken = random.randint(60, 130) * GIB, random.randint(0, 20) * GIB
    options = {"max_sequences": 256, "max_context": 65536, "kv_cache_fraction": 0.9}
    plan = plan_8b(DeviceMemory(limit, taken), **options)
    assert plan.weights == sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(param_structs(LLAMA)))
    left = limit - taken - plan.weights - plan.state - known_temporaries - memory.DEVICE_RESERVE_BYTES
    assert plan.num_pages % PAGE_STEP == 0
    assert 0 <= int(left * 0.9) - plan.pool < PAGE_STEP * plan.page_bytes
    assert plan.total == taken + plan.weights + plan.state + known_temporaries + plan.pool
    assert plan.total + plan.reserve <= limit
    assert (plan.tokens, plan.temporaries_from) == ((plan.num_pages - 1) * 16, "expected")
    slightly_more = plan_8b(DeviceMemory(limit, taken + 1000), **options)  # the same shapes, so the same compiled programs
    assert slightly_more.num_pages in (plan.num_pages, plan.num_pages - PAGE_STEP)
    small = plan_8b(DeviceMemory(limit, taken), max_sequences=4, max_context=256)
    assert small.num_pages == 1 + 4 * 16  # never more than all rows at full length
    assert small.full_rows == 4


@pytest.mark.usefixtures("known_temporaries")
def test_what_does_not_fit_names_the_number_to_lower() -> None:
    cases: list[tuple[DeviceMemory | None, dict[str, Any], type[Exception], str]] = [
        (DeviceMemory(80 * GIB, 0), {"kv_cache_bytes": 70 * GIB}, OutOfMemoryError, r"cache of 71,680\.0 MiB.*lower the cache"),
        (DeviceMemory(18 * GIB, 0), {}, OutOfMemoryError, "room for 0 pages.*: lower max_tokens_per_step"),
        (DeviceMemory(80 * GIB, 79 * GIB), {}, OutOfMemoryError, "in use by others 80,896.0 MiB.*: free device memory"),
        (DeviceMemory(12 * GIB, 0), {}, OutOfMemoryError, "weights 15,3.*: use a smaller model or dtype"),
        (DeviceMemory(80 * GIB, 0), {"kv_cache_bytes": MIB}, ConfigError, "room for 0 pages of 2.00 MiB.*: raise the cache"),
    ]  # fmt: skip
    for device, options, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            plan_8b(device, **options)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.usefixtures("known_temporaries")
def test_programs_that_need_more_than_the_plan_left_are_refused() -> None:
    plan = plan_8b(DeviceMemory(40 * GIB, 0))
    assert plan.with_temporaries(4 * GIB, "compiled").temporaries_from == "compiled"
    with pytest.raises(OutOfMemoryError, match=r"temporaries 30,720\.0 MiB.*: lower max_tokens_per_step"):
        plan.with_temporaries(30 * GIB, "compiled")


TINY = CONFIGS["llama"].replace(num_layers=5, sliding_windows=(0, 20, 0, 0, 20))
OPTIONS: dict[str, Any] = {
    "max_context": 64, "max_sequences": 2, "max_tokens_per_step": 32, "decode_steps": 1, "row_buckets": (2,),
    "token_buckets": (32,),
}  # fmt: skip


@pytest.mark.slow
def test_temporaries_reckoned_from_a_few_layers_are_those_of_all() -> None:
    config = EngineConfig(**OPTIONS).resolved(gpu=False, model_max_context=512)
    shapes = Shapes(TINY, param_structs(TINY), config, 2)
    reckoned, source = memory.measure_temporaries(get_model("llama"), shapes)
    compiled = memory._temporaries(get_model("llama"), [(key, shapes) for key in memory._largest(config)])
    assert source == "probe"
    assert reckoned == pytest.approx(max(compiled), rel=0.03)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceMemory:
    """A device that tells of its memory, which a CPU does not."""
    told = DeviceMemory(limit=5 * GIB + random.randint(0, 500) * MIB, in_use=random.randint(0, GIB))
    monkeypatch.setattr(memory, "device_memory", lambda: told)
    monkeypatch.setattr(startup, "device_memory", lambda: told)
    return told


def test_the_doctors_plan_is_the_engines(device: DeviceMemory, tmp_path: Path) -> None:
    from llmjax.pipeline import load
    from llmjax.pipeline.memory_plan import memory_plan

    shape = ", ".join(
        f"{name}: {getattr(TINY, name)}"
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_size",
            "max_positions",
        )
    )
    shape += ", sliding_windows: [0, 20, 0, 0, 20]"
    path = tmp_path / "p.yaml"
    path.write_text(
        "apiVersion: llmjax/v1\nname: p\nruntime: {platform: cpu}\nstages:\n"
        f"  model: {{dtype: float32, source: {{random: {{config: {{family: llama, {shape}}}}}}}}}\n"
        "  engine: {max_context: 64, kv_cache: {fraction: 1%}, batching: {max_sequences: 2, max_tokens_per_step: 32,\n"
        "    decode_steps: 1, buckets: {rows: 2, tokens: 32}}}\n"
    )
    (told,) = memory_plan(load(path))
    params = random_params(TINY)
    own = memory.tree_bytes(params)
    with_weights = dataclasses.replace(device, in_use=device.in_use + own)  # as the device tells when they are there
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "device_memory", lambda: with_weights)
        engine = Engine(TINY, params, None, EngineConfig(**OPTIONS, kv_cache_fraction=0.01))
    assert told.plan.temporaries is not None
    assert engine.memory == told.plan.with_temporaries(engine.memory.temporaries or 0, "compiled")
    assert engine.memory.temporaries == pytest.approx(told.plan.temporaries, rel=0.03)
    assert engine.memory.num_pages == engine.pool.capacity + 1
    cache = engine.runner._cache
    assert cache.k.nbytes + cache.v.nbytes == engine.memory.pool
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner._state)) == engine.memory.state


def test_what_the_shapes_let_expect_was_enough_on_a_card() -> None:
    """Bytes that compiled programs of the 8B needed on an H200, by rows and tokens of a launch; and not twice as much."""
    for rows, tokens, needed in ((64, 2048, 217.4), (128, 2048, 270.9)):
        config = EngineConfig(max_sequences=rows, max_tokens_per_step=tokens).resolved(gpu=True, model_max_context=4096)
        expected = memory.expected_temporaries(get_model("llama"), Shapes(LLAMA, param_structs(LLAMA), config, 2))
        assert needed < expected / MIB < 1.5 * needed


def test_programs_that_need_more_than_expected_are_planned_and_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where they would touch the reserve; and the next start knows, so that its programs are those of the store."""
    options = OPTIONS | {"max_context": 512, "compile_cache": str(tmp_path)}
    resolved = EngineConfig(**options).resolved(gpu=False, model_max_context=512)
    roomy = plan_memory(get_model("llama"), TINY, param_structs(TINY), resolved, DeviceMemory(GIB * 10, 0))
    device = DeviceMemory(roomy.total - roomy.pool + roomy.reserve + MIB, 0)  # 1 MiB for a pool that could have 1.3
    for place in (memory, startup):
        monkeypatch.setattr(place, "device_memory", lambda: dataclasses.replace(device, in_use=roomy.weights))
    made: list[MemoryPlan] = []
    compiled: list[int] = []
    needed = (roomy.temporaries or 0) + MIB // 2

    def plan(*args: Any, **options: Any) -> MemoryPlan:
        made.append(plan_memory(*args, **options))
        return made[-1]

    def hungry(model: Any, shapes: Shapes, **options: Any) -> Any:
        executables, programs = compile_programs(model, shapes, **options)
        compiled.append(shapes.num_pages)
        return executables, [dataclasses.replace(program, temp_bytes=needed) for program in programs]

    monkeypatch.setattr(startup, "plan_memory", plan)
    monkeypatch.setattr(startup, "compile_programs", hungry)
    for _ in range(2):
        engine = Engine(TINY, random_params(TINY), None, EngineConfig(**options))
        assert (engine.memory.temporaries, engine.memory.temporaries_from) == (needed, "compiled")
        assert engine.memory.total + engine.memory.reserve <= device.limit
    assert [one.temporaries for one in made] == [roomy.temporaries, needed, needed]
    assert compiled == [one.num_pages for one in made]
    assert compiled[0] > compiled[1] == compiled[2]


def test_running_out_of_memory_at_the_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1234 bytes.\nand much more")

    monkeypatch.setattr(runner, "init_cache", full)
    with pytest.raises(OutOfMemoryError, match=r"ran out of memory at the start \(weights .*\): lower ") as caught:
        Scripted(None)
    assert len(str(caught.value).splitlines()) == 1
    monkeypatch.setattr(runner, "init_cache", _broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):  # nothing else is called that
        Scripted(None)


def _broken(*_: Any, **__: Any) -> None:
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_advice_names_what_is_largest() -> None:
    plan = MemoryPlan(None, 0, 0, 1, 1, 0, 10, 5, 16, 4, 64, "compiled")
    for changes, word in (({}, "kv_cache"), ({"temporaries": 99}, "max_tokens_per_step"), ({"state": 99}, "max_sequences")):
        assert word in dataclasses.replace(plan, **changes).advice()  # type: ignore[arg-type]


def test_nothing_on_the_device_grows_over_many_requests() -> None:
    scripted = Scripted(None, kv_cache_bytes=14 * memory.cache_bytes_per_page(ScriptedConfig(), 16))
    scripted.script([])
    engine = scripted.engine

    def live() -> list[tuple[Any, ...]]:
        import gc

        gc.collect()
        return sorted((array.shape, str(array.dtype)) for array in jax.live_arrays())

    def serve(rounds: int) -> None:
        for turn in range(rounds):
            for index in range(6):
                length = 1 + (turn * 7 + index * 13) % (CONTEXT - 30)
                params = SamplingParams(max_tokens=1 + turn % 25, logprobs=turn % 3 or None, n=1 + index % 2, ignore_eos=True)
                engine.add_request([1] * length, params, request_id=f"{turn}.{index}")
            for _ in range(turn % 4):
                engine.step(closed=True)
            engine.abort(f"{turn}.2")
            while engine.has_unfinished:
                engine.step(closed=True)

    serve(3)
    before = live()
    serve(30)
    assert live() == before
    assert engine.pool.num_used == 0
    assert engine.stats.preemptions > 0


def test_the_doctor_counts_a_draft_model(tmp_path: Path) -> None:
    from llmjax.pipeline import load
    from llmjax.pipeline.memory_plan import memory_plan

    shape = "vocab_size: 301, hidden_size: 48, num_heads: 4, num_kv_heads: 2, head_dim: 16, mlp_size: 80, max_positions: 128"
    source = f"dtype: float32, source: {{random: {{config: {{family: llama, {shape}, num_layers: "
    path = tmp_path / "p.yaml"
    path.write_text(
        "apiVersion: llmjax/v1\nname: p\nruntime: {platform: cpu}\nstages:\n"
        f"  big: {{uses: model, {source}4}}}}}}}}\n"
        f"  small: {{uses: model, {source}1}}}}}}}}\n"
        "  engine: {model: big, max_context: 64, kv_cache: {memory: 1MiB}, batching: {max_sequences: 2},\n"
        "    speculative: {method: draft, draft: small}}\n"
    )
    (drafting,) = memory_plan(load(path))
    (plain,) = memory_plan(load(path, sets=["stages.engine.speculative=null"]))
    assert (drafting.model, plain.model) == ("big", "big")
    assert drafting.plan.weights > plain.plan.weights
    assert drafting.plan.state > plain.plan.state
    assert (drafting.plan.num_pages, plain.plan.num_pages) == (2**20 // (5 * 4096), 2**20 // (4 * 4096))
