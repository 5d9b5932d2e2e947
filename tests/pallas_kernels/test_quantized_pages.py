"""Keys and values in int8 pages: what is written against float64, and attention over it against the float64 oracle.

Whatever no row owns holds NaN in its scales and -128 in its values.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from int8_pages import expected, make, options

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.shapes import (
    DECODE,
    EXTEND,
    RAGGED_DECODE,
    RAGGED_EXTEND,
    VERIFY,
    Case,
)
from pallas_kernels.quantized_pages import QuantizedPages, dequantize_pages
from pallas_kernels.rope_kv_write import rope_kv_write

TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}
NAMES = ("ragged, with padding rows", "soft cap, multi-query, head dim 80", "relative bias, soft cap, window", "1 to 8 queries",
    "ragged: prefill, decode, chunk on a prefix, padding", "head dim 96, page 24", "pages larger than a chunk")  # fmt: skip
CASES = [case for case in DECODE + EXTEND + VERIFY if case.name in NAMES]


def run(case, args, offset, **changes):
    result = paged_attention(
        *args, page_offset=offset, decode=case.decode, max_queries=case.max_queries, **options(case), **changes
    )
    assert result.dtype == case.dtype
    return np.asarray(result, np.float64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_the_oracle_over_what_the_pages_stand_for(case):
    args, offset = make(case)
    np.testing.assert_allclose(run(case, args, offset), expected(case, args, offset), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_in_narrow_dtypes(dtype):
    case = dataclasses.replace(RAGGED_EXTEND, dtype=dtype)
    args, offset = make(case)
    np.testing.assert_allclose(run(case, args, offset), expected(case, args, offset), rtol=0, atol=TOLERANCE[dtype])


def test_small_values_in_float16():
    """A weight times the scale of a value may be less than float16 can say."""
    case = dataclasses.replace(DECODE[0], dtype="float16", rows=((900, 1), *((0, 0),) * 9), layers=1, layer=0)
    (q, k_cache, v_cache, *batch), offset = make(case)
    small = dataclasses.replace(v_cache, scale=v_cache.scale * 1e-3)
    args = (q, k_cache, small, *batch)
    right = expected(case, args, offset)
    np.testing.assert_allclose(run(case, args, offset), right, rtol=0, atol=3e-3 * np.abs(right).max())


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 127, 128, 129])
def test_lengths_around_page_borders(length, decode):
    """One row alone and beside a long one; a prompt whole, a single token."""
    count = min(length, 1 if decode else 40)
    case = Case(
        name="", num_heads=6, num_kv_heads=2, head_dim=8, page_size=16, rows=((length, count), (130, 1)), decode=decode,
        padded_tokens=0 if decode else 40 - count, table_pages=9, pool_pages=24, layers=2, layer=1,
    )  # fmt: skip
    args, offset = make(case, seed=length)
    np.testing.assert_allclose(run(case, args, offset), expected(case, args, offset), rtol=0, atol=TOLERANCE["float32"])


@pytest.mark.parametrize("case", [RAGGED_DECODE, RAGGED_EXTEND], ids=lambda case: case.name)
def test_what_no_row_owns_never_reaches_the_output(case):
    args, offset = make(case)
    q, k_cache, v_cache, *batch = args

    def clean(cache):
        free = ~jnp.isfinite(cache.scale)
        qvalue = jnp.where(free[..., None], 0, cache.qvalue)
        return dataclasses.replace(cache, qvalue=qvalue, scale=jnp.where(free, 0, cache.scale))

    assert np.isnan(np.asarray(v_cache.scale)).any()
    right = run(case, (q, clean(k_cache), clean(v_cache), *batch), offset)
    np.testing.assert_array_equal(run(case, args, offset), right)
    assert np.isfinite(right).all()


def test_nan_of_one_row_stays_in_that_row():
    case = RAGGED_EXTEND
    args, offset = make(case)
    right = run(case, args, offset)
    q, k_cache, v_cache, table, *batch = args
    page = int(table[5, 0]) + offset
    own = slice(*(int(start) for start in batch[1][5:7]))
    for changed in ("k", "v"):
        caches = {"k": k_cache, "v": v_cache}
        broken = caches[changed].scale.at[page, :, 3].set(jnp.nan)
        caches[changed] = dataclasses.replace(caches[changed], scale=broken)
        result = run(case, (q, caches["k"], caches["v"], table, *batch), offset)
        assert np.isnan(result[own]).all()
        result[own] = right[own]
        np.testing.assert_array_equal(result, right)


def test_a_row_alone_equals_the_row_in_a_batch():
    case = RAGGED_DECODE
    args, offset = make(case)
    together = run(case, args, offset)
    q, k_cache, v_cache, table, lengths, _ = args
    for row in (0, 4, 6):
        alone = (q[row : row + 1], k_cache, v_cache, table[row : row + 1], lengths[row : row + 1], jnp.arange(2))
        np.testing.assert_array_equal(run(case, alone, offset)[0], together[row])


def blank(layers=2, pages=6, kv_heads=2, page=16, head_dim=16, *, channels=None):
    """Pages in which nothing was written: NaN scales."""
    shape = (layers * pages, kv_heads, page, head_dim)
    return QuantizedPages(jnp.zeros(shape, jnp.int8), jnp.full(shape[:3], jnp.nan), channels)


def written(cache, pages, offsets):
    return (np.asarray(part)[pages, :, offsets] for part in (cache.qvalue, cache.scale))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_write_is_off_by_half_a_step_at_most(dtype):
    """Each token's head by its own scale and its layer's channels; nothing else is touched."""
    random = np.random.default_rng()
    channels = jnp.asarray(2.0 ** random.integers(-7, 3, (2, 2, 16)), jnp.float32)
    caches = blank(channels=channels), blank()
    k, v = (random.standard_normal((5, 2, 16)) * 10.0 ** random.uniform(-6, 6, (5, 2, 1)) for _ in "kv")
    k[..., 3] += 354  # a bias in one channel
    v[1, 0], v[2, 1] = 0, np.eye(16)[4] * 1e4  # nothing, and a single outlier
    new = [jnp.asarray(x, dtype) for x in (k, v)]
    pages, offsets = np.array([6, 6, 11, 1, 2]), np.array([0, 15, 7, 3, 15])  # of both layers
    after = jax.jit(write_kv)(*caches, *new, jnp.asarray(pages), jnp.asarray(offsets))
    for cache, values, factors in zip(after, new, (np.asarray(channels, np.float64)[pages // 6], 1.0), strict=True):
        exact = np.asarray(values, np.float64)
        qvalue, scale = written(cache, pages, offsets)
        step = np.asarray(scale, np.float64)[..., None] * factors
        assert np.all(np.abs(qvalue * step - exact) <= step * (0.5 + 1e-4))
        largest = np.abs(exact / factors).max(axis=-1)
        np.testing.assert_allclose(scale, np.where(largest > 0, largest / 127, 1), rtol=1e-6)
        assert np.isnan(cache.scale).sum() == cache.scale.size - 5 * 2
        np.testing.assert_array_equal(dequantize_pages(cache)[pages, :, offsets], (qvalue * step).astype(np.float32))


def test_channels_keep_what_a_scale_alone_loses():
    """A channel of 354 beside others of 1, as in some models' keys: its step would be larger than they are."""
    random = np.random.default_rng()
    k = random.standard_normal((64, 2, 16))
    k[..., 3] += 354
    channels = np.ones((1, 2, 16), np.float32)
    channels[..., 3] = 256
    errors = {}
    for name, factors in (("none", None), ("balanced", jnp.asarray(channels))):
        cache = blank(1, 5, channels=factors)
        pages, offsets = jnp.arange(64) // 16 + 1, jnp.arange(64) % 16
        written_k, _ = write_kv(cache, blank(1, 5), jnp.asarray(k, jnp.float32), jnp.asarray(k, jnp.float32), pages, offsets)
        error = np.asarray(dequantize_pages(written_k))[np.asarray(pages), :, np.asarray(offsets)] - k
        errors[name] = np.sqrt((np.delete(error, 3, axis=-1) ** 2).mean())
    assert errors["none"] > 0.5
    assert errors["balanced"] < 0.01


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_is_not_finite_has_a_scale_that_is_not(bad):
    k = np.ones((2, 2, 16), np.float32)
    k[1, 0, 5] = bad
    cache, _ = write_kv(blank(), blank(), jnp.asarray(k), jnp.asarray(k), jnp.array([1, 1]), jnp.array([0, 1]))
    np.testing.assert_array_equal(np.isfinite(cache.scale[1, :, :2]), [[True, False], [True, True]])
    assert np.isnan(dequantize_pages(cache)[1, 0, 1]).any()


