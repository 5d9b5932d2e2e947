"""The rule of choosing an implementation: named, else tuned, else the reference; never a silent wrong answer."""

import logging

import pytest

from pallas_kernels.dispatch import Operation, UnsupportedShape


def double(x, *, extra=0):
    return 2 * x + extra


def fake(x, *, extra=0):
    """Serves even numbers only, and can be told apart from the reference."""
    if x % 2:
        raise UnsupportedShape(f"{x} is odd")
    return -x


@pytest.fixture
def operation():
    operation = Operation("double", double)
    operation.register("fake", fake)
    return operation


def test_without_a_name_the_tuned_one_is_taken(operation):
    assert operation.implementations == ("fake", "xla")
    assert operation(4, extra=1) == -4


def test_a_named_one_is_taken(operation):
    assert operation(4, extra=1, implementation="xla") == 9
    assert operation(4, implementation="fake") == -4


def test_a_named_one_that_cannot_serve_the_call_is_an_error(operation):
    with pytest.raises(UnsupportedShape, match="3 is odd"):
        operation(3, implementation="fake")
    assert issubclass(UnsupportedShape, NotImplementedError)


def test_an_unknown_name_is_an_error_that_lists_the_names(operation):
    with pytest.raises(ValueError, match="double has no implementation 'mosaik'; choose one of fake, xla"):
        operation(4, implementation="mosaik")


def test_falling_back_is_logged_once_for_each_reason(operation, caplog):
    with caplog.at_level(logging.WARNING):
        assert [operation(n, extra=1) for n in (3, 3, 5)] == [7, 7, 11]
    assert [record.message for record in caplog.records] == [
        "double: fake cannot serve this call (3 is odd); trying the next, at last xla",
        "double: fake cannot serve this call (5 is odd); trying the next, at last xla",
    ]


def test_the_latest_registered_is_tried_first(operation):
    operation.register("faster", lambda x, *, extra=0: "faster")
    assert operation(4) == "faster"


def test_other_errors_are_not_swallowed(operation):
    def broken(x, *, extra=0):
        raise RuntimeError("a bug")

    operation.register("broken", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        operation(4)


def test_a_name_is_registered_once(operation):
    with pytest.raises(ValueError, match="already has"):
        operation.register("xla", double)
