"""What only a card can show: kernels whose CTAs run at once, in programs as the engine makes them. Run with `-m gpu`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention import shapes as flash_shapes
from pallas_kernels.fused_layer import MEETINGS, LayerParams, NextParams, fused_layer
from pallas_kernels.matmul import DENSE, GATED_DENSE, RESIDUAL_DENSE
from pallas_kernels.paged_attention import mosaic as attention_mosaic
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import shapes as paged_shapes
from pallas_kernels.rope_kv_write import mosaic as rope_mosaic
from pallas_kernels.rope_kv_write import rope_kv_write
from pallas_kernels.smoke import TOLERANCE, worst_error

pytestmark = pytest.mark.gpu

LAYERS, STEPS, HIDDEN, MLP, QKV = 3, 2, 1024, 2816, 1536


def parameters(random):
    def normal(*shape):
        return jnp.asarray(random.standard_normal((LAYERS, *shape)) * shape[-1] ** -0.5, jnp.bfloat16)

    norm = jnp.asarray(random.uniform(0.5, 1.5, (LAYERS, HIDDEN)), jnp.float32)
    params = LayerParams(normal(HIDDEN, HIDDEN), None, norm, normal(2 * MLP, HIDDEN), None, normal(HIDDEN, MLP), None)
    return params, NextParams(norm, normal(QKV, HIDDEN), normal(QKV))


@functools.partial(jax.jit, static_argnames="implementation")
def steps(x, residual, params, following, *, implementation):
    """Two steps of three layers, the heads' outputs taken from q, k and v; fresh meetings a step."""
    tokens = len(x)

    def step(carry, _):
        x, residual = carry
        meetings = jnp.zeros((LAYERS * MEETINGS,), jnp.int32)
        for index in range(LAYERS):
            one, following_one = jax.tree.map(lambda a, index=index: a[index], (params, following))
            residual, qkv, meetings = fused_layer(
                x, residual, meetings, jnp.int32(index), one, following_one,
                activation="silu", eps=1e-5, implementation=implementation,
            )  # fmt: skip
            x = qkv[:tokens, :HIDDEN]
        rows = jnp.pad(residual[:tokens], ((0, 64 - tokens), (0, 0)), constant_values=jnp.nan)
        return (x, rows), None

    return jax.tree.map(lambda a: a[:tokens], lax.scan(step, (x, residual), None, length=STEPS)[0])


@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 64])
def test_layers_in_a_row_and_again_in_a_loop(tokens):
    random = np.random.default_rng()
    params, following = parameters(random)
    x = jnp.asarray(random.standard_normal((tokens, HIDDEN)), jnp.bfloat16)
    residual = jnp.full((64, HIDDEN), jnp.nan, jnp.bfloat16).at[:tokens].set(random.standard_normal((tokens, HIDDEN)))
    got = steps(x, residual, params, following, implementation="mosaic")
    widened = jax.tree.map(lambda a: a.astype(jnp.float32), (x, residual, params, following))
    expected = steps(*widened, implementation="xla")
    for one, other in zip(got, expected, strict=True):
        one = one.astype(jnp.float32)
        assert jnp.isfinite(one).all()
        assert jnp.linalg.norm(one - other) < 0.05 * jnp.linalg.norm(other)
    for _ in range(100):  # no result depends on who arrives first
        again = steps(x, residual, params, following, implementation="mosaic")
        assert all((a == b).all() for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("tokens", [1, 13, 64, 200, 256])
@pytest.mark.parametrize(("kind", "out", "depth"), [("bias", 1536, 1024), ("residual", 1024, 3584), ("gated", 4608, 1024)])
def test_every_candidate_of_the_matmuls(kind, out, depth, tokens):
    """Splits that a cluster adds up, tokens that it shares, registers that change hands: none shows without a card."""
    random = np.random.default_rng()

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape), jnp.bfloat16)

    x, w = normal(tokens, depth), normal(out, depth) * jnp.bfloat16(depth**-0.5)
    operation, args, options = {
        "bias": (DENSE, (normal(out),), {"out_dtype": jnp.float32}),
        "residual": (RESIDUAL_DENSE, (normal(tokens, out), None), {}),
        "gated": (GATED_DENSE, ("silu",), {}),
    }[kind]
    wide = [a.astype(jnp.float32) if isinstance(a, jax.Array) else a for a in (x, w, *args)]
    expected = operation(*wide, implementation="xla", **options)
    kernel = operation.implementations["mosaic"]
    for config in kernel.candidates(kernel.shape_key(x, w, *args, **options)):
        run = jax.jit(lambda x, w, config=config: kernel.function(x, w, *args, config=config, **options))
        got = run(x, w)
        assert float(worst_error(got, expected)) <= TOLERANCE, config
        for _ in range(20):  # no result depends on who arrives first
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(run(x, w), np.float32), err_msg=str(config))


