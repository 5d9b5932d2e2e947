"""The Mosaic kernel lowered for an H200 on a machine without one: layouts, copies, wgmma and shared memory of what is served."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.sharding import AbstractDevice, AbstractMesh

from llmjax.scheduling.speculation_config import MAX_DRAFT_TOKENS
from pallas_kernels import kernel_names
from pallas_kernels.paged_attention import mosaic, paged_attention
from pallas_kernels.paged_attention.mosaic import Config
from pallas_kernels.quantized_pages import QuantizedPages

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))

LLAMA_8B, QWEN_1_5B, SMOLLM2 = (32, 8, 128), (12, 2, 128), (9, 3, 64)


def lowered(model, page, rows, queries=1, config=None, context=2048, alibi=False, bias_width=0, soft_cap=0.0, layers=1):
    heads, kv_heads, head_dim = model

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = array(4 * rows * context // page, kv_heads, page, head_dim, dtype=jnp.bfloat16)
    arguments = (
        array(rows * queries, heads, head_dim, dtype=jnp.bfloat16),
        pool,
        pool,
        array(rows, context // page),
        array(rows),
        array(rows + 1),
        array(heads, dtype=jnp.float32) if alibi else None,
        array(heads, bias_width, dtype=jnp.float32) if bias_width else None,
        array(layers),
    )

    def step(q, k, v, table, lengths, starts, slopes, bias, windows):
        results = []
        for layer in range(layers):
            result = mosaic.paged_attention(
                q,
                k,
                v,
                table,
                lengths,
                starts,
                page_offset=layer * 7,
                scale=head_dim**-0.5,
                window=windows[layer],
                soft_cap=soft_cap,
                decode=queries == 1,
                max_queries=queries,
                alibi_slopes=slopes,
                relative_bias=bias,
                config=config,
            )
            results.append(result)
        return results

    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("model", "page", "rows", "queries", "options"),
    [
        (LLAMA_8B, 16, 128, 1, {}),
        (LLAMA_8B, 64, 128, 1, {}),
        (LLAMA_8B, 16, 32, 1, {"config": Config(4, 16, 6, 4, copier=True)}),
        (LLAMA_8B, 32, 8, 8, {}),
        (LLAMA_8B, 16, 8, 8, {"config": Config(4, 16, 3)}),
        (LLAMA_8B, 16, 8, 9, {}),
        (LLAMA_8B, 16, 8, 1, {"config": Config(4, 16, 3, 16), "context": 8192}),
        (LLAMA_8B, 16, 8, 1, {"config": Config(1, 64, 1, team=4), "context": 256}),
        (LLAMA_8B, 16, 1, 1, {"config": Config(2, 32, 3, 8, team=2), "context": 8192}),
        (QWEN_1_5B, 16, 256, 1, {"context": 256}),
        (SMOLLM2, 16, 1, 1, {"context": 512}),
        (SMOLLM2, 64, 8, 5, {"alibi": True}),
        ((32, 32, 80), 16, 8, 1, {"config": Config(2, 32, 2, team=3)}),
        ((32, 32, 96), 32, 8, 2, {"soft_cap": 30.0}),
        ((16, 8, 192), 16, 8, 1, {}),
        ((16, 8, 256), 64, 8, 3, {}),
        ((71, 1, 64), 16, 4, 3, {}),
        ((12, 12, 64), 16, 8, 1, {"bias_width": 128}),
    ],
)
def test_production_configs_lower(model, page, rows, queries, options):
    assert "mosaic_gpu" in lowered(model, page, rows, queries, **options)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 32, 256])
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize("model", [LLAMA_8B, QWEN_1_5B, SMOLLM2, (32, 32, 80), (32, 32, 96), (16, 8, 192), (16, 8, 256)])
def test_the_default_of_every_shape_lowers(model, page, rows):
    for queries in (1, 9):
        assert "mosaic_gpu" in lowered(model, page, rows, queries)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "page"), [(8, 16), (32, 64), (128, 16)])
def test_every_candidate_of_the_8b_lowers(rows, page):
    shape = mosaic.Shape(rows, 1, *LLAMA_8B, page, 2048, 0)
    for config in mosaic.candidates(shape._asdict()):
        assert "mosaic_gpu" in lowered(LLAMA_8B, page, rows, config=config)


def test_all_layers_call_one_kernel():
    """Traced and lowered once, not once a layer; the layer and its window are arguments."""
    text = lowered(LLAMA_8B, 16, 8, layers=3)
    assert text.count("call @_paged_attention") == 3
    assert text.count("func.func private @_paged_attention") == 1
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


def test_a_kernel_has_one_text_however_often_it_is_lowered(monkeypatch):
    monkeypatch.setattr(mosaic_gpu.dialect, "get_or_set_dump_options", mosaic_gpu.dialect.get_or_set_dump_options)
    kernel_names.keep_stable()
    first = lowered(LLAMA_8B, 16, 8)
    assert lowered(LLAMA_8B, 16, 8, soft_cap=30.0) != first
    jax.clear_caches()
    assert lowered(LLAMA_8B, 16, 8) == first
    once = mosaic_gpu.dialect.get_or_set_dump_options
    kernel_names.keep_stable()
    assert mosaic_gpu.dialect.get_or_set_dump_options is once


@pytest.mark.parametrize(("model", "heads", "padded"), [(LLAMA_8B, 4, False), (QWEN_1_5B, 1, False), (QWEN_1_5B, 2, True)])
def test_queries_are_padded_only_where_a_copy_cannot_fill_up_itself(model, heads, padded):
    """Whole eights of query heads need no padding, and fewer than eight get it from the copy; a pad is a launch of its own."""
    text = lowered(model, 16, 8, config=Config(heads, 64 // heads, 2))
    assert ("stablehlo.pad" in text) is padded


def chosen(model, queries, *, int8=False, prefill=False, rows=8, page=16, context=2048):
    """The lowered text of what an H200 runs for a shape that its table has no entry for."""
    heads, kv_heads, head_dim = model
    shape = (4 * rows * context // page, kv_heads, page, head_dim)
    pool = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    if int8:
        pool = QuantizedPages(jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:3], jnp.float32))
    q = jax.ShapeDtypeStruct((rows * queries, heads, head_dim), jnp.bfloat16)
    batch = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((rows, context // page), (rows,), (rows + 1,))]

    def call(*args):
        promise = {"decode": queries == 1, "max_queries": 0 if prefill else queries}
        return paged_attention(*args, page_offset=0, scale=head_dim**-0.5, **promise)

    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(call).trace(q, pool, pool, *batch).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("model", "options", "kernel"),
    [
        ((14, 2, 64), {"queries": 1}, True),  # a draft model
        ((14, 2, 64), {"queries": 2}, True),  # its first step of a round
        (QWEN_1_5B, {"queries": 4}, True),
        (LLAMA_8B, {"queries": MAX_DRAFT_TOKENS + 1}, True),
        ((14, 2, 64), {"queries": 64, "prefill": True}, True),
        ((32, 32, 80), {"queries": 64, "prefill": True}, False),
        (LLAMA_8B, {"queries": 1, "int8": True}, False),
        (LLAMA_8B, {"queries": 4, "int8": True}, False),
    ],
)
def test_shapes_that_the_table_does_not_know_have_a_kernel_but_on_int8_pages(model, options, kernel):
    assert ("mosaic_gpu" in chosen(model, **options)) is kernel
