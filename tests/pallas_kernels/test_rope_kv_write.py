"""From q, k and v to queries and cache: the reference in float64, the kernel in the interpreter, and its rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.fused_norm import rms_norm
from pallas_kernels.kv_write import write_kv
from pallas_kernels.rope_kv_write import apply_rope, mosaic, rope_kv_write
from pallas_kernels.rope_kv_write.mosaic import Config

EPS = 1e-6
PAGES, LAYER, PAGE = 6, 1, 16  # two layers' pages, of which the second is written


def make(tokens, heads, kv_heads, head_dim, *, norm=False, dtype="bfloat16", spare=2):
    """Random arguments. Everything that must not be read holds NaN: rows of q, k, v beyond the tokens, and the caches."""
    random = np.random.default_rng()
    qkv = random.standard_normal((tokens + spare, (heads + 2 * kv_heads) * head_dim))
    qkv[tokens:] = np.nan
    caches = np.full((2, 2 * PAGES, kv_heads, PAGE, head_dim), np.nan)
    angles = random.uniform(0, 6, (tokens, head_dim // 2))
    slots = random.permutation((PAGES - 1) * PAGE)[:tokens] + PAGE
    norms = [jnp.asarray(random.uniform(0.5, 1.5, head_dim), jnp.float32) if norm else None for _ in "qk"]
    return (
        *(jnp.asarray(a, dtype) for a in (qkv, *caches)),
        *(jnp.asarray(a, jnp.float32) for a in (np.cos(angles), np.sin(angles))),
        *(jnp.asarray(a, jnp.int32) for a in (slots // PAGE, slots % PAGE)),
        *norms,
    )


def run(args, implementation="xla", config=None):
    operation = functools.partial(rope_kv_write, implementation=implementation)
    if config is not None:
        operation = functools.partial(mosaic.rope_kv_write, config=config)
    return jax.jit(lambda *args: operation(*args, page_offset=jnp.int32(LAYER * PAGES), eps=EPS))(*args)


def oracle(args):
    """float64: q [T, N, H], k and v [T, K, H], pairs as complex numbers."""
    qkv, k_cache, _, cos, sin, _, _, *norms = args
    tokens, (_, kv_heads, _, head_dim) = len(cos), k_cache.shape
    heads = np.asarray(qkv[:tokens], np.float64).reshape(tokens, -1, head_dim)
    turn = (np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64))[:, None]

    def rotated(x, norm):
        if norm is not None:
            x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * np.asarray(norm, np.float64)
        z = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    q, k, v = np.split(heads, [-2 * kv_heads, -kv_heads], axis=1)
    return rotated(q, norms[0]), rotated(k, norms[1]), v


def taken_out(cache, args):
    """What lies in the tokens' slots [T, K, H], and the cache without it."""
    pages, offsets = np.asarray(args[5]) + LAYER * PAGES, np.asarray(args[6])
    rest = np.array(cache)
    found = rest[pages, :, offsets].copy()
    rest[pages, :, offsets] = np.nan
    return found.astype(np.float64), rest.astype(np.float64)


