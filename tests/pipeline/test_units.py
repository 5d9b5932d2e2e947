"""Units are compulsory (rule 7)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.pipeline import units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MiB", 256 * 2**20),
        ("1GiB", 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("1KiB", 1024),
        ("2MB", 2_000_000),
        ("1GB", 10**9),
        (" 3MiB ", 3 * 2**20),
        (".5KiB", 512),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30s", 30.0), ("5m", 300.0), ("1.5h", 5400.0), ("2d", 172800.0), ("0s", 0.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("value", "share"), [("90%", 0.9), (0.9, 0.9), (1, 1.0), ("100%", 1.0), ("0.5 %", 0.005), ("33.3%", 0.333)]
)
def test_shares(value: object, share: float) -> None:
    assert units.parse_share(value) == pytest.approx(share)


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (units.parse_size, 256, "256 has no unit; write a size as 256MiB"),
        (units.parse_size, "256", "'256' has no unit"),
        (units.parse_size, "256mib", "unknown unit 'mib' in '256mib'; did you mean MiB"),
        (units.parse_size, "256M", "unknown unit 'M'.*units: KiB"),
        (units.parse_size, "-1MiB", "expected a size such as 256MiB, got '-1MiB'"),
        (units.parse_size, "0MiB", "above zero"),
        (units.parse_size, True, "expected a size such as 256MiB, got true"),
        (units.parse_size, ["1MiB"], "got a list"),
        (units.parse_size, "nanMiB", "expected a size"),
        (units.parse_duration, 30, "30 has no unit; write a duration as 30s"),
        (units.parse_duration, "5 min", "unknown unit 'min' in '5 min'; units: ms, s, m, h, d"),
        (units.parse_duration, "5M", "did you mean m"),
        (units.parse_duration, "", "expected a duration"),
        (units.parse_share, 90, "above 0 and at most 1 \\(100%\\), got 90; write 90%"),
        (units.parse_share, 0, "above 0"),
        (units.parse_share, "0%", "above 0"),
        (units.parse_share, "120%", "at most 1"),
        (units.parse_share, "0.9", "expected a share such as 90% or 0.9, got '0.9'"),
        (units.parse_share, math.nan, "above 0"),
        (units.parse_share, math.inf, "above 0"),
        (units.parse_share, True, "expected a share"),
    ],
)
def test_what_is_refused(parse: object, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(value)  # type: ignore[operator]


@given(st.integers(1, 2**50))
def test_a_written_size_reads_back(size: int) -> None:
    assert units.parse_size(units.format_size(size)) == size


@given(st.integers(1, 10**8))
def test_a_written_duration_reads_back(milliseconds: int) -> None:
    seconds = milliseconds / 1000
    assert units.parse_duration(units.format_duration(seconds)) == pytest.approx(seconds, rel=1e-5)


@given(st.floats(1e-6, 1))
def test_a_written_share_reads_back(share: float) -> None:
    assert units.parse_share(units.format_share(share)) == pytest.approx(share)


def test_written_forms() -> None:
    assert [units.format_size(n) for n in (2**30, 3 * 2**20, 1000, 1)] == ["1GiB", "3MiB", "1KB", "0.0009765625KiB"]
    assert [units.format_duration(s) for s in (0, 0.5, 90, 3600, 1.5)] == ["0s", "500ms", "90s", "1h", "1.5s"]
    assert units.format_share(0.9) == "90%"
