"""The Mosaic kernel in the CPU interpreter against the float64 formulas; everything no row owns holds NaN. And its rules."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.flash_attention import flash_attention, mosaic, reference
from pallas_kernels.flash_attention.mosaic import Config, Shape
from pallas_kernels.flash_attention.shapes import Case, make_biases, make_inputs
from pallas_kernels.flash_attention.tiles import cut
from pallas_kernels.flash_attention.xla import Biases, Rows
from pallas_kernels.paged_attention import PAGED_ATTENTION, paged_attention
from pallas_kernels.paged_attention import reference as paged_reference
from pallas_kernels.paged_attention import shapes as paged_shapes

# Of the interpreter's NumPy, about scores that are masked.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

SMALL = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64}
RAGGED = Case(
    name="ragged, starts that are no multiples of 8, tiles cut short at both ends",
    **SMALL,
    rows=((37, 37), (0, 0), (75, 3), (1, 1)),
    padded_tokens=3,
    padded_keys=6,
)
WINDOW = dataclasses.replace(RAGGED, name="window, soft cap", rows=((13, 3), (140, 15)), window=20, soft_cap=2.0, padded_keys=0)
BIASES = dataclasses.replace(
    RAGGED, name="both biases", num_heads=2, num_kv_heads=2, rows=((5, 5), (130, 9)), alibi=True, bias_width=21
)
BOTH_WAYS = dataclasses.replace(RAGGED, name="both directions", rows=((70, 7), (30, 30)), causal=False, window=90)
SHORT = dataclasses.replace(RAGGED, name="more queries than keys", rows=((3, 40), (20, 5), (5, 300)))


def run(case, inputs, config):
    biases = {name: jnp.asarray(x) for name, x in make_biases(case).items()}
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    rows = Rows(jnp.asarray(inputs.query_starts), jnp.asarray(inputs.key_starts), jnp.int32(case.window))
    with plgpu.force_gpu_interpret_mode():
        out, lse = mosaic.flash_attention(
            *arrays,
            Biases(biases.get("alibi_slopes"), biases.get("relative_bias"), None),
            rows,
            causal=case.causal,
            scale=case.scale,
            soft_cap=case.soft_cap,
            return_lse=True,
            config=config,
        )
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


def rounded(inputs):
    return [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in inputs[:3]]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (RAGGED, Config(keys=64, stages=2, q_stages=2, heads=4)),
        (WINDOW, Config(keys=64, stages=3, q_stages=1, heads=2)),
        (BIASES, Config(keys=64, stages=2, q_stages=2, heads=1)),
        (BOTH_WAYS, Config(keys=64, stages=2, q_stages=1, heads=4)),
        pytest.param(SHORT, Config(keys=64, stages=2, q_stages=2, heads=4), marks=pytest.mark.slow, id="short"),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "-".join(map(str, value)),
)
def test_equals_the_dense_formula(case, config):
    inputs = make_inputs(case, seed=np.random.SeedSequence().entropy)
    right = reference.flash_attention(*rounded(inputs), *inputs[3:], **case.options, **make_biases(case))
    for one, other in zip(run(case, inputs, config), right, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-2)


PAGED = paged_shapes.Case(
    name="ragged: prefill, decode, chunk on a prefix, padding",
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    page_size=16,
    rows=((35, 1), (20, 20), (0, 0), (90, 10)),
    padded_tokens=3,
    table_pages=7,
    layers=2,
    layer=1,
)


def run_paged(case, inputs, offset, **options):
    floats = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
    operation = mosaic.paged_attention if "config" in options else paged_attention
    with plgpu.force_gpu_interpret_mode():
        result = operation(
            *floats,
            *map(jnp.asarray, inputs[3:]),
            page_offset=jnp.int32(offset),
            scale=case.scale,
            window=jnp.int32(case.window),
            soft_cap=case.soft_cap,
            decode=False,
            **{name: jnp.asarray(bias) for name, bias in paged_shapes.make_biases(case).items()},
            **options,
        )
    assert result.dtype == jnp.bfloat16
    assert result.shape == inputs.q.shape
    return np.asarray(result, np.float64)


def expected_paged(case, inputs, offset):
    return paged_reference.paged_attention(
        *rounded(inputs),
        *inputs[3:],
        page_offset=offset,
        scale=case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        **paged_shapes.make_biases(case),
    )


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (PAGED, Config(keys=64, stages=2, q_stages=2, heads=2)),
        (
            dataclasses.replace(PAGED, name="window, pages of 64", page_size=64, window=30),
            Config(keys=64, stages=2, q_stages=1, heads=1),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, paged_shapes.Case) else "-".join(map(str, value)),
)
def test_paged_equals_the_oracle(case, config):
    inputs, offset = paged_shapes.make_inputs(case, seed=int(np.random.SeedSequence().generate_state(1)[0]))
    got = run_paged(case, inputs, offset, config=config)
    np.testing.assert_allclose(got, expected_paged(case, inputs, offset), rtol=0, atol=2e-2)


def test_pages_in_front_of_the_window_are_never_seen():
    """They may have been given to another row: here they hold NaN; and they share a block with the rest."""
    case = dataclasses.replace(PAGED, rows=((70, 3),), window=20)
    inputs, offset = paged_shapes.make_inputs(case)
    right = expected_paged(case, inputs, offset)
    gone = inputs.page_table[0, : (70 - 3 - 19) // 16] + offset
    inputs.k_cache[gone] = inputs.v_cache[gone] = np.nan
    got = run_paged(case, inputs, offset, implementation="flash")
    np.testing.assert_allclose(got, right, rtol=0, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_no_row_owns_never_reaches_the_output(poison):
    """Bit for bit the result over a clean pool."""
    config = Config(keys=64, stages=2, q_stages=2, heads=2)
    clean, offset = paged_shapes.make_inputs(PAGED, poison=0.0)
    dirty, _ = paged_shapes.make_inputs(PAGED, poison=poison)
    results = [run_paged(PAGED, inputs, offset, config=config) for inputs in (clean, dirty)]
    np.testing.assert_array_equal(*results)


@pytest.mark.slow
def test_gradients_behind_the_kernel_are_those_behind_the_reference():
    """The backward pass takes the kernel's results; through the public name."""
    case = dataclasses.replace(RAGGED, rows=((20, 20), (33, 5)), padded_tokens=0, padded_keys=0)
    inputs = make_inputs(case)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs[:3])
    starts = [jnp.asarray(x) for x in inputs[3:]]

    def total(operands, implementation):
        out = flash_attention(*operands, *starts, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    with plgpu.force_gpu_interpret_mode():
        found = jax.grad(total)((q, k, v), "mosaic")
    for one, other in zip(found, jax.grad(total)((q, k, v), "xla"), strict=True):
        scale = float(jnp.abs(other.astype(jnp.float32)).max())
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=0, atol=3e-2 * scale)


