"""Weights by rounding to nearest: the values, the patterns, and every refusal."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, random_params

from llmjax.errors import ConfigError, ModelError
from llmjax.model.quantization import Quantization
from llmjax.quantization.quantize import plan_quantization, quantize_params, quantize_weight
from pallas_kernels.quantized import QuantizedTensor, dequantize

CONFIG = CONFIGS["qwen2"]
LINEARS = [f"layers.{layer}.{name}.weight" for layer in (0, 1) for name in
           ("attention.out", "attention.qkv", "mlp.down", "mlp.gate_up")]  # fmt: skip


def planned(**arguments: Any) -> dict[str, str]:
    return dict(plan_quantization(CONFIG, "w8a8", **arguments).weights)


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_values_are_the_nearest_steps(granularity: Any) -> None:
    w = np.random.default_rng(1).standard_normal((12, 40)).astype(np.float32) * 10.0 ** np.arange(-6, 6)[:, None]
    rows = (6, 3, 3)
    got = quantize_weight(jnp.asarray(w), rows, granularity)
    wide = w.astype(np.float64)
    largest = np.abs(wide).max(1)
    if granularity == "tensor":
        largest = np.repeat([part.max() for part in np.split(largest, [6, 9])], rows)
    scale = largest / 127
    np.testing.assert_allclose(np.asarray(got.scale), scale, rtol=1e-6)
    steps = wide / np.asarray(got.scale, np.float64)[:, None]
    assert np.abs(np.asarray(got.qvalue) - steps).max() <= 0.5 + 1e-4
    assert np.abs(np.asarray(got.qvalue)).max() == 127


def test_zero_channels_outliers_and_equal_rows() -> None:
    w = np.full((4, 32), 0.02, np.float32)
    w[0], w[1], w[2, 3] = 0.0, np.linspace(-1, 1, 32), 1e4
    got = quantize_weight(jnp.asarray(w, jnp.bfloat16), (4,))
    back = np.asarray(dequantize(got))
    assert got.scale[0] == 1
    assert not back[0].any()
    assert np.abs(back[1] - w[1]).max() < 1 / 127
    assert back[2, 3] == pytest.approx(1e4, rel=4e-3)
    assert not np.delete(back[2], 3).any()
    np.testing.assert_allclose(back[3], np.asarray(jnp.bfloat16(0.02), np.float32), rtol=1e-6)


def test_patterns() -> None:
    assert sorted(planned()) == LINEARS
    assert set(planned().values()) == {"int8"}
    got = planned(dtypes={"linear": "int8", "attention": "bfloat16", "embeddings": "float16"})
    assert {name for name in got if got[name] == "int8"} == {name for name in LINEARS if "mlp" in name}
    assert got["embed.weight"] == "float16"
    assert got["layers.1.attention.qkv.weight"] == "bfloat16"
    kept = planned(keep={"*norm*": "float32", "layers.0": "float32", "mlp.down": "bfloat16", "lm_head": "int8"})
    assert kept["lm_head.weight"] == "int8"
    assert kept["layers.1.mlp.down.weight"] == "bfloat16"
    assert kept["layers.0.attention.qkv.weight"] == "float32"  # the model's own, which it keeps when loaded in another
    tied = CONFIG.replace(tie_embeddings=True)
    absent = dict.fromkeys(("lm_head", "head", "lm_head.weight"), "bfloat16")
    assert sorted(dict(plan_quantization(tied, "w8a16", keep=absent).weights)) == LINEARS
    many = CONFIG.replace(num_layers=12, sliding_windows=())
    assert sum("layers.1." in name for name, _ in plan_quantization(many, "w8a16", dtypes={"layers.1": "int8"}).weights) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep": {"nothing": "float32"}}, "pattern 'nothing' matches no weight"),
        ({"keep": {"mlp": "int4"}}, "mlp: dtype 'int4'; choose one of int8"),
        ({"keep": {"*norm*": "bfloat16"}}, "norms are float32, not bfloat16"),
        ({"keep": {"linear": "float32"}}, "no weight would be int8"),
        ({"keep": {"head": "float32"}, "dtypes": {}}, "no weight would be int8"),
    ],
)
def test_refused_patterns(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(**arguments)


def test_refused_weights_and_models() -> None:
    plan = plan_quantization(CONFIG, "w8a16")
    for value in (np.nan, np.inf):
        params = random_params(CONFIG)
        down = params["layers"][1]["mlp"]["down"]
        down["weight"] = down["weight"].at[3, 5].set(value)
        with pytest.raises(ModelError, match=r"layers.1.mlp.down.weight: 1 values are NaN or infinite, the first at \[3, 5\]"):
            quantize_params(params, CONFIG, plan)
    params = random_params(CONFIG)
    with pytest.raises(ConfigError, match="granularity 'group'"):
        quantize_params(params, CONFIG, plan, granularity="group")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="quantised already"):
        quantize_params(params, CONFIG.replace(quantization=plan), plan)
    with pytest.raises(ConfigError, match=r"the model has no layers.7.mlp.down.weight"):
        quantize_params(params, CONFIG, Quantization("w8a8", (("layers.7.mlp.down.weight", "int8"),)))
    del params["layers"][0]["mlp"]["down"]
    with pytest.raises(ModelError, match=r"layers.0.mlp.down.weight should be an array \[48, 80\]"):
        quantize_params(params, CONFIG, plan)
    with pytest.raises(ModelError, match=r"layers.0.attention.qkv.weight should be an array \[128, 48\]"):
        quantize_params(quantize_params(random_params(CONFIG), CONFIG, plan)[0], CONFIG, plan)
    params = random_params(CONFIG)
    params["embed"]["weight"] = params["embed"]["weight"].at[2, 1].set(1e5)
    with pytest.raises(ModelError, match=r"embed.weight in float16: 1 values are NaN or infinite, the first at \[2, 1\]"):
        quantize_params(params, CONFIG, plan_quantization(CONFIG, "w8a16", keep={"embeddings": "float16"}))
    with pytest.raises(ConfigError, match="scheme 'w4a16'"):
        plan_quantization(CONFIG, "w4a16")  # type: ignore[arg-type]


def test_a_model_is_taken_apart_weight_by_weight() -> None:
    params, plan = random_params(CONFIG), plan_quantization(CONFIG, "w8a8", keep={"embeddings": "bfloat16"})
    held = []

    def progress(done: int, total: int) -> None:
        held.append(sum("weight" in node for layer in params["layers"].values() for part in ("attention", "mlp")
                        for node in layer[part].values()))  # fmt: skip
        assert total == 1 + 2 * (2 + 5) + 2
        assert done == len(held)

    got, config = quantize_params(params, CONFIG, plan, take_apart=True, progress=progress)
    assert held[0] == 8
    assert held[-1] == 0
    assert sorted(held, reverse=True) == held
    assert config.quantization == plan
    assert got["embed"]["weight"].dtype == jnp.bfloat16
    assert isinstance(got["layers"][1]["mlp"]["down"]["weight"], QuantizedTensor)
    assert got["layers"][0]["attention"]["qkv"]["bias"] is params["layers"][0]["attention"]["qkv"]["bias"]
