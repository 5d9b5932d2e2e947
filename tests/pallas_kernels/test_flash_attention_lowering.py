"""The Mosaic kernel lowered for an H200 on a machine without one: layouts, copies, wgmma and shared memory of what is served."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import tuning
from pallas_kernels.flash_attention import flash_attention, mosaic
from pallas_kernels.flash_attention.mosaic import Config, Shape
from pallas_kernels.paged_attention import paged_attention

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))

LLAMA_8B, QWEN_1_5B, SMOLLM2 = (32, 8, 128), (12, 2, 128), (9, 3, 64)


def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(function, *arguments):
    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def contiguous(model, tokens=2048, alibi=False, bias_width=0, **options):
    heads, kv_heads, head_dim = model
    kv = array(tokens, kv_heads, head_dim, dtype=jnp.bfloat16)

    def attend(q, k, v, query_starts, key_starts, window, slopes, bias):
        biases = {"alibi_slopes": slopes, "relative_bias": bias}
        return flash_attention(
            q, k, v, query_starts, key_starts, window=window, **biases, **{"implementation": "mosaic", **options}
        )

    return lower(
        attend, array(tokens, heads, head_dim, dtype=jnp.bfloat16), kv, kv, array(5), array(5), array(),
        array(heads, dtype=jnp.float32) if alibi else None,
        array(heads, bias_width, dtype=jnp.float32) if bias_width else None,
    )  # fmt: skip


def paged(model, page, tokens=2048, rows=64, layers=1, config=None, implementation="flash"):
    heads, kv_heads, head_dim = model
    pool = array(600, kv_heads, page, head_dim, dtype=jnp.bfloat16)

    def extend(q, *rest):
        *operands, windows = rest
        results = []
        for layer in range(layers):
            options = {"page_offset": layer * 7, "scale": head_dim**-0.5, "window": windows[layer], "decode": False}
            if config is None:
                results.append(paged_attention(q, *operands, **options, implementation=implementation))
            else:
                results.append(mosaic.paged_attention(q, *operands, **options, config=config))
        return results

    q = array(tokens, heads, head_dim, dtype=jnp.bfloat16)
    return lower(extend, q, pool, pool, array(rows, 8192 // page), array(rows), array(rows + 1), array(layers))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (LLAMA_8B, {"return_lse": True}),
        (QWEN_1_5B, {"alibi": True, "soft_cap": 30.0}),
        ((12, 12, 64), {"bias_width": 128}),
        ((16, 8, 256), {"causal": False}),
        pytest.param((16, 8, 192), {}, marks=pytest.mark.slow),
        pytest.param((71, 1, 64), {"tokens": 1003}, marks=pytest.mark.slow),  # neither T nor S is a multiple of 8
    ],
)
def test_contiguous_keys_lower(model, options):
    assert "mosaic_gpu" in contiguous(model, **options)


@pytest.mark.parametrize(
    ("model", "page"),
    [
        (LLAMA_8B, 16),
        (LLAMA_8B, 64),
        *(
            pytest.param(model, page, marks=pytest.mark.slow)
            for model in (QWEN_1_5B, SMOLLM2, (16, 8, 192), (16, 8, 256))
            for page in (16, 32, 64)
        ),
    ],
)
def test_paged_keys_lower(model, page):
    assert "mosaic_gpu" in paged(model, page)


def test_rows_of_one_query_apart_make_a_launch_of_two_kernels():
    text = paged(LLAMA_8B, 16, tokens=512, rows=256, layers=2, implementation="apart")
    assert text.count("func.func private @_attend") == 1
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2


@pytest.mark.slow
def test_every_candidate_of_the_8b_lowers():
    shape = Shape(2048, 64, *LLAMA_8B, 16, 8192, 1, 0)
    for config in mosaic.candidates(shape._asdict()):
        assert "mosaic_gpu" in paged(LLAMA_8B, 16, config=config)


def test_all_layers_call_one_kernel():
    """Traced and lowered once, not once a layer; the layer and its window are arguments."""
    text = paged(LLAMA_8B, 16, layers=3, config=Config(64, 2, 2, 4))
    assert text.count("call @_attend") == 3
    assert text.count("func.func private @_attend") == 1
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_gradients_lower_behind_the_kernel():
    q, kv = (array(512, heads, 64, dtype=jnp.bfloat16) for heads in (4, 2))

    def total(q, k, v):
        return flash_attention(q, k, v, implementation="mosaic").astype(jnp.float32).sum()

    assert "mosaic_gpu" in lower(jax.grad(total, argnums=(0, 1, 2)), q, kv, kv)


def test_a_prefill_takes_the_kernel_that_the_table_names(monkeypatch, tmp_path):
    """As the model calls it, without a name; also for fewer tokens, rows and a shorter context than were tuned."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuned = Shape(2048, 64, *LLAMA_8B, 16, 8192, 1, 0)
    entry = {
        "key": tuned._asdict(), "implementation": "flash", "config": Config(64, 2, 2, 4)._asdict(), "microseconds": 1.0,
        "xla_microseconds": 2.0, "bytes_per_second": 1e12, "date": "2026-01-01", "command": "test",
    }  # fmt: skip
    tuning.save(tuning.path_of("NVIDIA H200"), "NVIDIA H200", {"paged_attention": [entry]})
    pool = array(600, 8, 16, 128, dtype=jnp.bfloat16)

    def extend(q, *operands, max_queries=0):
        return paged_attention(*(q, *operands), page_offset=0, scale=0.1, decode=False, max_queries=max_queries)

    operands = array(512, 32, 128, dtype=jnp.bfloat16), pool, pool, array(8, 256), array(8), array(9)
    assert "mosaic_gpu" in lower(extend, *operands)
    assert "mosaic_gpu" not in lower(functools.partial(extend, max_queries=4), *operands)
    tuning.load.cache_clear()
