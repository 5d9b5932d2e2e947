"""The Mosaic kernel of paged attention over int8 pages: in the interpreter against the float64 oracle, and lowered for an H200.

Scales that no row owns are NaN, values there -128.
"""

import dataclasses

import attention_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int8_pages import expected, make
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.paged_attention import mosaic
from pallas_kernels.paged_attention.mosaic import Config, Shape
from pallas_kernels.paged_attention.shapes import Case, make_biases
from pallas_kernels.quantized_pages import QuantizedPages

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))
LLAMA_8B, QWEN_1_5B, SMOLLM2 = (32, 8, 128), (12, 2, 128), (9, 3, 64)

DECODE, FEW, WINDOW, VERIFY = (
    dataclasses.replace(case, dtype="bfloat16")
    for case in (attention_cases.DECODE, attention_cases.FEW, attention_cases.WINDOW, attention_cases.VERIFY)
)
PARTS = dataclasses.replace(FEW, name="parts of pages, head dim 128", page_size=64, head_dim=128, num_kv_heads=2)


def run(case, args, offset, config):
    with plgpu.force_gpu_interpret_mode():
        result = mosaic.paged_attention(
            *args, page_offset=jnp.int32(offset), scale=case.scale, window=jnp.int32(case.window), soft_cap=case.soft_cap,
            decode=case.decode, max_queries=case.max_queries, config=config, **make_biases(case),
        )  # fmt: skip
    assert result.dtype == jnp.bfloat16
    return np.asarray(result, np.float64)


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (DECODE, Config(heads=4, keys=16, stages=2)),
        pytest.param(WINDOW, Config(heads=2, keys=64, stages=2, splits=2), marks=pytest.mark.slow, id="window, soft cap, splits"),
        pytest.param(VERIFY, Config(heads=2, keys=32, stages=2), marks=pytest.mark.slow, id="verify"),
        pytest.param(PARTS, Config(heads=2, keys=32, stages=2, copier=True), marks=pytest.mark.slow, id="parts of pages, copier"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_equals_the_oracle(case, config):
    args, offset = make(case)
    result = run(case, args, offset, config)
    assert np.abs(expected(case, args, offset)).max() > 1
    np.testing.assert_allclose(result, expected(case, args, offset), rtol=0, atol=2e-2)


@pytest.mark.slow
def test_nan_of_one_row_stays_in_that_row():
    """With a team, whose members add up what they have."""
    args, offset = make(FEW)
    q, k_cache, v_cache, table, *batch = args
    broken = dataclasses.replace(v_cache, scale=v_cache.scale.at[int(table[0, 0]) + offset, :, 3].set(jnp.nan))
    args = (q, k_cache, broken, table, *batch)
    result = run(FEW, args, offset, Config(heads=4, keys=16, stages=2, team=2))
    assert np.isnan(result[0]).all()
    np.testing.assert_allclose(result[1:], expected(FEW, args, offset)[1:], rtol=0, atol=2e-2)


def lowered(model, page, rows, queries=1, config=None, context=2048):
    (heads, kv_heads, head_dim), pages = model, 4 * rows * context // page

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    qvalue, scale = array(pages, kv_heads, page, head_dim, dtype=jnp.int8), array(pages, kv_heads, page, dtype=jnp.float32)
    k_cache = QuantizedPages(qvalue, scale, array(4, kv_heads, head_dim, dtype=jnp.float32))
    batch = array(rows, context // page), array(rows), array(rows + 1), array()

    def step(q, k, v, table, lengths, starts, window):
        return mosaic.paged_attention(
            q, k, v, table, lengths, starts, page_offset=7, scale=head_dim**-0.5, window=window, decode=queries == 1,
            max_queries=queries, config=config,
        )  # fmt: skip

    with jax.sharding.use_abstract_mesh(H200):
        q = array(rows * queries, heads, head_dim, dtype=jnp.bfloat16)
        return (
            jax.jit(step).trace(q, k_cache, QuantizedPages(qvalue, scale), *batch).lower(lowering_platforms=("cuda",)).as_text()
        )


@pytest.mark.parametrize(
    ("model", "page", "rows", "queries", "options"),
    [
        (LLAMA_8B, 16, 128, 1, {}),
        pytest.param(LLAMA_8B, 16, 32, 1, {"config": Config(4, 16, 6, 4, copier=True)}, marks=pytest.mark.slow),
        pytest.param(LLAMA_8B, 32, 8, 4, {}, marks=pytest.mark.slow),
        pytest.param(QWEN_1_5B, 16, 256, 1, {"context": 256}, marks=pytest.mark.slow),
        pytest.param((16, 8, 256), 64, 8, 1, {}, marks=pytest.mark.slow),
    ],
)
def test_production_configs_lower(model, page, rows, queries, options):
    assert "mosaic_gpu" in lowered(model, page, rows, queries, **options)


def queries(head_dim=64):
    """Four rows of one query, and what else a call takes behind the caches."""
    batch = jnp.zeros((4, 5), jnp.int32), jnp.zeros(4, jnp.int32), jnp.zeros(5, jnp.int32)
    return jnp.zeros((4, 8, head_dim), jnp.bfloat16), batch


def pages(cache=(20, 4, 16, 64)):
    return QuantizedPages(jnp.zeros(cache, jnp.int8), jnp.zeros(cache[:3]))


def test_the_key_tells_int8_from_bfloat16():
    q, batch = queries()
    plain = jnp.zeros((20, 4, 16, 64), jnp.bfloat16)
    options = {"page_offset": 0, "scale": 1.0, "decode": True}
    key = mosaic.shape_key(q, plain, plain, *batch, **options)
    assert mosaic.int8_shape_key(q, pages(), pages(), *batch, **options) == key | {"int8": 1}
    with pytest.raises(UnsupportedShape, match="a name of their own"):  # so that what suits bfloat16 pages is not taken for these
        mosaic.shape_key(q, pages(), pages(), *batch, **options)
    with pytest.raises(UnsupportedShape, match="int8 pages only"):
        mosaic.int8_shape_key(q, plain, plain, *batch, **options)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(rows, 1, *model, page, 2048, 0, 1)
        for rows in (1, 128)
        for model, page in ((LLAMA_8B, 16), (LLAMA_8B, 64), (QWEN_1_5B, 16), (SMOLLM2, 32))
    ],
    ids=lambda shape: "-".join(map(str, shape)),
)
def test_candidates_are_servable_and_begin_with_the_default(shape):
    found = mosaic.candidates(shape._asdict())
    assert found[0] == mosaic.default_config(shape)
    assert len(set(found)) == len(found) > 1
    assert [config for config in found if mosaic._reason(shape, config)] == []