def test_the_rotation_is_the_rotate_half_of_hugging_face():
    random = np.random.default_rng()
    x, angles = random.standard_normal((5, 3, 16)), random.uniform(-9, 9, (5, 8))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    got = apply_rope(jnp.asarray(x, jnp.float32), cos, sin)
    for token in range(5):
        for i in range(8):
            z = (x[token, :, i] + 1j * x[token, :, i + 8]) * np.exp(1j * angles[token, i])
            np.testing.assert_allclose(got[token, :, i], z.real, atol=1e-5)
            np.testing.assert_allclose(got[token, :, i + 8], z.imag, atol=1e-5)
    assert apply_rope(jnp.asarray(x, jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("shape", "norm", "dtype"),
    [
        ((7, 4, 2, 8), False, "float32"),
        ((1, 3, 1, 80), True, "float32"),
        ((5, 6, 2, 64), True, "bfloat16"),
        ((3, 5, 5, 96), False, "bfloat16"),
    ],
)
def test_reference_against_float64(shape, norm, dtype):
    args = make(*shape, norm=norm, dtype=dtype)
    q, *caches = run(args)
    right_q, *right = oracle(args)
    bound = {"rtol": 0, "atol": 2e-5} if dtype == "float32" else {"rtol": 0.02, "atol": 0.02}
    assert q.dtype == dtype
    np.testing.assert_allclose(np.asarray(q, np.float64), right_q, **bound)
    for cache, expected in zip(caches, right, strict=True):
        assert cache.dtype == dtype
        found, rest = taken_out(cache, args)
        np.testing.assert_allclose(found, expected, **bound)
        assert np.isnan(rest).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("norm", [False, True])
def test_reference_is_its_parts_in_a_row_bit_for_bit(norm, dtype):
    args = make(6, 6, 2, 64, norm=norm, dtype=dtype, spare=0)

    def parts(qkv, k_cache, v_cache, cos, sin, pages, offsets, q_norm, k_norm):
        q, k, v = (a.reshape(6, -1, 64) for a in jnp.split(qkv, [6 * 64, 8 * 64], axis=-1))
        if norm:
            q, k = rms_norm(q, q_norm, EPS), rms_norm(k, k_norm, EPS)
        return apply_rope(q, cos, sin), *write_kv(k_cache, v_cache, apply_rope(k, cos, sin), v, pages + LAYER * PAGES, offsets)

    for got, expected in zip(run(args), jax.jit(parts)(*args), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def near(got, expected):
    """Equal to rounding to bfloat16, in front of the rotation and behind it, at the size of a pair: its halves may cancel."""
    got, expected = (np.asarray(a, np.float64) for a in (got, expected))
    size = np.hypot(*np.split(expected, 2, axis=-1))
    assert np.all(np.abs(got - expected) <= np.concatenate([size, size], axis=-1) * 2.0**-6)


@pytest.mark.parametrize(
    ("shape", "norm", "config"),
    [
        ((3, 5, 2, 64), False, Config(4, 1)),  # the last piece moves back
        ((1, 3, 1, 80), True, Config(2, 2)),
        pytest.param((2, 6, 1, 128), True, None, marks=pytest.mark.slow),
        pytest.param((2, 9, 3, 96), False, Config(8, 2), marks=pytest.mark.slow),
        pytest.param((2, 2, 2, 192), True, Config(1, 8), marks=pytest.mark.slow),
        pytest.param((2, 40, 2, 256), True, Config(32, 1), marks=pytest.mark.slow),
    ],
)
def test_kernel_in_the_interpreter(shape, norm, config):
    """Against the reference: values and all that is not written bit for bit, what is computed up to the last bit."""
    args = make(*shape, norm=norm)
    expected = run(args)
    with plgpu.force_gpu_interpret_mode():
        q, k_cache, v_cache = run(args, "mosaic", config)
    near(q, expected[0])
    (keys, rest), (right_keys, right_rest) = taken_out(k_cache, args), taken_out(expected[1], args)
    near(keys, right_keys)
    np.testing.assert_array_equal(rest, right_rest)
    np.testing.assert_array_equal(np.asarray(v_cache, np.float32), np.asarray(expected[2], np.float32))


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_padding_collides_in_the_null_page_and_what_is_out_of_range_is_dropped(implementation):
    args = make(6, 2, 1, 64)
    pages = jnp.asarray([0, 0, PAGES, -PAGES - 1, 2, 3], jnp.int32)  # two of padding, one behind the last page, one in front
    offsets = jnp.asarray([5, 5, 0, 0, PAGE, -1], jnp.int32)
    args = (*args[:5], pages, offsets, *args[7:])
    with plgpu.force_gpu_interpret_mode():
        q, *caches = run(args, implementation)
    near(q, oracle(args)[0])
    for cache, new in zip(caches, oracle(args)[1:], strict=True):
        null = np.array(cache, np.float64)
        assert any(np.allclose(null[LAYER * PAGES, :, 5], new[token], rtol=0.02, atol=0.02) for token in (0, 1))
        null[LAYER * PAGES, :, 5] = np.nan
        assert np.isnan(null).all()


def test_a_nan_stays_with_its_head():
    args = make(2, 4, 2, 64, norm=True)
    qkv = args[0].at[0, 64 + 7].set(jnp.nan).at[1, 4 * 64 + 3].set(jnp.nan)  # query head 1 of the first, key head 0 of the second
    with plgpu.force_gpu_interpret_mode():
        q, k_cache, v_cache = run((qkv, *args[1:]), "mosaic")
    assert np.isnan(np.asarray(q[0, 1], np.float32)).all()
    assert np.isfinite(np.delete(np.asarray(q, np.float32).reshape(8, 64), 1, axis=0)).all()
    keys, _ = taken_out(k_cache, args)
    assert np.isnan(keys[1, 0]).all()
    assert np.isfinite(np.delete(keys.reshape(4, 64), 2, axis=0)).all()
    assert np.isfinite(taken_out(v_cache, args)[0]).all()


KEYS = [
    {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "norm": 0}
    for heads, kv_heads, head_dim in ((32, 8, 128), (12, 2, 128), (14, 2, 64), (9, 3, 64), (71, 1, 64), (32, 32, 96), (1, 1, 80))
    for tokens in (1, 32, 256)
]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key.values())))
def test_candidates_cut_differently_and_cover_every_head(key):
    found = mosaic.candidates(key)
    plans = [mosaic.make_plan(key, config) for config in found]
    assert found[0] == mosaic.default_config(key)
    assert len(set(plans)) == len(plans)
    for plan in plans:
        for cut, count in zip(plan, (key["heads"], key["kv_heads"]), strict=True):
            assert cut.count == count
            assert cut.ctas * cut.pieces * cut.heads >= count >= cut.heads  # as the kernel deals them out, moved back at the end
            assert (cut.ctas - 1) * cut.pieces * cut.heads < count  # no CTA has nothing to do