def test_slots_out_of_range_are_dropped():
    pages, offsets = jnp.array([12, -1, 1, 1], jnp.int32), jnp.array([0, 0, 16, -1], jnp.int32)
    new = jnp.ones((4, 2, 16))
    for cache in write_kv(blank(), blank(), new, new, pages, offsets):
        assert not cache.qvalue.any()
        assert np.isnan(cache.scale).all()


@pytest.mark.parametrize("norm", [False, True])
def test_rope_kv_write_is_its_float_self_and_a_write(norm):
    """Queries are the same to the bit; keys and values go into the pages as `write_kv` puts them."""
    random = np.random.default_rng()
    qkv = jnp.asarray(random.standard_normal((7, (4 + 2 * 2) * 16)), jnp.bfloat16)
    angles = random.uniform(0, 6, (5, 8))
    tables = [jnp.asarray(table(angles), jnp.float32) for table in (np.cos, np.sin)]
    norms = [jnp.asarray(random.uniform(0.5, 1.5, 16), jnp.float32) if norm else None for _ in "qk"]
    pages, offsets = jnp.array([1, 1, 2, 3, 5]), jnp.array([0, 15, 3, 3, 9])
    channels = jnp.asarray(2.0 ** random.integers(-3, 3, (2, 2, 16)), jnp.float32)
    call = jax.jit(lambda *caches: rope_kv_write(qkv, *caches, *tables, pages, offsets, *norms, page_offset=6, eps=1e-6))
    plain = [jnp.zeros((12, 2, 16, 16), jnp.bfloat16)] * 2
    q, *floats = call(*plain)
    own_q, *pages_of_int8 = call(blank(channels=channels), blank())
    np.testing.assert_array_equal(np.asarray(own_q, np.float32), np.asarray(q, np.float32))
    new = [cache[pages + 6, :, offsets] for cache in floats]
    for got, right in zip(pages_of_int8, write_kv(blank(channels=channels), blank(), *new, pages + 6, offsets), strict=True):
        np.testing.assert_array_equal(got.qvalue, right.qvalue)
        np.testing.assert_array_equal(got.scale, right.scale)


