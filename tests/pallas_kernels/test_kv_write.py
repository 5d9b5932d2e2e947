"""The write into the paged cache: what it writes, and that a program with several layers never copies the cache."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writes_exactly_the_named_slots(dtype):
    random = np.random.default_rng(0)
    shape = (9, 2, 16, 6)
    before = [jnp.asarray(random.standard_normal(shape), dtype) for _ in "kv"]
    new = [jnp.asarray(random.standard_normal((6, 2, 6)), dtype) for _ in "kv"]
    pages, offsets = np.array([3, 3, 8, 1, 0, 0]), np.array([0, 15, 7, 3, 5, 5])  # the last two are padding and collide
    after = write_kv(*before, *new, jnp.asarray(pages, jnp.int32), jnp.asarray(offsets, jnp.int32))
    for old, cache, values in zip(before, after, new, strict=True):
        right = np.array(old)
        for token in range(4):
            right[pages[token], :, offsets[token]] = values[token]
        assert cache.dtype == dtype
        np.testing.assert_array_equal(np.asarray(cache)[1:], right[1:])


def test_slots_out_of_range_are_dropped():
    cache = jnp.zeros((3, 1, 4, 2))
    new = jnp.ones((4, 1, 2))
    pages, offsets = jnp.array([3, -1, 1, 1], jnp.int32), jnp.array([0, 0, 4, -1], jnp.int32)
    k, v = write_kv(cache, cache, new, new, pages, offsets)
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize(("tokens", "decode", "dtype"), [(4, True, "float32"), (4, True, "bfloat16"), (40, False, "float32")])
def test_layers_of_write_and_attention_never_copy_the_cache(tokens, decode, dtype):
    """The caches are donated: the compiled program aliases them and holds no copy, transpose or conversion of a whole one."""
    layers, pages, rows, dim = 2, 501, 4, 8
    shape = (layers * pages, 1, 16, dim)

    def model(k_cache, v_cache, x, table, seq_lens, starts, write_pages, offsets):
        for layer in range(layers):
            q, kv = x * 2, x[:, :1]
            k_cache, v_cache = write_kv(k_cache, v_cache, kv, kv + 1, write_pages + layer * pages, offsets)
            x = x + paged_attention(
                q,
                k_cache,
                v_cache,
                table,
                seq_lens,
                starts,
                page_offset=layer * pages,
                scale=0.3,
                window=layer * 16,
                decode=decode,
            )
        return k_cache, v_cache, x

    def spec(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    caches = spec(*shape, dtype=dtype), spec(*shape, dtype=dtype)
    batch = spec(rows, 20), spec(rows), spec(rows + 1), spec(tokens), spec(tokens)
    program = jax.jit(model, donate_argnums=(0, 1)).lower(*caches, spec(tokens, 2, dim, dtype=dtype), *batch).compile()

    size = f"{shape[0]},{','.join(map(str, shape[1:]))}"
    assert f"[{size}]" in program.as_text()
    assert re.findall(rf"\[{size}\]\S* (?:copy|transpose|convert|select)\(", program.as_text()) == []
    cache_bytes = np.prod(shape) * jnp.dtype(dtype).itemsize
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_cache": (4, 2, 16, 9)}, "one shape"),
        ({"k": (3, 2, 8)}, r"must be \(5, 2, 8\)"),
        ({"v": (5, 1, 8)}, r"must be \(5, 2, 8\)"),
        ({"offsets": (4,)}, r"offsets \(5,\)"),
    ],
)
def test_wrong_shapes_are_refused(changes, message):
    cache, new, slots = (4, 2, 16, 8), (5, 2, 8), (5,)
    shapes = {"k_cache": cache, "v_cache": cache, "k": new, "v": new, "pages": slots, "offsets": slots} | changes
    with pytest.raises(ValueError, match=message):
        write_kv(**{name: jnp.zeros(shape, "int32" if name in ("pages", "offsets") else None) for name, shape in shapes.items()})
