"""The smoke test must pass what is right to rounding, and stop one wrong number, one NaN, one row that should be zeros."""

from __future__ import annotations

import subprocess
import sys
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
    program, arrays = smoke.as_program(lambda call: probe.result(smoke.reference(probe.operation, call)), call)
    expected = jax.jit(program)(arrays)
    assert jax.tree.leaves(expected)[0].shape == jax.tree.leaves(got)[0].shape
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


def test_one_wrong_kernel_among_many_is_found_whichever_comes_first(card: Path) -> None:
    name_in_table(card, "kernel")
    right, wrong = (
        Probe(operation_with(lambda x, *, by, config=None: x * by), make),
        Probe(operation_with(lambda x, *, by, config=None: x), make),
    )
    assert smoke.check([right] * 9) == ["scaled/kernel"] * 9
    for place in range(4):
        with pytest.raises(WrongNumbers):
            smoke.check([*[right] * place, wrong, *[right] * (3 - place)])


_TWO_DEVICES = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
from pallas_kernels import smoke, tuning
from pallas_kernels.dispatch import Operation
host, device = jax.devices()
smoke._device, tuning.target = lambda: device, lambda: "Card"
tuning.entries = lambda name: [{"implementation": "kernel"}]
seen = {}

def noted(name, function):
    def call(x, *, by, config=None):
        seen[name] = jax.config.jax_default_device
        return function(x, by)
    return call

operation = Operation("scaled", noted("reference", lambda x, by: x * by))
operation.register(
    "kernel", noted("kernel", lambda x, by: x * by), shape_key=noted("key", lambda x, by: {"tokens": 1}), config_type=tuple
)
make = lambda random: smoke.Call((jnp.asarray(random.standard_normal((4, 8)), jnp.bfloat16),), {"by": 1.5})
assert smoke.check([smoke.Probe(operation, make)]) == ["scaled/kernel"]
assert seen == {"reference": host, "key": device, "kernel": device}, seen
"""


def test_the_kernel_runs_on_the_device_and_its_reference_on_the_host() -> None:
    """What an implementation serves is asked of the device too."""
    done = subprocess.run([sys.executable, "-c", _TWO_DEVICES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
    run, arrays = smoke.as_program(lambda call: operation(*call.args, implementation=name, **call.kwargs), call)
    with use_abstract_mesh(H200):
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        jax.jit(run).trace(shapes).lower(lowering_platforms=("cuda",))