def test_layers_of_write_and_attention_never_copy_the_pages():
    """The pages are donated: the compiled program aliases them and holds no copy or conversion of a whole array."""
    layers, pages, rows, dim, tokens = 2, 501, 4, 8, 4
    shape = (layers * pages, 1, 16, dim)

    def model(k_cache, v_cache, x, table, seq_lens, starts, write_pages, offsets):
        for layer in range(layers):
            kv = x[:, :1]
            k_cache, v_cache = write_kv(k_cache, v_cache, kv, kv + 1, write_pages + layer * pages, offsets)
            x = x + paged_attention(
                x * 2, k_cache, v_cache, table, seq_lens, starts, page_offset=layer * pages, scale=0.3, decode=True
            )
        return k_cache, v_cache, x

    def spec(*shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    cache = QuantizedPages(spec(*shape, dtype="int8"), spec(*shape[:3], dtype="float32"), spec(layers, 1, dim, dtype="float32"))
    batch = spec(rows, 20), spec(rows), spec(rows + 1), spec(tokens), spec(tokens)
    program = jax.jit(model, donate_argnums=(0, 1)).lower(cache, cache, spec(tokens, 2, dim, dtype="float32"), *batch).compile()
    for size in (shape, shape[:3]):
        text = f"[{','.join(map(str, size))}]"
        assert text in program.as_text()
        assert re.findall(rf"{re.escape(text)}\S* (?:copy|transpose|convert|select)\(", program.as_text()) == []
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * np.prod(shape[:3]) * (dim + 4)
    assert memory.temp_size_in_bytes < np.prod(shape)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"scale": (12, 2, 15)}, r"scale \[LP, K, page\]"),
        ({"channels": (5, 2, 16)}, "L a divisor of LP"),
        ({"channels": (2, 2, 8)}, r"channels \[L, K, H\]"),
    ],
)
@pytest.mark.parametrize("operation", ["write", "attention"])
def test_parts_that_do_not_fit_are_refused(operation, parts, message):
    broken = dataclasses.replace(blank(), **{name: jnp.zeros(shape) for name, shape in parts.items()})
    with pytest.raises(ValueError, match=message):
        call(operation, broken, blank())


def test_caches_of_two_kinds_are_refused():
    with pytest.raises(ValueError, match="two caches of one dtype and shape"):
        call("attention", blank(), jnp.zeros((12, 2, 16, 16)))


def call(operation, k_cache, v_cache, *, decode=True, implementation=None):
    new, places = jnp.zeros((3, 2, 16), jnp.bfloat16), jnp.zeros(3, jnp.int32)
    if operation == "write":
        return write_kv(k_cache, v_cache, new, new, places, places)
    batch = jnp.zeros((3, 2), jnp.int32), places, jnp.arange(4)
    options = {"page_offset": 0, "scale": 1.0, "decode": decode, "implementation": implementation}
    return paged_attention(new, k_cache, v_cache, *batch, **options)


@pytest.mark.parametrize(
    ("implementation", "decode", "message"),
    [
        ("mosaic", True, "head dims 64, 128, 256, got 16"),
        ("flash", False, "bfloat16 only, got bfloat16 queries and int8 keys"),
    ],
)
def test_kernels_that_cannot_read_the_pages_say_so(implementation, decode, message):
    with pytest.raises(UnsupportedShape, match=message):
        call("attention", blank(), blank(), decode=decode, implementation=implementation)


def test_the_kernel_that_cannot_write_int8_pages_says_so():
    tables, places = (jnp.zeros((3, 8)),) * 2, (jnp.zeros(3, jnp.int32),) * 2
    with pytest.raises(UnsupportedShape, match="bfloat16 only, got bfloat16 q, k, v and int8, int8 caches"):
        rope_kv_write(
            jnp.zeros((3, 96), jnp.bfloat16), blank(), blank(), *tables, *places, page_offset=0, eps=1e-6, implementation="mosaic"
        )
