"""The step programs: how many there are, that none makes the host wait for the device, and how prompts are scored."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh
from scripted_model import Scripted, ScriptedConfig
from tiny_models import CONFIGS

from llmjax.engine import memory
from llmjax.engine.compile_programs import DraftShapes, Key, Shapes, compile_lowered, lower, step_function, temp_bytes, wanted
from llmjax.engine.config import MAX_PROGRAMS, MAX_SPECULATIVE_PROGRAMS, EngineConfig, SpeculationConfig
from llmjax.errors import ConfigError
from llmjax.model.checkpoint.load import param_structs
from llmjax.model.registry import get_model
from llmjax.sampling_params import SamplingParams

CONFIG = CONFIGS["llama"]
KERNELS = ("pallas_call", "mpmd_map")
H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))


def shapes(config: Any = CONFIG, **options: Any) -> Shapes:
    sizes: dict[str, Any] = {
        "max_context": 128, "max_sequences": 4, "max_tokens_per_step": 128, "decode_steps": 3, "row_buckets": (4,),
        "token_buckets": (128,),
    }  # fmt: skip
    resolved = EngineConfig(**sizes | options).resolved(gpu=True, model_max_context=config.max_positions)
    draft = None
    if resolved.speculative is not None and resolved.speculative.method == "draft":
        draft = DraftShapes(config, param_structs(config))
    return Shapes(config, param_structs(config), resolved, 9, draft)


# -- the host never waits in a launch


def equations(jaxpr: Any, *, in_condition: bool = False) -> Iterator[tuple[str, bool]]:
    """The name of every primitive, and whether it is in a branch of a condition. A kernel is one operation, and what the platform
    decides is no condition any more once a program is lowered."""
    decided: list[Any] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, in_condition
        if name == "platform_index":
            decided += equation.outvars
        is_condition = name == "cond" and not any(equation.invars[0] is variable for variable in decided)
        if name not in KERNELS:
            for inner in jaxprs_in_params(equation.params):
                yield from equations(inner, in_condition=in_condition or is_condition)


def looping_conditions(key: Key, sizes: Shapes) -> int:
    """Loops and sorts of a program that stand in a condition. Asserts that there are conditions."""
    step, arguments, _ = step_function(key, get_model(sizes.config.family), sizes)
    with jax.sharding.use_abstract_mesh(H200):
        found = list(equations(jax.make_jaxpr(step)(*arguments).jaxpr))
    assert key[0] not in ("decode", "extend", "speculate") or ("cond", False) in found
    return sum(inside and name in ("while", "scan", "sort") for name, inside in found)


@pytest.mark.parametrize("method", [None, "ngram", "truncated", "draft"])
def test_no_condition_holds_a_loop(method: Any) -> None:
    """A condition with a loop or a sort in a branch stays out of the CUDA graph: the host copies it back in the middle of the
    launch and waits for the device, and so runs no launch ahead. That prompts are scored is no such condition any more."""
    sizes = shapes(speculative=None if method is None else SpeculationConfig(method=method, tokens=3))
    kinds = {"reset", "wipe", "decode", "extend", "score", "speculate", "catch_up"}
    keys = wanted(sizes.engine_config)
    without = {None: {"speculate", "catch_up"}, "draft": set()}.get(method, {"catch_up"})
    assert {key[0] for key in keys} == kinds - without
    assert {key: looping_conditions(key, sizes) for key in keys} == dict.fromkeys(keys, 0)


def test_a_loop_in_a_condition_is_found() -> None:
    """However deep it is; but not one around a condition, nor one that the platform alone decides about."""

    def loop(x: Any) -> Any:
        return jax.lax.fori_loop(0, x.shape[0], lambda i, x: x + i, x)

    def step(x: Any) -> Any:
        x = jax.lax.scan(lambda x, _: (jax.lax.cond(x.any(), lambda x: x + 1, lambda x: x, x), None), loop(x), length=3)[0]
        x = jax.lax.platform_dependent(x, cpu=loop, default=lambda x: x)
        return jax.lax.cond(x.any(), lambda x: jax.lax.cond(x.all(), jax.jit(loop), lambda x: x, x), lambda x: x, x)

    found = list(equations(jax.make_jaxpr(step)(jax.numpy.zeros(4, jax.numpy.int32)).jaxpr))
    assert [name for name, inside in found if inside and name in ("while", "scan")] == ["scan"]


# -- what an engine pays that may draft and does not


def operations(sizes: Shapes) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Of the decode program of three steps: those of all its steps, and those before and behind them."""
    step, arguments, _ = step_function(("decode", 4, 3), get_model(sizes.config.family), sizes)
    with jax.sharding.use_abstract_mesh(H200):
        jaxpr = jax.make_jaxpr(step)(*arguments).jaxpr
    (steps,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    inside = [name for body in jaxprs_in_params(steps.params) for name, _ in equations(body)]
    return collections.Counter(inside), collections.Counter(name for name, _ in equations(jaxpr)) - collections.Counter(inside)


@pytest.mark.parametrize("method", ["ngram", "truncated", "draft"])
def test_a_plain_step_is_that_of_an_engine_without_drafts(method: Any) -> None:
    """A launch notes its tokens in the history at its end, once; no draft model's array goes through it, and none is copied."""
    sizes = shapes(speculative=SpeculationConfig(method=method, tokens=3))
    (steps, around), (plain_steps, plain_around) = operations(sizes), operations(shapes())
    assert steps == plain_steps
    more = around - plain_around
    assert more["scatter"] == 1
    assert more.total() < 40  # integers of a row, each
    (_, *held), (_, *plain_held) = (
        step_function(("decode", 4, 3), get_model(CONFIG.family), one)[1] for one in (sizes, shapes())
    )
    assert len(jax.tree.leaves(held)) == len(jax.tree.leaves(plain_held)) + 1
    compiled = lower(("decode", 4, 3), get_model(CONFIG.family), sizes).compile().memory_analysis()
    assert compiled.output_size_in_bytes - compiled.alias_size_in_bytes < sum(a.nbytes for a in plain_results(sizes)) + 1024


def plain_results(sizes: Shapes) -> list[Any]:
    """The shapes of what the host reads of a launch; all else that a launch returns takes the place of what it was given."""
    step, arguments, _ = step_function(("decode", 4, 3), get_model(sizes.config.family), sizes)
    leaves = jax.tree.leaves(jax.eval_shape(step, *arguments)[1])
    return [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]


# -- how many


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sequences", [1, 8, 64, 1000])
def test_the_chosen_sizes_make_no_more_programs_than_allowed(sequences: int, deterministic: bool) -> None:
    plain = EngineConfig(max_sequences=sequences, deterministic=deterministic)
    drafting = dataclasses.replace(plain, speculative=SpeculationConfig(method="draft"))
    few, more = (len(wanted(config.resolved(gpu=True, model_max_context=8192))) for config in (plain, drafting))
    assert few <= MAX_PROGRAMS
    assert few < more <= few + MAX_SPECULATIVE_PROGRAMS


def test_programs_are_counted_as_they_are_made() -> None:
    def many(token_buckets: int) -> EngineConfig:
        buckets = tuple(range(256, 256 + token_buckets))
        return EngineConfig(max_sequences=256, max_tokens_per_step=buckets[-1], token_buckets=buckets)

    assert len(wanted(many(4).resolved(gpu=True, model_max_context=8192))) == MAX_PROGRAMS
    with pytest.raises(ConfigError, match=f"make {MAX_PROGRAMS + 2} programs, at most {MAX_PROGRAMS} are allowed"):
        many(5).resolved(gpu=True, model_max_context=8192)


# -- scoring prompts


@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), CONFIG.replace(dtype="bfloat16"), ScriptedConfig()], ids=lambda config: config.family
)
def test_what_is_scored_is_what_an_extend_launch_leaves(config: Any) -> None:
    """Whoever's the model is: its shapes are known without tracing it only where it is our own."""
    sizes, model = dataclasses.replace(shapes(), config=config), get_model(config.family)
    table = {"table": jax.ShapeDtypeStruct((config.max_positions, config.vocab_size), np.float32)}
    sizes = dataclasses.replace(sizes, params=table if isinstance(config, ScriptedConfig) else param_structs(config))
    step, arguments, _ = step_function(("extend", 128, 1), model, sizes)
    score, (params, *scored), donated = step_function(("score", 128, 1), model, sizes)
    left = jax.eval_shape(step, *arguments)[2]
    assert [(a.shape, a.dtype) for a in scored] == [(a.shape, a.dtype) for a in left]
    assert jax.eval_shape(score, params, *left).top_ids.shape == (128, 20)
    assert donated == ()


