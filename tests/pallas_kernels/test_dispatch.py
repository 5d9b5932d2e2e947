"""The rule of choosing an implementation: named, else what was measured to be fastest, else the reference; never a silent
wrong answer."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import pytest

from pallas_kernels import tuning
from pallas_kernels.dispatch import Operation, UnsupportedShape


class Config(NamedTuple):
    sign: int = -1


def double(x: int, *, extra: int = 0) -> int:
    return 2 * x + extra


def fake(x: int, *, extra: int = 0, config: Config | None = None) -> int:
    """Serves even numbers only, and can be told apart from the reference."""
    if x % 2:
        raise UnsupportedShape(f"{x} is odd")
    return (config or Config()).sign * x


def shape_key(x: int, *, extra: int = 0) -> dict[str, int | str]:
    if x == 2:
        raise UnsupportedShape("two")
    return {"tokens": x}


@pytest.fixture
def operation() -> Operation:
    operation = Operation("double", double)
    operation.register("fake", fake, shape_key=shape_key, config_type=Config)
    return operation


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """On a device whose table says: up to 8 tokens fake with the sign 1, up to 16 the reference, up to 32 fake as it is."""
    monkeypatch.setattr(tuning, "target", lambda: "Test Card")
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    found = [
        entry({"tokens": 8}, "fake", {"sign": 1}),
        entry({"tokens": 16}, "xla", {}),
        entry({"tokens": 32}, "fake", {}),
    ]
    tuning.save(tmp_path / "test_card.json", "Test Card", {"double": found})
    yield
    tuning.load.cache_clear()


def entry(key: dict[str, int | str], implementation: str, config: dict[str, Any]) -> tuning.Entry:
    return {
        "key": key, "implementation": implementation, "config": config, "microseconds": 1.0, "xla_microseconds": 2.0,
        "bytes_per_second": 1e12, "date": "2026-01-01", "command": "test",
    }  # fmt: skip


@pytest.mark.usefixtures("tuned")
def test_without_a_name_the_table_decides(operation: Operation) -> None:
    assert operation(4) == 4  # fake, with the table's configuration
    assert operation(10, extra=1) == 21
    assert operation(20) == -20
    assert operation(40) == 80  # beyond the largest tuned


@pytest.mark.usefixtures("tuned")
def test_what_is_good_untuned_serves_shapes_that_the_table_does_not_know(operation: Operation) -> None:
    operation.register("good", lambda x, config=None: (config, x), shape_key=shape_key, config_type=Config, untuned=True)
    assert operation(40) == 80  # the table names it for no shape: not known to be right here
    found = [*tuning.entries("double"), entry({"tokens": 12}, "good", {"sign": 5})]
    tuning.save(tuning.path_of("Test Card"), "Test Card", {"double": found})
    assert operation(12) == (Config(5), 12)
    assert operation(40) == (None, 40)  # by its default configuration
    assert operation(16) == 32  # the table says that the reference is faster
    assert operation(2) == 4  # it cannot serve this one


def test_where_nothing_is_tuned_the_reference_serves_and_no_key_is_made(operation: Operation) -> None:
    def never(x: int, *, extra: int = 0) -> dict[str, int | str]:
        raise AssertionError

    operation.register("eager", fake, shape_key=never, config_type=Config)
    assert operation(4, extra=1) == 9


@pytest.mark.usefixtures("tuned")
def test_an_implementation_without_a_key_is_never_chosen() -> None:
    operation = Operation("double", double)
    operation.register("fake", fake)
    assert operation(4) == 8
    assert operation(4, implementation="fake") == -4


@pytest.mark.usefixtures("tuned")
def test_a_named_one_is_taken_whatever_the_table_says(operation: Operation) -> None:
    assert operation(4, extra=1, implementation="xla") == 9
    assert operation(10, implementation="fake") == -10
    assert operation(4, implementation="fake") == -4  # with its own default, not the table's configuration


def test_a_named_one_that_cannot_serve_the_call_is_an_error(operation: Operation) -> None:
    with pytest.raises(UnsupportedShape, match="3 is odd"):
        operation(3, implementation="fake")
    assert issubclass(UnsupportedShape, NotImplementedError)


def test_an_unknown_name_is_an_error_that_lists_the_names(operation: Operation) -> None:
    with pytest.raises(ValueError, match="double has no implementation 'mosaik'; choose one of fake, xla"):
        operation(4, implementation="mosaik")


@pytest.mark.usefixtures("tuned")
def test_falling_back_is_logged_once_for_each_reason(operation: Operation, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert [operation(n, extra=1) for n in (3, 3, 5, 2)] == [7, 7, 11, 5]  # 2 has no key: nothing to say
    assert [record.message for record in caplog.records] == [
        "double: fake cannot serve this call (3 is odd); xla does",
        "double: fake cannot serve this call (5 is odd); xla does",
    ]


@pytest.mark.usefixtures("tuned")
def test_other_errors_are_not_swallowed() -> None:
    def broken(x: int, *, config: Config) -> int:
        raise RuntimeError("a bug")

    operation = Operation("double", double)
    operation.register("fake", broken, shape_key=shape_key, config_type=Config)
    with pytest.raises(RuntimeError, match="a bug"):
        operation(4)


def test_registering_twice_or_by_halves_is_refused(operation: Operation) -> None:
    with pytest.raises(ValueError, match="already has"):
        operation.register("xla", double)
    with pytest.raises(ValueError, match="belong together"):
        operation.register("half", fake, shape_key=shape_key)
