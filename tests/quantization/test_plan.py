"""Plans: what a budget and patterns decide, and that a plan is the same when it is read again."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from tiny_models import CONFIGS

from llmjax.errors import ConfigError
from llmjax.quantization.layer_walk import linear_names
from llmjax.quantization.plan import LinearSensitivity, Plan, fit_perplexity, kept_dtype, make_plan, ranked
from llmjax.quantization.quantize import plan_quantization

FOUND = [
    LinearSensitivity("layers.0.attention.qkv", 0.01, 0.999, 0.001, 300),
    LinearSensitivity("layers.0.mlp.down", 0.03, 0.99, 0.002, 100),
    LinearSensitivity("layers.1.attention.qkv", 0.02, 0.98, 0.003, 300),
    LinearSensitivity("layers.1.mlp.down", 0.001, 0.9, math.inf, 100),
]


def plan(**options: Any) -> Plan:
    return make_plan(FOUND, scheme="w8a8", model_dtype="bfloat16", **options)


def test_a_budget_keeps_what_is_above_it() -> None:
    got = plan(max_sensitivity=0.02, keep={"layers.0.attention": "float32", "*norm*": "float32"})
    assert {name: decision.dtype for name, decision in got.linears.items()} == {
        "layers.0.attention.qkv": "float32",
        "layers.0.mlp.down": "bfloat16",
        "layers.1.attention.qkv": "int8",  # at the limit is within it
        "layers.1.mlp.down": "bfloat16",  # its KL is infinite
    }
    assert got.linears["layers.0.mlp.down"].reason == "relative L2 0.03 is above 0.02"
    assert got.quantised == ["layers.1.attention.qkv"]
    assert got.share == 300 / 800
    assert got.dtype_of("layers.1.attention.qkv.weight") == "int8"
    assert got.dtype_of("layers.1.attention.qkv.bias") is None
    assert got.dtype_of("layers.1.mlp_norm.weight") == got.dtype_of("final_norm.weight") == "float32"
    assert got.dtype_of("embed.weight") is got.dtype_of("lm_head.weight") is None


def test_without_a_budget_all_is_quantised_that_can_be() -> None:
    assert plan().quantised == [found.name for found in FOUND[:3]]


def test_it_is_the_same_when_read_again() -> None:
    unmeasured = make_plan([dataclasses.replace(FOUND[0], kl=None)], scheme="w8a8", model_dtype="bfloat16")
    assert unmeasured.quantised == [FOUND[0].name]
    for got in (plan(max_sensitivity=0.02, keep={"lm_head": "bfloat16"}), plan(), unmeasured):
        text = got.to_json()
        assert Plan.from_json(text) == got
        json.loads(text, parse_constant=lambda name: pytest.fail(name))  # strict JSON


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}', '{"format": 2, "linears": {"a": 3}}'])
def test_what_is_no_plan_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="plan"):
        Plan.from_json(text)


def test_plans_name_what_there_is() -> None:
    with pytest.raises(ConfigError, match="w8a16, w8a8"):
        Plan.from_json(plan().to_json().replace('"w8a8"', '"w4"'))
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.qkv: dtype 'int4'"):
        Plan.from_json(plan().to_json().replace('"int8"', '"int4"'))


def test_the_last_pattern_that_fits_decides() -> None:
    keep = {"layers.0": "float32", "layers.*.mlp.down": "bfloat16", "lm_head": "float16"}
    assert kept_dtype("layers.0.mlp.down.weight", keep) == "bfloat16"
    assert kept_dtype("layers.0.mlp.gate_up.weight", keep) == "float32"
    assert kept_dtype("layers.10.mlp.down.weight", keep) == "bfloat16"
    assert kept_dtype("layers.1.mlp.gate_up.weight", keep) is None
    assert kept_dtype("lm_head.weight", keep) == "float16"


KEEPS = [{"layers.0": "bfloat16", "mlp.down": "float16"}, {"down": "float16"}, {"attention": "bfloat16"}, {"*.qkv": "float16"}]


@pytest.mark.parametrize("keep", KEEPS)
def test_a_plan_keeps_what_the_quantised_model_keeps(keep: dict[str, str]) -> None:
    """The words of `keep` mean the same in a plan and in `plan_quantization`."""
    config = CONFIGS["llama"]
    found = [LinearSensitivity(name, 0.01, 1.0, 0.0, 10) for name in linear_names(config)]
    made = make_plan(found, scheme="w8a8", model_dtype="float32", keep=keep)
    stored = plan_quantization(config, "w8a8", keep=keep)
    assert {name: decision.dtype for name, decision in made.linears.items()} == {
        name: stored.dtype_of(f"{name}.weight") for name in linear_names(config)
    }


def test_the_worst_comes_first() -> None:
    assert [found.relative_l2 for found in ranked(FOUND)] == [0.03, 0.02, 0.01, 0.001]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sensitivity": -0.1}, "0 or more"),
        ({"max_sensitivity": math.nan}, "0 or more"),
        ({"keep": {"lm_head": "int8"}}, "lm_head: 'int8' is not a dtype to keep"),
    ],
)
def test_wrong_budgets_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**options)
    with pytest.raises(ConfigError, match="measure them first"):
        make_plan([], scheme="w8a8", model_dtype="bfloat16")


def fit(costs: dict[str, float], limit: float, **options: Any) -> tuple[Plan, list[int]]:
    """A plan fitted to a model whose perplexity ratio is 1 and these costs of the linears that are int8; what was measured."""
    seen: list[int] = []

    def ratio_of(tried: Plan) -> float:
        seen.append(len(tried.linears) - len(tried.quantised))
        return 1 + sum(costs[name] for name in tried.quantised)

    found = [LinearSensitivity(name, math.sqrt(cost), 0.99, options.get("kl", cost), 100) for name, cost in costs.items()]
    start = make_plan(found, scheme="w8a8", model_dtype="bfloat16", keep=options.get("keep"))
    return fit_perplexity(start, ratio_of, model_dtype="bfloat16", max_ratio=limit, progress=lambda done: None), seen


COSTS = {f"layers.{index}.mlp.down": (1 + index % 7) * 1e-3 for index in range(40)}


@pytest.mark.parametrize("limit", [1.0005, 1.005, 1.01, 1.05, 1.1, 1.156, 1.2])
def test_a_perplexity_budget_keeps_the_worst_until_it_holds_and_no_more(limit: float) -> None:
    if limit == 1.0005:
        with pytest.raises(ConfigError, match=r"no linear can be int8 within max_perplexity_ratio 1\.0005"):
            fit(COSTS, limit)
        return
    got, seen = fit(COSTS, limit)
    kept = {name for name, decision in got.linears.items() if decision.dtype == "bfloat16"}
    assert got.perplexity_ratio == 1 + sum(COSTS[name] for name in got.quantised)
    assert got.perplexity_ratio <= limit
    assert min((COSTS[name] for name in kept), default=1.0) >= max(COSTS[name] for name in got.quantised)
    if kept:
        assert got.perplexity_ratio + min(COSTS[name] for name in kept) > limit
        assert f"one of the {len(kept)} that cost most: without them the perplexity ratio is above {limit:g}" == (
            got.linears[next(iter(kept))].reason
        )
    assert len(seen) <= 12
    assert (got.max_perplexity_ratio, Plan.from_json(got.to_json())) == (limit, got)


def test_a_budget_goes_by_what_a_weight_costs_and_leaves_what_is_kept_already() -> None:
    small = LinearSensitivity("layers.0.attention.out", 0.02, 0.9, 0.001, 10)  # less KL, but ten times as much for each weight
    large = LinearSensitivity("layers.0.mlp.down", 0.03, 0.9, 0.002, 200)
    start = make_plan([small, large], scheme="w8a8", model_dtype="bfloat16", keep={"layers.9": "float32"})
    ratios = {2: 1.5, 1: 1.0, 0: 1.0}
    options: dict[str, Any] = {"model_dtype": "bfloat16", "max_ratio": 1.01, "progress": lambda done: None}
    got = fit_perplexity(start, lambda tried: ratios[len(tried.quantised)], **options)
    assert got.quantised == ["layers.0.mlp.down"]
    kept = make_plan([small, large], scheme="w8a8", model_dtype="bfloat16", keep={"layers.0.mlp.down": "float32"})
    assert fit_perplexity(kept, lambda tried: 1.0, **options).linears == kept.linears
    with pytest.raises(ConfigError, match="no linear can be int8"):
        fit_perplexity(start, lambda tried: math.nan, **options)
    with pytest.raises(ConfigError, match="is 1 or more"):
        fit_perplexity(start, lambda tried: 1.0, **options | {"max_ratio": 0.99})
