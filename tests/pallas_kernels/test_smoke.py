"""The smoke test must pass what is right to rounding, and stop one wrong number, one NaN, one row that should be zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import smoke, tuning
from pallas_kernels.dispatch import REFERENCE, Operation, UnsupportedShape
from pallas_kernels.smoke import TOLERANCE, Call, Probe, WrongNumbers, worst_error

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))


class Config(NamedTuple):
    pass


def scaled(x: jax.Array, *, by: float) -> jax.Array:
    return x * by


def operation_with(function: Any) -> Operation:
    operation = Operation("scaled", scaled)
    key = lambda x, *, by: {"tokens": x.shape[0]}  # noqa: E731
    operation.register("kernel", function, shape_key=key, config_type=Config)
    return operation


def make(random: np.random.Generator) -> Call:
    x = random.standard_normal((4, 256))
    x[2] = 0
    return Call((jnp.asarray(x, jnp.bfloat16),), {"by": 1.5})


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(tuning, "target", lambda: "Card")
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    yield tmp_path / "card.json"
    tuning.load.cache_clear()


def name_in_table(path: Path, implementation: str) -> None:
    found: tuning.Entry = {
        "key": {"tokens": 8}, "implementation": implementation, "config": {}, "microseconds": 1.0, "xla_microseconds": 2.0,
        "bytes_per_second": 1e12, "date": "2026-01-01", "command": "test",
    }  # fmt: skip
    tuning.save(path, "Card", {"scaled": [found]})


def test_rounding_passes(card: Path) -> None:
    name_in_table(card, "kernel")
    rounded = operation_with(lambda x, *, by, config=None: x * jnp.bfloat16(by))
    assert smoke.check([Probe(rounded, make)]) == ["scaled/kernel"]


@pytest.mark.parametrize(
    "lie",
    [lambda y: y.at[3, 17].add(1), lambda y: -y, jnp.zeros_like, lambda y: jnp.roll(y, 1, axis=1)],
    ids=["one element", "sign", "zeros", "columns moved"],
)
def test_wrong_numbers_are_named(card: Path, lie: Any) -> None:
    assert "of itself or of a token's root mean square" in complaint(card, lie)


@pytest.mark.parametrize(
    "lie",
    [lambda y: y.at[0, 0].set(jnp.nan), lambda y: y.at[1, 255].set(-jnp.inf), lambda y: y.at[2, 5].set(1e-6)],
    ids=["one NaN", "one infinity", "something in the row of zeros"],
)
def test_what_has_no_size_never_passes(card: Path, lie: Any) -> None:
    assert "something where zeros must be" in complaint(card, lie)


def complaint(card: Path, lie: Any) -> str:
    name_in_table(card, "kernel")
    lying = operation_with(lambda x, *, by, config=None: lie(x * by))
    with pytest.raises(WrongNumbers, match=r"scaled: kernel differs from xla by .*for bfloat16\[4, 256\]") as caught:
        smoke.check([Probe(lying, make)])
    return str(caught.value)


def test_only_what_this_device_may_choose_is_compared(card: Path) -> None:
    lying = [Probe(operation_with(lambda x, *, by, config=None: x), make)]
    assert smoke.check(lying) == []
    name_in_table(card, "xla")
    assert smoke.check(lying) == []
    name_in_table(card, "kernel")
    with pytest.raises(WrongNumbers):
        smoke.check(lying)


def test_nothing_is_compared_on_a_cpu() -> None:
    assert smoke.check() == []


@pytest.mark.parametrize("probe", smoke.PROBES, ids=lambda probe: probe.operation.name)
def test_probes_are_calls_their_operation_serves(probe: Probe) -> None:
    call = probe.make(np.random.default_rng())
    again = probe.make(np.random.default_rng())
    assert not np.array_equal(call.args[0], again.args[0])  # fresh numbers each time
    got = probe.result(probe.operation(*call.args, implementation=REFERENCE, **call.kwargs))
    expected = probe.result(smoke.reference(probe.operation, call))
    error = float(worst_error(got, expected))
    assert 0 < error <= TOLERANCE
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(expected))


def test_each_kernel_that_may_be_chosen_has_a_probe_it_can_compile() -> None:
    choosable, lowered = set(), set()
    for operation, make_call, _ in smoke.PROBES:
        call = make_call(np.random.default_rng())
        for name, implementation in operation.implementations.items():
            if implementation.shape_key is not None:
                choosable.add((operation.name, name))
                if smoke.serves(implementation, call):
                    lower_for_h200(operation, name, call)
                    lowered.add((operation.name, name))
    assert lowered == choosable


def test_a_probe_for_another_kernel_of_the_operation_is_passed_over(card: Path) -> None:
    name_in_table(card, "kernel")

    def key(x: jax.Array, *, by: float) -> tuning.Key:
        if len(x) != 4:
            raise UnsupportedShape("four rows")
        return {"tokens": 4}

    operation = Operation("scaled", scaled)
    operation.register("kernel", lambda x, *, by, config=None: -x, shape_key=key, config_type=Config)
    assert smoke.check([Probe(operation, lambda random: Call((jnp.ones((3, 8)),), {"by": 1.5}))]) == []
    with pytest.raises(WrongNumbers):
        smoke.check([Probe(operation, make)])


def lower_for_h200(operation: Operation, name: str, call: Call) -> None:
    leaves, tree = jax.tree.flatten(call)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def run(arrays: list[jax.Array]) -> Any:
        left = iter(arrays)
        mixed = [next(left) if yes else leaf for yes, leaf in zip(is_array, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, mixed)
        return operation(*args, implementation=name, **kwargs)

    with use_abstract_mesh(H200):
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, jax.Array)]
        jax.jit(run).trace(shapes).lower(lowering_platforms=("cuda",))