@functools.partial(jax.jit, static_argnames=("implementation", "config"), donate_argnums=(1, 2))
def written(qkv, k_cache, v_cache, cos, sin, pages, offsets, norms, *, implementation, config=None):
    """Three layers write their tokens, each with the page offset of its own; the queries of all."""
    queries = []
    for layer in range(LAYERS):
        offset = jnp.int32(layer * (k_cache.shape[0] // LAYERS))
        write = functools.partial(rope_kv_write, implementation=implementation)
        if config is not None:
            write = functools.partial(rope_mosaic.rope_kv_write, config=config)
        q, k_cache, v_cache = write(qkv[layer], k_cache, v_cache, cos, sin, pages, offsets, *norms, page_offset=offset, eps=1e-6)
        queries.append(q)
    return queries, k_cache, v_cache


@pytest.mark.parametrize("tokens", [1, 13, 256])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(32, 8, 128), (12, 2, 128), (14, 2, 64), (9, 3, 80), (32, 32, 96), (16, 8, 192), (8, 2, 256)],
)
def test_every_cut_of_rotation_and_cache_write(heads, kv_heads, head_dim, norm, tokens):
    """Against the reference in the same program: queries and keys to rounding; values, and what no token owns, bit for bit."""
    random = np.random.default_rng()
    pages = random.permutation(tokens).astype(np.int32)
    pages[0] = LAYERS * (tokens + 1)  # out of range in every layer
    offsets = random.integers(0, 16, tokens, np.int32)
    angles = random.uniform(0, 6, (tokens, head_dim // 2))
    tables = [jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)]
    norms = [jnp.asarray(random.uniform(0.5, 1.5, head_dim), jnp.float32) for _ in "qk"] if norm else [None, None]
    qkv = random.standard_normal((LAYERS, tokens + 5, (heads + 2 * kv_heads) * head_dim))
    qkv[:, tokens:] = np.nan
    cache = jnp.asarray(random.standard_normal((LAYERS * (tokens + 1), kv_heads, 16, head_dim)), jnp.bfloat16)

    def run(implementation, config=None):
        args = (jnp.asarray(qkv, jnp.bfloat16), cache + 0, cache + 1, *tables, jnp.asarray(pages), jnp.asarray(offsets), norms)
        return jax.tree.map(np.asarray, written(*args, implementation=implementation, config=config))

    queries, keys, values = run("xla")
    key = {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "norm": int(norm)}
    for config in rope_mosaic.candidates(key):
        got_queries, got_keys, got_values = run("mosaic", config)
        np.testing.assert_array_equal(got_values, values)
        for got, expected in ((np.stack(got_queries), np.stack(queries)), (got_keys, keys)):
            got, expected = got.astype(np.float64), expected.astype(np.float64)
            size = np.hypot(*np.split(expected, 2, axis=-1))
            assert np.all(np.abs(got - expected) <= np.concatenate([size, size], axis=-1) * 2.0**-6), config
        owned = np.zeros(cache.shape[:3:2], bool)
        for layer in range(LAYERS):
            owned[pages[1:] + layer * (tokens + 1), offsets[1:]] = True
        np.testing.assert_array_equal(got_keys.swapaxes(1, 2)[~owned], keys.swapaxes(1, 2)[~owned])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (14, 2), (3, 3)])