def test_hidden_states_are_held_only_while_they_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, scored = Scripted(None).engine, []
    score = engine.runner._score
    monkeypatch.setattr(engine.runner, "_score", lambda unscored: scored.append(unscored.hidden.shape) or score(unscored))
    hidden = {(tokens, 1) for tokens in engine.runner.token_buckets}
    for asked, launches in ((None, 0), (2, 1)):
        engine.add_request([1] * 20, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=asked))
        engine.step(closed=True)  # launched, and not read yet
        assert len(engine._pending) == 1
        assert len(scored) == launches
        assert set(scored) <= hidden
        assert not [array.shape for array in jax.live_arrays() if array.shape in hidden and array.dtype == np.float32]
        while engine.has_unfinished:
            engine.step(closed=True)
    assert len(scored) == 1  # not for its decoding either
    assert engine.runner.compiles_after_ready == 0


def test_logits_of_a_chunk_are_expected_where_few_rows_sample() -> None:
    """And what a launch leaves to be scored is needed by no other program, and held by none of the plan's other parts."""
    config = CONFIG.replace(vocab_size=20_000, num_layers=1, sliding_windows=(0,))
    sizes = shapes(config, max_sequences=1, row_buckets=(1,))
    model, key = get_model(config.family), ("score", 128, 1)
    (needed,) = memory._temporaries(model, [(key, sizes)])
    logits = memory.SCORE_CHUNK * config.vocab_size * 4
    assert logits < needed
    assert 2 * logits < memory.expected_temporaries(model, sizes) < 3 * logits
    executable = compile_lowered(key, lower(key, model, sizes))
    assert temp_bytes(key, executable) - temp_bytes(("extend", 128, 1), executable) == 128 * (config.hidden_size + 1) * 4
