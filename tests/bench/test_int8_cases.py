"""The int8 cases of the kernel bench: each call is what it claims to be, is right, and is counted rightly."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny_models import CONFIGS

from bench import int8_cases
from bench.kernel_cases import Case
from bench.kernel_peers import peers
from bench.kernel_timing import contenders, run_group


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_cases, "preset_config", CONFIGS.__getitem__)
    monkeypatch.setattr(int8_cases, "L2_IS_COLD", 1000)


MATMULS = ("w8a16", "w8a8", "int8_dense")


@pytest.mark.parametrize("name", MATMULS)
def test_a_layer_has_four_matmuls_and_their_bytes(name: str) -> None:
    groups = list(int8_cases.INT8_GROUPS[name]("llama"))
    assert [group.name.split()[-1] for group in groups] == ["gate_up", "down", "qkv", "out"]
    for group in groups:
        shapes = jax.eval_shape(lambda group=group: group.data(3))
        assert len(shapes) >= 2
        weight = shapes[0]["w"].qvalue
        for case in group.cases:
            query = jax.eval_shape(case.query, jax.random.key(0))
            out = jax.eval_shape(lambda x, data, case=case: called(case, x, data), query, shapes)
            assert out.shape[0] == query[0].shape[0] == case.rows
            assert case.bytes == weight.size + query[0].size * query[0].dtype.itemsize + out.size * 2
            assert (case.flops == 0) == (case.rows < 256)
        _, key = contenders(group.cases[0], group, shapes, limit=2)
        assert key is None or key["tokens"] == group.cases[0].rows  # these weights are too small for some kernels


def called(case: Case, x: Any, data: Any) -> jax.Array:
    call = case.arguments(x, data, data[0], jnp.int32(0))
    return case.operation(*call.args, implementation="xla", **call.kwargs)


def test_both_ways_are_right_on_the_data_and_peers_run() -> None:
    group = next(int8_cases.int8_groups("llama", [8]))
    (found,) = run_group(
        group, seed=time.time_ns() % 2**31, launch_seconds=0.0, limit=2, peers=peers, deadline=time.monotonic() + 300
    )  # fmt: skip
    assert [one.contender.label.split()[0] for one in found[2]] == ["xla", "w8a16", "w8a8", "xla"]
    assert [one.problem for one in found[2]] == ["", "", "", ""]
    assert found[2][2].error < 0.01  # nothing was lost in quantising


def test_quantised_activations_have_a_peer_of_int8() -> None:
    group = next(int8_cases.w8a8_groups("llama", [8]))
    (found,) = run_group(
        group, seed=time.time_ns() % 2**31, launch_seconds=0.0, limit=0, peers=peers, deadline=time.monotonic() + 300
    )  # fmt: skip
    assert [one.contender.label for one in found[2]] == ["xla", "xla bf16", "xla int8, no scales"]
    assert [one.problem for one in found[2]] == ["", "", ""]


@pytest.mark.parametrize("name", sorted(set(int8_cases.INT8_GROUPS) - set(MATMULS)))
def test_norms_are_right_on_their_data(name: str) -> None:
    group = next(int8_cases.INT8_GROUPS[name]("llama"))
    (case,) = group.cases
    shapes = jax.eval_shape(lambda: group.data(3))
    result = jax.eval_shape(
        lambda weight, data: called(case, weight, data), jax.eval_shape(case.query, jax.random.key(0)), shapes
    )
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(result)]
    assert case.bytes == sum(sizes) + sum(x.size * 2 for x in shapes[0])
    (found,) = run_group(
        group, seed=time.time_ns() % 2**31, launch_seconds=0.0, limit=0, peers=peers, deadline=time.monotonic() + 300
    )  # fmt: skip
    assert [one.problem for one in found[2]] == [""]
