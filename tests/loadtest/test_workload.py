"""Workloads and arrivals have the statistics they claim, from fixed seeds; traffic files are read strictly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from llmjax.errors import ConfigError, StoreError
from llmjax.loadtest import arrivals
from llmjax.loadtest.target import TrafficRequest
from llmjax.loadtest.workload import Lengths, SharedPrefixes, Synthetic, check_fits, read_traffic


def test_the_documented_trace() -> None:
    """512 requests of seed 0 are the mixed trace that other engines were measured with: the sums are known."""
    trace = Synthetic(Lengths(256, 1.0, 16, 3072), Lengths(128, 0.8, 8, 1024)).requests(512, 1000)
    assert sum(len(request.prompt) for request in trace) == 205_539
    assert sum(request.output_tokens for request in trace) == 81_739


def test_lengths_are_log_normal_and_clipped() -> None:
    drawn = np.log(Lengths(200, 0.5).draw(np.random.default_rng(1), 20_000))
    assert np.median(drawn) == pytest.approx(np.log(200), abs=0.02)
    assert drawn.std() == pytest.approx(0.5, abs=0.02)
    clipped = Lengths(200, 2.0, 50, 300).draw(np.random.default_rng(1), 1000)
    assert (min(clipped), max(clipped)) == (50, 300)
    assert set(Lengths(33).draw(np.random.default_rng(1), 10)) == {33}


def test_a_variant_has_the_same_lengths_and_other_tokens() -> None:
    made = Synthetic(Lengths(40, 0.7), Lengths(9, 0.3), SharedPrefixes(16, 0.5, 2), seed=3)
    first, again, other = made.requests(50, 1000), made.requests(50, 1000), made.requests(50, 1000, variant=1)
    assert first == again
    assert [len(r.prompt) for r in first] == [len(r.prompt) for r in other]
    assert all(a.prompt != b.prompt for a, b in zip(first, other, strict=True))


def test_shared_prefixes_have_their_share_and_groups() -> None:
    made = Synthetic(Lengths(8), Lengths(4), SharedPrefixes(32, 0.25, 3)).requests(4000, 50_000)
    long = [tuple(r.prompt[:32]) for r in made if len(r.prompt) == 40]
    assert len(long) / 4000 == pytest.approx(0.25, abs=0.03)
    assert len(set(long)) == 3
    assert all(len(r.prompt) in (8, 40) for r in made)
    assert all(0 <= token < 50_000 for r in made[:50] for token in r.prompt)


def test_what_is_asked_for_is_never_less_than_what_is_wanted() -> None:
    made = Synthetic(Lengths(4), Lengths(50, 1.0), max_tokens=60).requests(200, 10)
    assert all(r.max_tokens == max(60, r.output_tokens) for r in made)
    assert any(r.output_tokens > 60 for r in made)
    assert all(r.max_tokens == r.output_tokens for r in Synthetic(Lengths(4), Lengths(50, 1.0)).requests(20, 10))


def test_a_workload_that_cannot_fit_is_refused_with_both_numbers() -> None:
    check_fits([TrafficRequest([1] * 60, 4, 100), TrafficRequest("a text of any length", 500, 500)], 64)
    with pytest.raises(ConfigError, match=r"needs 65 tokens and the engine's max_context is 64"):
        check_fits([TrafficRequest([1] * 60, 5, 5)], 64)


def test_poisson_arrivals() -> None:
    times = arrivals.poisson(20.0, 5000).times
    gaps = np.diff((0.0, *times))
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.05, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)
    assert times == arrivals.poisson(20.0, 5000).times != arrivals.poisson(20.0, 5000, seed=1).times
    expected = np.cumsum(np.random.default_rng(7).exponential(1 / 16, 160))  # the documented open loop
    assert arrivals.poisson(16.0, 160).times == pytest.approx(expected)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_keeps_the_rate_and_changes_the_spread(burstiness: float) -> None:
    gaps = np.diff((0.0, *arrivals.poisson(10.0, 20_000, burstiness=burstiness).times))
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_bursts_and_levels() -> None:
    assert arrivals.bursts(3, 2.0, 7).times == (0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 4.0)
    assert arrivals.levels_to_triple(30) == [1, 7, 15, 30, 60, 90]
    assert arrivals.levels_to_triple(1) == [1, 2, 3]


def test_a_traffic_file(tmp_path: Path) -> None:
    lines = [
        '"a text"',
        "[1, 2, 3]",
        '{"prompt": "x", "output_tokens": 5, "max_tokens": 50}',
        "",
        '{"messages": [{"role": "user", "content": "é"}], "max_tokens": 9}',
    ]
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n".join(lines), "utf-8-sig")
    made = read_traffic(path, output_tokens=7, limit=None)
    assert [(r.prompt, r.output_tokens, r.max_tokens) for r in made] == [
        ("a text", 7, 7), ([1, 2, 3], 7, 7), ("x", 5, 50), ([{"role": "user", "content": "é"}], 9, 9),
    ]  # fmt: skip
    assert len(read_traffic(path, output_tokens=7, limit=2)) == 2
    assert [r.max_tokens for r in read_traffic(path, output_tokens=7, limit=None, max_tokens=20)] == [20, 20, 50, 9]


def test_recorded_arrivals_are_sorted_and_begin_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(t), "arrival": t}) + "\n" for t in (1007.5, 1001, 1003.25)))
    made = read_traffic(path, output_tokens=1, limit=None)
    assert [(r.prompt, r.arrival) for r in made] == [("1001", 0.0), ("1003.25", 2.25), ("1007.5", 6.5)]
    assert arrivals.recorded(made).times == (0.0, 2.25, 6.5)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON"),
        ("7", "expected a text, or an object"),
        ("{}", "either 'prompt' or 'messages'"),
        ('{"prompt": "a", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"prompt": "a", "output_len": 3}', "unknown key 'output_len'"),
        ('{"prompt": {"a": 1}}', "list of token ids as 'prompt'"),
        ('{"prompt": [1, true]}', "list of token ids as 'prompt'"),
        ('{"messages": []}', "list of objects"),
        ('{"prompt": "a", "output_tokens": 0}', "at least 1 as 'output_tokens', got 0"),
        ('{"prompt": "a", "max_tokens": "9"}', "'9'"),
        ('{"prompt": "a", "arrival": NaN}', "seconds as 'arrival'"),
    ],
)
def test_a_bad_line_is_one_located_line(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text('"fine"\n\n' + line + "\n")
    with pytest.raises(StoreError) as caught:
        read_traffic(path, output_tokens=1, limit=None)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert why in message
    assert len(message.splitlines()) == 1


def test_files_that_are_no_traffic(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    for content, why in ((b"", "is empty"), (b"\xff", "cannot be read"), (b'"a"\n{"prompt": "b", "arrival": 1}', "1 of 2 lines")):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=why):
            read_traffic(path, output_tokens=1, limit=None)
    with pytest.raises(StoreError, match="cannot be read"):
        read_traffic(tmp_path / "gone", output_tokens=1, limit=None)