@pytest.mark.parametrize("align", [1, 8])
def test_tiles_hold_every_query_once(align):
    """At the place that its row gives it, beginning at multiples of the alignment."""
    random = np.random.default_rng()
    tokens = 6 * 70 + 3
    run = jax.jit(functools.partial(cut, tile=16, tokens=tokens, align=align))
    for _ in range(20):
        counts = random.integers(0, 70, 6)
        lengths = np.where(random.random(6) < 0.2, 0, counts + random.integers(0, 50, 6)).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tiles, count = run(starts, lengths)
        found = {}
        for index, (first, dead, live, position, row, length) in enumerate(np.stack(tiles).T):
            assert (index < count) == (live > dead)
            assert first % align == 0
            assert length == (lengths[row] if index < count else 0)
            for offset in range(dead, live):
                assert first + offset not in found
                found[first + offset] = position + offset
        right = {starts[row] + i: lengths[row] - counts[row] + i for row in range(6) if lengths[row] for i in range(counts[row])}
        assert found == right


def bf16(*shape):
    return jnp.zeros(shape, jnp.bfloat16)


ROWS = Rows(jnp.array([0, 16]), jnp.array([0, 16]), jnp.int32(0))
NONE = Biases(None, None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((16, 4, 64))}, "bfloat16 only, got float32 queries"),
        ({"q": bf16(16, 4, 80), "k": bf16(16, 2, 80)}, "head dims 64, 128, .*, got 80"),
        ({"biases": Biases(None, None, jnp.zeros((1, 16, 16)))}, "no additive mask"),
        ({"biases": Biases(jnp.zeros(4), None, None), "causal": False}, "biases by distance only where causal"),
        ({"biases": Biases(None, jnp.zeros((4, 1025)), None)}, "at most 1024 distances, got 1025"),
        ({"scale": -1.0}, "a positive scale"),
        ({"config": Config(96, 2, 2, 2)}, "blocks of 64 or 128 keys, got 96"),
        ({"config": Config(64, 1, 2, 2)}, "at least two blocks in flight"),
        ({"config": Config(64, 2, 3, 2)}, "one or two query tiles"),
        ({"config": Config(64, 2, 2, 4)}, "4 heads a tile: a power of two that divides 2"),
        ({"config": Config(128, 9, 2, 2)}, "bytes of shared memory, at most 231424"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(changes, message):
    call = {"q": bf16(16, 4, 64), "k": bf16(16, 2, 64), "biases": NONE, "config": None} | {"causal": True, "scale": 1.0} | changes
    q, k, biases = call.pop("q"), call.pop("k"), call.pop("biases")
    with pytest.raises(UnsupportedShape, match=message):
        mosaic.flash_attention(q, k, k, biases, ROWS, **call, soft_cap=0.0, return_lse=False)


def paged_call(page=16):
    pool = bf16(20, 2, page, 64)
    rows = jnp.zeros((3, 5), jnp.int32), jnp.zeros(3, jnp.int32), jnp.zeros(4, jnp.int32)
    return bf16(12, 4, 64), pool, pool, *rows


@pytest.mark.parametrize(
    ("page", "options", "message"),
    [
        (16, {"decode": True}, "a kernel of their own"),
        (16, {"decode": False, "max_queries": 4}, "a kernel of their own"),
        (8, {"decode": False}, "pages of 16, 32, 64 tokens, got 8"),
    ],
)
def test_what_it_cannot_serve_of_pages_is_refused_with_the_reason(page, options, message):
    with pytest.raises(UnsupportedShape, match=message):
        mosaic.paged_attention(*paged_call(page), page_offset=0, scale=1.0, **options)


def test_every_call_of_paged_attention_has_one_kernel():
    """Few queries a row or many: what the one refuses the other serves, so that a table's entry is never ambiguous."""
    for options in ({"decode": False}, {"decode": False, "max_queries": 4}):
        keys = {}
        for name in ("mosaic", "flash"):
            try:
                keys[name] = PAGED_ATTENTION.implementations[name].shape_key(*paged_call(), page_offset=0, scale=1.0, **options)
            except UnsupportedShape:
                continue
        assert list(keys) == (["mosaic"] if "max_queries" in options else ["flash"])


def test_the_key_is_the_shape():
    key = mosaic.paged_shape_key(*paged_call(), page_offset=0, scale=1.0, decode=False)
    assert key == {
        "tokens": 12, "rows": 3, "heads": 4, "kv_heads": 2, "head_dim": 64, "page": 16, "context": 80, "causal": 1, "bias": 0,
    }  # fmt: skip


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("model", [(32, 8, 128), (12, 2, 128), (9, 3, 64), (16, 8, 192), (16, 8, 256), (71, 1, 64)])
def test_candidates_are_servable_different_and_begin_with_the_default(model, page):
    shape = Shape(2048, 64, *model, page, 8192, 1, 0)
    found = mosaic.candidates(shape._asdict())
    assert found[0] == mosaic.default_config(shape)
    assert len(set(found)) == len(found) > 1
    assert [config for config in found if mosaic._reason(shape, config)] == []