def test_attention_of_fewer_heads_than_a_copy_brings(heads, kv_heads, splits):
    """The copy engine fills up what lies beyond the last head, and reads nothing of the next token, which may be padding: NaN."""
    case = paged_shapes.Case(
        name="few heads", num_heads=heads, num_kv_heads=kv_heads, head_dim=128, page_size=16, decode=True,
        rows=tuple((length, min(length, 1)) for length in (300, 0, 17, 1, 64, 0)),
    )  # fmt: skip
    inputs, offset = paged_shapes.make_inputs(case)
    args = [jnp.asarray(a, jnp.bfloat16) for a in inputs[:3]] + [jnp.asarray(a) for a in inputs[3:]]
    options = {"page_offset": jnp.int32(offset), "scale": case.scale, "decode": True}
    expected = paged_attention(*args, **options, implementation="xla").astype(jnp.float32)
    got = attention_mosaic.paged_attention(*args, **options, config=attention_mosaic.Config(1, 64, 2, splits))
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=0, atol=2e-2)


HEADS = {
    "GQA 128": (32, 8, 128), "MQA 64": (8, 1, 64), "GQA 192": (8, 2, 192),
    "GQA 256": (16, 8, 256),
}  # fmt: skip
MANY = ((1500, 1500), (16, 4000), (0, 0), (2000, 129), (1, 1), (900, 1), (333, 333), (700, 64))


def seed():
    return int(np.random.SeedSequence().generate_state(1)[0])


def right_and_repeatable(run, operands, expected):
    """To rounding, and to the bit the same every time: two warpgroups and many CTAs share what they read."""
    got = run(*operands)
    assert float(worst_error(got, expected)) <= TOLERANCE
    for _ in range(50):
        assert all((a == b).all() for a, b in zip(jax.tree.leaves(run(*operands)), jax.tree.leaves(got), strict=True))


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        *((heads, {}) for heads in HEADS),
        *((heads, {"window": 200}) for heads in ("GQA 128", "GQA 256")),
        ("GQA 128", {"causal": False}),
        ("GQA 128", {"alibi": True, "soft_cap": 5.0}),
        ("GQA 128", {"bias_width": 128}),
    ],
)
def test_flash_attention_of_ragged_rows(heads, options):
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    case = flash_shapes.Case(
        name="", num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rows=MANY, padded_tokens=5, padded_keys=7,
        **options,
    )  # fmt: skip
    inputs, biases = flash_shapes.make_inputs(case, seed=seed()), flash_shapes.make_biases(case)
    operands = [*(jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]), *map(jnp.asarray, inputs[3:])]
    biases = {name: jnp.asarray(x) for name, x in biases.items()}
    attend = functools.partial(flash_attention, **case.options, **biases, return_lse=True)
    wide = [x.astype(jnp.float32) for x in operands[:3]] + operands[3:]
    out, lse = jax.jit(functools.partial(attend, implementation="xla"))(*wide)
    owned = jnp.arange(len(lse)) < inputs.query_starts[-1]
    lse = jnp.where(owned[:, None], lse, 0)

    @jax.jit
    def run(*operands):
        got_out, got_lse = attend(*operands, implementation="mosaic")
        return got_out, jnp.where(owned[:, None], got_lse, 0)

    right_and_repeatable(run, operands, (out, lse))


@pytest.mark.parametrize(
    ("heads", "page", "window"),
    [*((heads, 16, 0) for heads in HEADS), ("GQA 128", 32, 0), ("GQA 128", 64, 0), ("GQA 128", 16, 200), ("GQA 256", 64, 200)],
)
def test_flash_attention_over_pages(heads, page, window):
    """Prompts, chunks on a prefix and decoding rows in one call; NaN in what no row owns."""
    num_heads, num_kv_heads, head_dim = HEADS[heads]
    case = paged_shapes.Case(
        name="", num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page, rows=MANY, padded_tokens=5,
        layers=2, layer=1, window=window,
    )  # fmt: skip
    inputs, offset = paged_shapes.make_inputs(case, seed=seed())
    operands = [*(jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]), *map(jnp.asarray, inputs[3:])]
    attend = functools.partial(paged_attention, page_offset=offset, scale=case.scale, window=window, decode=False)
    wide = [x.astype(jnp.float32) for x in operands[:3]] + operands[3:]
    expected = jax.jit(functools.partial(attend, implementation="xla"))(*wide)
    right_and_repeatable(jax.jit(functools.partial(attend, implementation="flash")), operands, expected)