@pytest.mark.parametrize(
    ("head_dim", "options", "message"),
    [
        (96, {}, "head dims 64, 128, 256, got 96"),
        (64, {"config": Config(1, 64, 1)}, "brings a multiple of 32 heads of tokens, got 16"),
        (64, {"config": Config(4, 16, 99)}, "bytes of shared memory, at most 231424"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(head_dim, options, message):
    q, batch = queries(head_dim)
    cache = pages((20, 4, 16, head_dim))
    with pytest.raises(UnsupportedShape, match=message):
        mosaic.paged_attention(q, cache, cache, *batch, page_offset=0, scale=1.0, decode=True, **options)


@pytest.mark.parametrize(("heads", "kv_heads", "page"), [(9, 3, 16), (8, 1, 16), (71, 1, 32)])
def test_shapes_without_a_block_are_refused(heads, kv_heads, page):
    """A copy of one page of an odd number of heads brings too few scales; 71 heads are two tiles."""
    q, cache = jnp.zeros((4, heads, 64), jnp.bfloat16), pages((20, kv_heads, page, 64))
    with pytest.raises(UnsupportedShape, match=f"no blocks of {kv_heads} kv heads on pages of {page} tokens"):
        mosaic.paged_attention(q, cache, cache, *queries()[1], page_offset=0, scale=1.0, decode=True)