def test_few_tokens_are_spread_and_many_fill_the_device():
    few, many = ({**KEYS[0], "tokens": tokens} for tokens in (1, 1000))
    assert mosaic.make_plan(few, mosaic.default_config(few)).ctas == 4 + 1 + 1
    assert mosaic.make_plan(many, mosaic.default_config(many)).ctas == 3


def test_the_key_is_the_shape():
    args = make(3, 6, 2, 64, norm=True)
    key = mosaic.shape_key(*args, page_offset=0, eps=EPS)
    assert key == {"tokens": 3, "heads": 6, "kv_heads": 2, "head_dim": 64, "norm": 1}
    assert mosaic.shape_key(*args[:7], page_offset=0, eps=EPS)["norm"] == 0


@pytest.mark.parametrize(
    ("shape", "changes", "config", "message"),
    [
        ((2, 4, 2, 64), {0: "float32"}, None, "bfloat16 only, got float32 q, k, v"),
        ((2, 4, 2, 64), {2: "float32"}, None, "bfloat16, float32 caches"),
        ((2, 4, 2, 64), {3: "bfloat16"}, None, "must be float32"),
        ((2, 4, 2, 72), {}, None, "head dims 64, 80, .*, got 72"),
        ((2, 4, 2, 64), {}, Config(3, 1), "heads a piece and 1 to 8 pieces, got 3 and 1"),
        ((2, 4, 2, 64), {}, Config(4, 9), "got 4 and 9"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(shape, changes, config, message):
    args = list(make(*shape))
    for index, dtype in changes.items():
        args[index] = args[index].astype(dtype)
    with pytest.raises(UnsupportedShape, match=message):
        run(args, "mosaic", config)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (1, (4, 2, 16, 32), "one shape"),
        (0, (2, 512), r"qkv must be \[T or more, .* T 3, K 2, H 64, got \(2, 512\)"),
        (0, (3, 500), "qkv must be"),
        (0, (3, 256), "qkv must be"),  # no query heads
        (3, (3, 64), r"cos, sin must be \[T, H / 2\]"),
        (6, (2,), r"offsets \[T\]"),
        (7, (64,), r"must both be \[H\] with H 64, or none, got \(64,\) and none"),
        (8, (32,), r"got none and \(32,\)"),
    ],
)
def test_wrong_shapes_are_refused(index, shape, message):
    args = list(make(3, 4, 2, 64))
    args[index] = jnp.zeros(shape)
    with pytest.raises(ValueError, match=message):
        run(args)
