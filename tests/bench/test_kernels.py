"""The kernel bench: what is wrong or cannot run never wins, nothing stops a run, and the data are what they claim to be."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS

from bench import flash_cases, kernel_cases, kernels
from bench.kernel_cases import Case, Group, attention_groups, dense_groups, rope_groups
from bench.kernel_peers import peers
from bench.kernel_timing import Contender, Measured, contenders, program, run_group, winner
from bench.rows import command_line
from pallas_kernels import smoke, tuning
from pallas_kernels.dispatch import Operation, UnsupportedShape
from pallas_kernels.paged_attention import reference as attention_in_numpy
from pallas_kernels.quantized_pages import dequantize_pages
from pallas_kernels.smoke import Call


class Config(NamedTuple):
    kind: str = "right"


def scaled(x: jax.Array, w: jax.Array, *, by: float) -> jax.Array:
    return x @ w * by


def kernel(x: jax.Array, w: jax.Array, *, by: float, config: Config | None = None) -> jax.Array:
    kind = (config or Config()).kind
    if kind == "refuses":
        raise UnsupportedShape("no such shape")
    out = scaled(x, w, by=by)
    return {"right": out, "wrong": out.at[1, 3].add(1), "nan": out.at[0, 0].set(jnp.nan), "zeros": jnp.zeros_like(out)}[kind]


KINDS = ("right", "wrong", "refuses", "nan", "zeros")


@pytest.fixture
def group() -> Group:
    operation = Operation("scaled", scaled)
    operation.register(
        "kernel",
        kernel,
        shape_key=lambda x, w, *, by: {"tokens": x.shape[0], "out": w.shape[1]},
        config_type=Config,
        candidates=lambda key: [Config(kind) for kind in KINDS],
    )
    case = Case(
        name="8 tokens", operation=operation, model="tiny", rows=8, count=1, bytes=4 * 64 * 32,
        query=lambda key: jax.random.normal(key, (8, 64)),
        arguments=lambda x, data, turn, index: Call((x, turn), {"by": 1.5}),
    )  # fmt: skip
    return Group(
        name="scaled", cases=(case,), turns=lambda weights: weights,
        data=lambda seed: list(jax.random.normal(jax.random.key(seed), (3, 64, 32))), rank=0,
    )  # fmt: skip


def run(group: Group, *, seconds: float = 60.0, **options: Any) -> Any:
    return run_group(
        group, seed=time.time_ns() % 2**31, launch_seconds=0.0, deadline=time.monotonic() + seconds,
        **{"limit": 9, "peers": lambda case: ()} | options,
    )  # fmt: skip


def test_wrong_results_and_failures_are_told_and_never_win(group: Group) -> None:
    ((_, key, measured),) = run(group)
    assert key == {"tokens": 8, "out": 32}
    problems = {one.contender.label.removeprefix("kernel kind="): one.problem for one in measured}
    assert list(problems) == ["xla", *KINDS]
    assert problems["xla"] == problems["right"] == ""
    assert all(problems[kind].startswith("WRONG: error") for kind in ("wrong", "nan", "zeros"))
    assert problems["refuses"] == "UnsupportedShape: no such shape"
    for one in measured:
        one.seconds = 1.0 if one.contender.label == "xla" else 0.5 if not one.problem else 0.1
    best, xla = winner(measured)
    assert best is not None
    assert best.contender.config == Config("right")
    assert xla is measured[0]


def test_every_call_is_made_and_compared(group: Group) -> None:
    """A kernel that is right for the first weights only, or that is given the same operands each time, would be found."""
    case = group.cases[0]
    lone = Contender(label="one weight", implementation="kernel", config=Config(), function=scaled, arguments=first_weight(group))
    ((_, _, measured),) = run(group, limit=0, peers=lambda case: [lone])
    assert [one.problem[:5] for one in measured] == ["", "WRONG"]
    assert contenders(case, group, jax.eval_shape(lambda: group.data(0)), limit=2)[1] is not None


def first_weight(group: Group) -> Any:
    return lambda x, data, turn, index: group.cases[0].arguments(x, data, data[0], index)


def test_a_gain_within_noise_stays_with_the_reference() -> None:
    def measured(name: str, seconds: float, problem: str = "") -> Measured:
        contender = Contender(label=name, function=scaled, arguments=lambda *a: Call((), {}), implementation=name)
        return Measured(contender=contender, seconds=seconds, problem=problem)

    xla = measured("xla", 1.0)
    peer = Measured(contender=Contender(label="peer", function=scaled, arguments=lambda *a: Call((), {})), seconds=0.1)
    assert winner([peer, xla, measured("kernel", 0.99)]) == (xla, xla)
    fast = measured("kernel", 0.9)
    assert winner([xla, measured("slower", 0.95), fast, measured("wrong", 0.5, "WRONG")]) == (fast, xla)
    assert winner([measured("xla", 1.0, "INVALID"), fast]) == (fast, None)
    assert winner([]) == (None, None)


def test_cases_that_share_a_key_choose_by_the_sum() -> None:
    def case(xla: float, full: float, one: float, problem: str = "") -> list[Measured]:
        times = {"xla": xla, "full": full, "one": one}
        made = {
            name: Contender(label=name, function=scaled, arguments=lambda *a: Call((), {}), implementation=name) for name in times
        }
        return [
            Measured(contender=made[name], seconds=time, problem=problem if name == "one" else "") for name, time in times.items()
        ]

    full, one = case(10.0, 4.0, 5.0), case(10.0, 5.0, 1.0)
    assert winner(full)[0] is full[1]
    assert winner(full, one) == (full[2], full[0])
    assert winner(full, case(10.0, 5.0, 1.0, "WRONG"))[0] is full[1]  # wrong in one case: for no case


def test_a_run_without_time_says_what_it_left_out(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(kernels.GROUPS, "scaled", lambda model: iter([group]))
    out = tmp_path / "out.json"
    kernels.main(["--ops", "scaled", "--shapes", "tiny", "--budget", "0", "--json", str(out)])
    assert {"left_out": ["scaled"]} in json.loads(out.read_text())["rows"]
    with pytest.raises(SystemExit, match="no table for a CPU"):
        kernels.main(["--ops", "scaled", "--shapes", "tiny", "--tune"])
    capsys.readouterr()


def test_a_tuning_run_writes_a_table_that_dispatch_reads(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(kernels.GROUPS, "scaled", lambda model: iter([group]))
    monkeypatch.setattr(tuning, "target", lambda: "Test Card")
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    arguments = ["--ops", "scaled", "--shapes", "tiny", "--candidates", "1", "--launch-ms", "0", "--tune"]
    kernels.main([*arguments, "--json", str(tmp_path / "out.json")])
    found = tuning.lookup("scaled", {"tokens": 5, "out": 32})
    assert found is not None
    assert found["config"] == ({"kind": "right"} if found["implementation"] == "kernel" else {})
    assert found["microseconds"] <= found["xla_microseconds"]
    assert found["command"].startswith("python -m bench.kernels --ops scaled")
    table = [row for row in json.loads((tmp_path / "out.json").read_text())["rows"] if "case" in row]
    assert [row["case"] for row in table] == ["tiny 8 tokens"]
    assert table[0]["must"] in ("beat xla pass", "beat xla FAIL")
    capsys.readouterr()
    tuning.load.cache_clear()


@pytest.fixture
def tiny_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "preset_config", CONFIGS.__getitem__)
    monkeypatch.setattr(kernel_cases, "L2_IS_COLD", 1000)


@pytest.mark.usefixtures("tiny_presets")
def test_attention_data_are_owned_pages_in_nan() -> None:
    group = next(group for group in attention_groups("llama", [16]) if group.cases[0].rows == 8 and "256" in group.name)
    case, of_one = group.cases
    data = group.data(time.time_ns() % 2**31)
    q = case.query(jax.random.key(1))
    alone = of_one.arguments(q, data, 0, jnp.int32(0)).args[4]
    assert alone.tolist() == [data["lengths"][0], *[0] * 7]
    assert of_one.bytes * int(data["lengths"].sum()) == case.bytes * int(data["lengths"][0])
    for turn in group.turns(data):
        call = case.arguments(q, data, turn, jnp.int32(1))
        right = attention_in_numpy.paged_attention(
            *(np.asarray(a, np.float32) if a.dtype == jnp.float32 else np.asarray(a) for a in call.args),
            page_offset=int(call.kwargs["page_offset"]),
            scale=call.kwargs["scale"],
        )
        got = case.operation(*call.args, implementation="xla", **call.kwargs)
        assert float(smoke.worst_error(got, jnp.asarray(right))) < 1e-4
    config, lengths = CONFIGS["llama"], np.asarray(data["lengths"])
    assert case.bytes == lengths.sum() * 2 * config.num_kv_heads * config.head_dim * 4
    owned = np.isfinite(np.asarray(data["k"])).all(axis=(1, 3)).reshape(len(group.turns(data)), -1).sum(axis=1)
    assert (owned == lengths.sum()).all()


@pytest.mark.usefixtures("tiny_presets")
def test_many_rows_with_room_are_as_long_as_traffic_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "TRAFFIC_ROWS", 8)
    group = next(group for group in attention_groups("llama", [64]) if group.cases[0].name.startswith("8 rows x traffic in 8192"))
    data = group.data(1)
    lengths = np.asarray(data["lengths"])
    assert lengths.tolist() == kernel_cases.traffic_lengths(8).tolist()
    assert len(set(lengths.tolist())) > 4
    assert ((np.asarray(data["table"]) > 0).sum(axis=1) == -(-lengths // 64)).all()


@pytest.mark.usefixtures("tiny_presets")
def test_attention_over_int8_pages_reads_less_and_is_rounded() -> None:
    """Beside the same case over floats; nobody else computes it."""
    groups = [group for group in attention_groups("llama", [16]) if group.name.startswith("llama attention 8 rows x 256,")]
    floats, int8 = (group.cases[0] for group in groups)
    head_dim = CONFIGS["llama"].head_dim
    assert int8.bytes * 4 * head_dim == floats.bytes * (head_dim + 4)
    assert (len(peers(floats)) > 0, peers(int8)) == (True, ())
    data = groups[1].data(time.time_ns() % 2**31)
    assert np.isnan(np.asarray(data["k"].scale)).any()
    call = int8.arguments(int8.query(jax.random.key(1)), data, 0, jnp.int32(1))
    plain = (call.args[0], *(jnp.nan_to_num(dequantize_pages(cache)) for cache in call.args[1:3]), *call.args[3:])
    got, right = (int8.operation(*args, implementation="xla", **call.kwargs) for args in (call.args, plain))
    assert float(smoke.worst_error(got, right)) < 1e-4


@pytest.mark.usefixtures("tiny_presets")
def test_a_step_has_five_matmuls_and_their_bytes() -> None:
    config = CONFIGS["llama"]
    groups = {group.name.split()[2]: group for group in dense_groups("llama", [1, 8])}
    assert sorted(groups) == ["down", "gate_up", "head", "out", "qkv"]
    for name, group in groups.items():
        shapes = jax.eval_shape(lambda group=group: group.data(3))
        assert len(shapes) >= 2
        for case in group.cases:
            query = jax.eval_shape(case.query, jax.random.key(0))
            run = lambda x, data, case=case: case.operation(*case.arguments(x, data, data[0], 0).args, out_dtype=jnp.float32)  # noqa: E731
            out = jax.eval_shape(run, query, shapes)
            assert case.bytes == 4 * (query.size + shapes[0]["w"].size + out.size)
            assert case.count == (1 if name == "head" else config.num_layers)
    first, second = groups["out"].data(3)[:2]
    assert not np.array_equal(first["w"], second["w"])


@pytest.fixture
def tiny_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_cases, "preset_config", CONFIGS.__getitem__)
    monkeypatch.setattr(flash_cases, "CHUNKS", ((20, 13),))
    monkeypatch.setattr(flash_cases, "ROWS", 5)
    monkeypatch.setattr(flash_cases, "MIXED", {12: (9,)})
    monkeypatch.setattr(flash_cases, "traffic_lengths", lambda rows: np.array([2, 16, 30, 40])[:rows])
    monkeypatch.setattr(flash_cases, "CONTEXT", 64)
    monkeypatch.setattr(flash_cases, "PAGE_SIZES", (16,))


@pytest.mark.usefixtures("tiny_prefill")
def test_prefill_data_are_owned_pages_in_nan_and_its_flops_those_of_visible_pairs() -> None:
    config = CONFIGS["llama"]
    seen = [sum(13 + 1 + i for i in range(20)), 3 + 17 + 31 + sum(range(1, 10))]
    owned = [33, 3 + 17 + 31 + 9]
    for group, pairs, slots in zip(flash_cases.paged_groups("llama"), seen, owned, strict=True):
        (case,) = group.cases
        data = group.data(time.time_ns() % 2**31)
        q = case.query(jax.random.key(1))
        for turn in group.turns(data):
            call = case.arguments(q, data, turn, jnp.int32(0))
            options = {"page_offset": int(call.kwargs["page_offset"]), "scale": call.kwargs["scale"]}
            right = attention_in_numpy.paged_attention(*map(np.asarray, call.args), **options)
            got = case.operation(*call.args, implementation="xla", **call.kwargs)
            assert float(smoke.worst_error(got, jnp.asarray(right))) < 1e-4
        assert case.flops == 4 * config.num_heads * config.head_dim * pairs
        assert np.isfinite(np.asarray(data["k"])).all(axis=(1, 3)).sum() == slots * flash_cases.TURNS
        assert peers(case) == ()


@pytest.mark.usefixtures("tiny_prefill")
def test_variants_of_a_prompt_are_different_calls_and_have_a_peer_where_cudnn_can() -> None:
    groups = {group.cases[0].name: group for group in flash_cases.contiguous_groups("llama")}
    assert len(groups) == 12
    seen = {}
    for name, group in groups.items():
        (case,) = group.cases
        data = jax.eval_shape(lambda group=group: group.data(3))
        result = jax.eval_shape(
            lambda q, data, case=case: case.operation(*(call := case.arguments(q, data, 1, 0)).args, **call.kwargs),
            jax.eval_shape(case.query, jax.random.key(0)), data,
        )  # fmt: skip
        assert result.shape == (case.rows, CONFIGS["llama"].num_heads, CONFIGS["llama"].head_dim)
        seen[name] = (data["k"].shape, data["slopes"] is not None, data["bias"] is not None, case.flops)
        assert [peer.label for peer in peers(case)] == ([] if "ALiBi" in name or "bias" in name else ["cudnn"])
    assert len(set(seen.values())) == len(seen)
    assert seen["window 1024, 2048 tokens"][3] < seen["plain, 2048 tokens"][3]


def test_a_command_is_written_down_without_the_folders_of_a_machine() -> None:
    assert command_line(["/a/b/kernels.py", "--json", "/c/out d.json", "--tune=/e/f.json", "--match", "x/y"]) == (
        "kernels.py --json 'out d.json' --tune=f.json --match x/y"
    )


def test_no_call_of_a_pass_is_dropped(group: Group) -> None:
    """XLA drops what nobody reads: then fewer calls are timed than are counted."""
    (case,) = group.cases
    data = jax.eval_shape(lambda: group.data(3))
    found, _ = contenders(case, group, data, limit=0)
    query = jax.eval_shape(case.query, jax.random.key(0))

    def products(rounds: int) -> float:
        compiled = jax.jit(program(found[0], case, group.turns, 2, rounds)).lower(query, data).compile()
        return compiled.cost_analysis()["flops"]

    one = products(1)
    assert products(3) == pytest.approx(3 * one, rel=0.02)
    assert one >= 3 * 2 * 8 * 64 * 32


@pytest.mark.usefixtures("tiny_presets")
def test_caches_are_written_in_place_from_call_to_call() -> None:
    """Copied once a launch, where the loop is entered, and not at each call: a copy would be what is timed."""
    (group,) = rope_groups("llama", [3])
    ((case, _, (xla,)),) = run(group)
    assert xla.problem == ""
    assert xla.error < 1e-5
    query = jax.eval_shape(case.query, jax.random.key(0))
    data = jax.eval_shape(lambda: group.data(3))
    compiled = jax.jit(program(xla.contender, case, group.turns, 2, 2)).lower(query, data).compile()
    cache = "f32[" + ",".join(map(str, query[1].shape)) + "]"
    copies = [line for line in compiled.as_text().splitlines() if re.search(rf"= {re.escape(cache)}\S* copy\(", line)]
    assert len(copies) == 2
    assert case.bytes == 4 * (2 * query[0].size + 2 * data["cos"].size)
