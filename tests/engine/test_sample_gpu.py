"""Sampling as a GPU does it, here on a CPU: few passes instead of loops, with the same results; and what it lowers to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import sampling_oracle
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh
from sampling_oracle import ROWS, VOCAB, Row, draw

from llmjax.engine import sample as module
from llmjax.engine import sampling_filters
from llmjax.engine.sample import MAX_BIAS, MAX_STOPS, NUM_TOP, SamplingSettings, sample, token_scores

bisection = jax.jit(sampling_filters._threshold_by_bisection)
few_passes = jax.jit(sampling_filters._threshold_in_few_passes)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_both_searches_find_the_same_threshold(dtype: Any) -> None:
    """Whole weights, so that every sum is exact; the definition itself is the oracle."""
    random = np.random.default_rng()
    for _ in range(8):
        keys = random.integers(0, 2**32, (ROWS, VOCAB), dtype=np.uint32)
        keys[0] = random.choice(np.array([0, 1, 2**31, 2**32 - 1, 12345], np.uint32), VOCAB)
        weights = random.integers(0, 4, keys.shape).astype(dtype)
        wanted = random.integers(1, 4 * VOCAB, ROWS).astype(dtype)
        wanted[1], wanted[2] = 1, weights[2].sum()
        found = np.asarray(few_passes(keys, weights, wanted))
        np.testing.assert_array_equal(found, np.asarray(bisection(keys, weights, wanted)))
        for row in range(ROWS):
            holds = [int(t) for t in keys[row] if weights[row][keys[row] >= t].sum() >= wanted[row]]
            assert found[row] == max(holds, default=0)


def test_the_largest_entries_come_in_order() -> None:
    random = np.random.default_rng()
    x = random.integers(-3, 4, (ROWS, VOCAB)).astype(np.float32)  # many ties
    x[1, :30] = -np.inf
    x[2] = -np.inf
    x[3] = random.standard_normal(VOCAB)
    values, ids = jax.jit(module._largest_by_passes, static_argnums=1)(x, NUM_TOP)
    order = np.argsort(-x, axis=1, kind="stable")[:, :NUM_TOP]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def test_a_batch_of_everything_is_the_same_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng()
    logits = (3 * random.standard_normal((ROWS, VOCAB))).astype(np.float32)
    logits[:, ::5] = np.round(logits[:, ::5])
    logits[4, 7] = np.nan
    rows = [
        Row(temperature=0.8, top_k=5, seed=1), Row(temperature=1.3, top_p=0.7, seed=2, num_logprobs=3),
        Row(temperature=0.0, num_logprobs=5), Row(top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.4, prompt=(3, 4)),
        Row(top_p=0.5), Row(temperature=0.7, seed=9, min_tokens=2, stop_ids=(3,), processed_logprobs=False),
    ]  # fmt: skip
    want = [draw(logits, rows), draw(logits, [Row(temperature=0.0, num_logprobs=-1)] * ROWS)]
    for one in (module, sampling_filters):
        monkeypatch.setattr(one, "by_platform", lambda gpu, other, *operands: gpu(*operands))
    monkeypatch.setattr(sampling_oracle, "run_sample", jax.jit(lambda x, s, counts, *rest: sample(x, s, lambda: counts, *rest)))
    got = [draw(logits, rows), draw(logits, [Row(temperature=0.0, num_logprobs=-1)] * ROWS)]
    for ours, theirs in zip(got, want, strict=True):
        for name in ("tokens", "ranks", "finite"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, rtol=1e-6, atol=1e-6)
        kept = np.isfinite(theirs.top_logprobs)
        ties = np.zeros_like(kept)
        ties[:, 1:] |= theirs.top_logprobs[:, 1:] == theirs.top_logprobs[:, :-1]
        ties[:, :-1] |= ties[:, 1:]
        last = np.where(kept, theirs.top_logprobs, np.inf).min(1, keepdims=True)
        ties |= theirs.top_logprobs == last  # the last one listed may be as likely as the first one left out
        np.testing.assert_array_equal(ours.top_ids[kept & ~ties], theirs.top_ids[kept & ~ties])


# -- what it lowers to


def shapes(rows: int, vocab: int) -> tuple[Any, ...]:
    def of(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    settings = SamplingSettings(
        **{name: of(rows, dtype=np.float32) for name in floats},
        **{name: of(rows) for name in ("top_k", "choice", "num_logprobs", "min_tokens")},
        seed=of(rows, 2, dtype=np.uint32), processed_logprobs=of(rows, dtype=bool), stop_ids=of(rows, MAX_STOPS),
        bias_ids=of(rows, MAX_BIAS), bias_values=of(rows, MAX_BIAS, dtype=np.float32),
    )  # fmt: skip
    return of(rows, vocab, dtype=np.float32), settings, of(rows, vocab), of(rows), of(rows)


def run(logits: Any, settings: Any, counts: Any, positions: Any, num_output: Any) -> Any:
    return sample(logits, settings, lambda: counts, positions, num_output)


H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))


@pytest.mark.parametrize(("rows", "vocab"), [(1, 128256), (256, 151936)])
def test_on_a_gpu_nothing_is_a_loop_or_a_sort(rows: int, vocab: int) -> None:
    """A condition with a loop or a sort in a branch stays out of the CUDA graph, and the host waits for it in every step."""
    logits, settings, counts, positions, num_output = shapes(rows, vocab)
    with jax.sharding.use_abstract_mesh(H200):
        steps = [
            jax.jit(run).trace(logits, settings, counts, positions, num_output),
            jax.jit(token_scores).trace(logits, positions),
        ]
        texts = [step.lower(lowering_platforms=("cuda",)).as_text() for step in steps]
    for text in texts:
        assert "stablehlo.reduce" in text
        assert set(re.findall(r"(?:stablehlo|chlo|mhlo)\.(while|sort|top_k|custom_call)", text)) == set()


def conditions(jaxpr: Any) -> Iterator[Any]:
    """Conditions that run whenever the program does."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from conditions(inner)


def test_a_greedy_batch_meets_one_condition_with_an_empty_branch() -> None:
    with jax.sharding.use_abstract_mesh(H200):
        (condition,) = conditions(jax.make_jaxpr(run)(*shapes(8, 1000)).jaxpr)
    assert min(len(branch.jaxpr.eqns) for branch in condition.params["branches"]) == 0
