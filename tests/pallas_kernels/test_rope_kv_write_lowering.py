"""The kernel lowered for an H200 on a machine without one: register layouts of what is served, one kernel for all layers, and
that a program with attention behind it never copies the cache."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from jaxlib import lapack

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_kv_write import mosaic, rope_kv_write

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))

LLAMA_8B, QWEN_1_5B, QWEN_0_5B, SMOLLM2 = (32, 8, 128), (12, 2, 128), (14, 2, 64), (9, 3, 64)
PAGES, PAGE = 101, 16  # pages of a layer


def array(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(model, tokens, *, norm=False, layers=1, rows=None):
    heads, kv_heads, head_dim = model
    cache = array(layers * PAGES, kv_heads, PAGE, head_dim, dtype=jnp.bfloat16)
    table, weight = array(tokens, head_dim // 2, dtype=jnp.float32), array(head_dim, dtype=jnp.float32) if norm else None
    qkv = array(rows or tokens, (heads + 2 * kv_heads) * head_dim, dtype=jnp.bfloat16)
    return qkv, cache, cache, table, table, array(tokens), array(tokens), weight, weight


def lowered(model, tokens, *, norm=False, config=None, layers=1, rows=None):
    def step(qkv, k_cache, v_cache, *rest):
        queries = []
        for layer in range(layers):
            q, k_cache, v_cache = mosaic.rope_kv_write(
                qkv, k_cache, v_cache, *rest, page_offset=jnp.int32(layer * PAGES), eps=1e-6, config=config
            )
            queries.append(q)
        return queries, k_cache, v_cache

    with jax.sharding.use_abstract_mesh(H200):
        args = arguments(model, tokens, norm=norm, layers=layers, rows=rows)
        return jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("model", "tokens", "norm"),
    [
        (LLAMA_8B, 1, False),
        (LLAMA_8B, 32, False),
        (LLAMA_8B, 256, True),
        (QWEN_1_5B, 8, False),
        (QWEN_0_5B, 256, False),
        (SMOLLM2, 32, True),
        ((32, 32, 80), 8, True),
        ((32, 32, 96), 32, False),
        ((16, 8, 192), 1, True),
        ((16, 8, 256), 256, True),
        ((71, 1, 64), 8, False),
        ((1, 1, 80), 1, True),
    ],
)
def test_production_configs_lower(model, tokens, norm):
    assert lowered(model, tokens, norm=norm).count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "model", [LLAMA_8B, QWEN_1_5B, QWEN_0_5B, SMOLLM2, (32, 32, 80), (32, 32, 96), (16, 8, 192), (16, 8, 256)]
)
def test_every_candidate_lowers(model, norm):
    """For any number of tokens, which is only how many CTAs there are."""
    heads, kv_heads, head_dim = model
    key = {"tokens": 8, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "norm": int(norm)}
    for config in mosaic.candidates(key):
        assert lowered(model, 8, norm=norm, config=config).count("custom_call @mosaic_gpu") == 1


def test_all_layers_call_one_kernel_with_nothing_around_it():
    """Traced and lowered once, not once a layer; rows beyond the tokens are not cut off in a launch of their own."""
    text = lowered(LLAMA_8B, 8, layers=3, rows=64)
    assert text.count("call @rotate_and_write") == 3
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    operations = set(re.findall(r"= stablehlo\.(\w+)", text))
    assert operations <= {"custom_call", "constant", "reshape", "broadcast_in_dim", "convert"}


def test_layers_of_write_and_attention_never_copy_the_cache():
    """XLA's own decision, for a program that is lowered for the card, with both kernels, and compiled for the CPU: kernels are
    opaque calls that say which operand a result lies in, and a function of the same kind stands in for them. It is never run."""
    heads, _, head_dim = model = LLAMA_8B
    layers, tokens = 3, 4

    def step(qkv, k_cache, v_cache, cos, sin, pages, offsets, table, lengths, starts):
        for layer in range(layers):
            offset = jnp.int32(layer * PAGES)
            q, k_cache, v_cache = rope_kv_write(
                qkv, k_cache, v_cache, cos, sin, pages, offsets, page_offset=offset, eps=1e-6, implementation="mosaic"
            )
            out = paged_attention(
                q, k_cache, v_cache, table, lengths, starts,
                page_offset=offset, scale=0.1, decode=True, implementation="mosaic",
            )  # fmt: skip
            qkv = qkv.at[:, : heads * head_dim].add(out.reshape(tokens, -1))
        return qkv, k_cache, v_cache

    jax.ffi.register_ffi_target("mosaic_gpu_v2", lapack._lapack.registrations()["lapack_strsm_ffi"], platform="cpu")
    unchecked = jax.export.DisabledSafetyCheck.platform(), jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    args = *arguments(model, tokens, layers=layers)[:7], array(tokens, 20), array(tokens), array(tokens + 1)
    with jax.sharding.use_abstract_mesh(H200):
        exported = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=unchecked)(*args)
    program = jax.jit(exported.call, donate_argnums=(1, 2)).lower(*args).compile()

    calls = [line for line in program.as_text().splitlines() if "custom-call(" in line]
    assert len(calls) == 2 * layers
    cache_bytes = 2 * args[1].size
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes
