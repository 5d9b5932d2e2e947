"""Sizes of the kernel that streams weights: what a configuration is, what follows from it, and which are worth timing.

Owns the configuration, the plan that follows from it and a shape, and a rough model of the device that orders configurations.
Must not know how the kernel works inside, nor what was measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Literal

import jax.numpy as jnp

ROW_BLOCK = 64  # rows of weights a warpgroup multiplies: wgmma's M
_LINE = 128  # bytes of a swizzled line
K_BLOCK = 64  # what the contraction is a multiple of: bf16 elements of a line
TOKEN_BLOCK = 8  # tokens a wgmma counts by; of int8 more than 32 are counted by 16
MAX_TOKENS = 256
"""wgmma takes no more columns; beyond it a matmul is no longer bound by the weights."""

SHARED_BYTES = 225 * 1024
"""Shared memory that a CTA's tiles may take: of the 227 KiB there are, barriers and the compiler use some."""

MAX_CLUSTER = 8
"""CTAs that any device can run as a cluster."""

AHEAD_BOX = (64, 256)
"""Rows and columns of the next weights that one request brings into the cache: 32 KiB."""

_STORE_TOKENS = 64  # tokens written at a time
_INBOX = 64 * 1024  # bytes for what the CTAs of a split send at a time; larger sums go in several passes
_CANDIDATES = 14
_MIN_STAGES = 3
_MAX_STAGES = 16
_HALF_SHARED_BYTES = 110 * 1024  # the same if two CTAs are to be on one multiprocessor
_OTHER_REGISTERS = 48  # registers a thread needs beside its sums

COPY_REGISTERS = 40
"""Registers a thread of the copy warpgroup keeps where the others need many."""

# The H200: 132 multiprocessors in groups of 16 or 18, and a cluster lies within one group.
_CLUSTERS = {1: 132, 2: 66, 3: 42, 4: 32, 5: 24, 6: 18, 7: 16, 8: 16}
_READ = 4.2e12  # bytes/s of memory, all multiprocessors
_READ_EACH = 38e9  # bytes/s of memory a multiprocessor draws: 96 of them with a ring and no arithmetic reached 3.7e12
_CACHE = 7.5e12  # bytes/s of the second-level cache
_MULTIPLY_EACH = 5.8e12  # bf16 operations/s of a multiprocessor
_WIDEN_EACH = 16e9  # int8 weights/s widened and multiplied by one warpgroup, which waits for its products; two did 33e9
_SHARED_EACH = 220e9  # bytes/s of its shared memory, read or written
_EXCHANGE_EACH = 10e9  # bytes/s between multiprocessors, one of them
_LATENCY = 2.6e-6  # seconds from a request of a step to its arrival, when all ask
_TILE = 0.15e-6  # seconds a tile's epilogue adds that loads do not hide
_SPLIT = {2: 1e-6, 3: 1e-6}  # seconds the CTAs of a split wait for each other, each time they exchange
_SPLIT_OF_MANY = 5e-6  # the same of four and more
_AFTER = 2.5e-6  # seconds another program takes that adds the sums, beside reading them
_STEP = 20e-9  # seconds a step costs while the first and the last ones are not hidden
_TOKENS = 40e12  # bytes/s: what tokens add to a step that reads weights


_ITEMSIZES: dict[int | str, tuple[int, int]] = {"bfloat16": (2, 2), "w8a16": (1, 2), "w8a8": (1, 1)}  # weights and tokens

Reduce = Literal["cluster", "after", "global"]


@dataclasses.dataclass(frozen=True)
class Config:
    """How a matmul is laid out on the device.

    Attributes:
        rows: compute warpgroups along the weights' rows; a tile has 64 * rows of them (twice that when gated).
        columns: compute warpgroups along the tokens.
        depth: compute warpgroups along the contraction of a step: each takes its share of block_k, and the first adds up their
            sums, in order, in shared memory. More of them hide what each waits for. Not with splits in a cluster.
        block_k: elements of the contraction a step loads, a multiple of 64.
        stages: steps in flight.
        splits: slices of the contraction, computed by different CTAs.
        share: CTAs of a cluster that take neighbouring tiles and load the tokens once for all of them.
        clusters: groups of splits * share CTAs that walk the tiles; more than there are tiles do no harm.
        reduce: how splits are added, always in the order of the slices: "cluster" through distributed shared memory; "after"
            writes float32 sums that XLA adds; "global" stands in for "cluster" in the interpreter, which has no remote
            stores. On a device it would be a race: a cluster's barrier does not order global memory.
        ahead: boxes of 32 KiB of the upcoming weights that a CTA asks for.
    """

    rows: int = 1
    columns: int = 1
    depth: int = 1
    block_k: int = 128
    stages: int = 6
    splits: int = 1
    share: int = 1
    clusters: int = 132
    reduce: Reduce = "cluster"
    ahead: int = 3

    @property
    def cluster_size(self) -> int:
        """CTAs that are launched together."""
        return self.share * (1 if self.reduce == "after" else self.splits)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What follows from a shape and a configuration.

    Attributes:
        tokens: padded to what the compute warpgroups take.
        pair: weight matrices a tile takes: 2 when gated (gate and up), else 1.
        part: tokens of one compute warpgroup that one CTA of the splits finishes.
        parts: CTAs among the splits that finish a part.
        piece: tokens of a part exchanged at a time.
        store: tokens written at a time.
        weight_itemsize, token_itemsize: bytes of an element.
    """

    config: Config
    tokens: int
    rows_out: int
    depth: int
    pair: int
    out_itemsize: int
    weight_itemsize: int = 2
    token_itemsize: int = 2

    @property
    def k_block(self) -> int:
        """What a warpgroup's share of `block_k` is a multiple of: a swizzled line of weights, a shorter one where several widen a
        step, each with few registers."""
        return _LINE // self.weight_itemsize // (2 if self.widens and self.config.depth > 1 else 1)

    @property
    def widens(self) -> bool:
        """Whether weights are widened to the tokens' type in registers, from which they are multiplied."""
        return self.weight_itemsize < self.token_itemsize

    @property
    def split_in_cluster(self) -> bool:
        return self.config.splits > 1 and self.config.reduce != "after"

    @property
    def warpgroups(self) -> int:
        """Those that multiply."""
        return self.finishers * self.config.depth

    @property
    def finishers(self) -> int:
        """Of the warpgroups those, the first ones, that hold the sums in the end and apply the epilogue."""
        return self.config.rows * self.config.columns

    @property
    def block_each(self) -> int:
        """Of a step's contraction, what a warpgroup multiplies."""
        return self.config.block_k // self.config.depth

    @property
    def tokens_each(self) -> int:
        return self.tokens // self.config.columns

    @property
    def parts(self) -> int:
        if not self.split_in_cluster:
            return 1
        units = self.tokens_each // TOKEN_BLOCK
        return max(n for n in range(1, self.config.splits + 1) if units % n == 0)

    @property
    def part(self) -> int:
        return self.tokens_each // self.parts

    @property
    def piece(self) -> int:
        if not self.split_in_cluster:
            return self.part
        token_bytes = self.config.splits * self.pair * self.finishers * ROW_BLOCK * 4
        return _divisor(self.part, max(TOKEN_BLOCK, _INBOX // token_bytes))

    @property
    def store(self) -> int:
        return _divisor(self.piece, _STORE_TOKENS)

    @property
    def tile_rows(self) -> int:
        return ROW_BLOCK * self.config.rows

    @property
    def tiles(self) -> int:
        """Tiles as a cluster walks them: `share` neighbours are one."""
        return math.ceil(self.rows_out / (self.tile_rows * self.config.share))

    @property
    def clusters(self) -> int:
        """As few as need no more rounds: each has the same work, and none waits for the last tiles of others."""
        rounds = math.ceil(self.tiles / self.config.clusters)
        return math.ceil(self.tiles / rounds)

    @property
    def steps(self) -> int:
        """Steps of a tile. The last split's may lie beyond the end, where loads give zeros."""
        return math.ceil(math.ceil(self.depth / self.config.block_k) / self.config.splits)

    @property
    def inbox_shape(self) -> tuple[int, ...]:
        return (self.config.splits, self.pair, self.finishers, ROW_BLOCK, self.piece)

    @property
    def partial_shape(self) -> tuple[int, ...]:
        """Sums of the warpgroups behind the first along the contraction."""
        return (self.config.depth - 1, self.pair, self.finishers, ROW_BLOCK, self.tokens_each)

    @property
    def step_bytes(self) -> int:
        """Shared memory of a step in flight."""
        return (self.pair * self.tile_rows * self.weight_itemsize + self.tokens * self.token_itemsize) * self.config.block_k

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, without its barriers."""
        staging = self.finishers * self.store * ROW_BLOCK * self.out_itemsize
        inbox = math.prod(self.inbox_shape) * 4 if self.config.reduce == "cluster" and self.split_in_cluster else 0
        return self.config.stages * self.step_bytes + staging + inbox + math.prod(self.partial_shape) * 4

    @property
    def accumulators(self) -> int:
        """Registers a thread needs for its sums."""
        return self.pair * self.tokens_each // 2

    @property
    def registers(self) -> int:
        """Registers a thread needs for its sums and for weights that are widened, before and after."""
        return self.accumulators + (self.block_each * 3 // 8 if self.widens else 0)

    @property
    def compute_registers(self) -> int:
        """Registers a thread of a compute warpgroup has once the copy warpgroup has given its own away. A launch divides a
        multiprocessor's 512 a lane evenly, in eights; more than those are never there, and who asks waits for ever."""
        launched = 512 // (self.warpgroups + 1) // 8 * 8
        return min(240, (launched * (self.warpgroups + 1) - COPY_REGISTERS) // self.warpgroups // 8 * 8)


def _divisor(tokens: int, most: int) -> int:
    """The largest multiple of 8 that divides tokens and is at most `most`."""
    return max(n for n in range(TOKEN_BLOCK, min(tokens, most) + 1, TOKEN_BLOCK) if tokens % n == 0)


def make_plan(key: Mapping[str, int | str], config: Config) -> Plan:
    """Sizes of a call; where XLA adds the sums, gate and up are rows like any other and the sums are float32."""
    after = config.reduce == "after"
    pair = 2 if "activation" in key else 1
    weight_itemsize, token_itemsize = _ITEMSIZES[key.get("operands", "bfloat16")]
    tokens_each = math.ceil(int(key["tokens"]) / config.columns)
    unit = 2 * TOKEN_BLOCK if token_itemsize == 1 and tokens_each > 4 * TOKEN_BLOCK else TOKEN_BLOCK
    return Plan(
        config=config,
        tokens=math.ceil(tokens_each / unit) * unit * config.columns,
        rows_out=int(key["out"]) * (pair if after else 1),
        depth=int(key["in"]),
        pair=1 if after else pair,
        out_itemsize=4 if after else jnp.dtype(key.get("out_dtype", jnp.bfloat16)).itemsize,
        weight_itemsize=weight_itemsize,
        token_itemsize=token_itemsize,
    )


def candidates(key: Mapping[str, int | str]) -> list[Config]:
    """Configurations worth timing for a key of any operation that streams weights: the default, then the most promising by a
    rough model: one of each way to share the work, then other blocks of the best. All fit the device."""
    ranked = _ranked(key)
    ways: dict[tuple[int | str, ...], Config] = {}
    for config in ranked:
        way = (config.rows, config.columns, config.depth, config.splits, config.share, config.clusters, config.reduce)
        ways.setdefault(way, config)
    first = list(ways.values())[: _CANDIDATES - 4]
    others = [config for config in ranked if config not in first][:3]
    return list(dict.fromkeys((default_config(key), *first, *others)))


def default_config(key: Mapping[str, int | str]) -> Config:
    """The configuration for a shape that was not tuned: the best by the model whose splits, if any, XLA adds up. Exchanges in a
    cluster or between warpgroups are chosen where a device's own table says that they are right and faster there."""
    for config in _ranked(key):
        if config.depth == 1 and not make_plan(key, config).split_in_cluster:
            return config
    raise AssertionError(f"no configuration fits {dict(key)}")


def _ranked(key: Mapping[str, int | str]) -> list[Config]:
    """All configurations within the limits of the device, each with as many stages as fit, the fastest first."""
    few = int(key["tokens"]) <= 64
    widens = key.get("operands") == "w8a16"
    depths = (1, 2, 3, 4) if few and widens else (1,)  # who widens waits for each product; others are bound by memory
    found = []
    for rows, columns, depth, splits, share in itertools.product((1, 2, 3, 4, 5), (1, 2), depths, range(1, 9), (1, 2, 4)):
        if splits * share > MAX_CLUSTER or (few and (columns > 1 or share > 1)):
            continue
        ways: list[tuple[Reduce, int]] = []
        if splits == 1 or depth == 1:
            ways.append(("cluster", _CLUSTERS[splits * share]))
        if splits > 1:
            ways.append(("after", _CLUSTERS[share] // splits))
        blocks = (64, 128, 256) if depth == 1 else (128, 256, 384, 512)
        for block_k, resident, (reduce, clusters) in itertools.product(blocks, (1, 2), ways):
            if resident > 1 and (rows > 1 or depth > 1 or not few):
                continue
            config = Config(rows, columns, depth, block_k, 1, splits, share, clusters * resident, reduce)
            limit = SHARED_BYTES if resident == 1 else _HALF_SHARED_BYTES
            plan = make_plan(key, config)
            if block_k % (plan.k_block * depth):
                continue
            stages = min(_MAX_STAGES, 1 + (limit - plan.shared_bytes) // plan.step_bytes)
            if stages >= _MIN_STAGES and _fits(plan):
                found.append(dataclasses.replace(config, stages=stages))
    return sorted(found, key=lambda config: _seconds(make_plan(key, config)))


def _fits(plan: Plan) -> bool:
    return (
        plan.tokens // TOKEN_BLOCK % plan.config.share == 0
        and plan.registers + _OTHER_REGISTERS <= plan.compute_registers
        and plan.shared_bytes <= SHARED_BYTES
    )


def _seconds(plan: Plan) -> float:
    """A rough time of a call beyond what every call pays; it orders configurations, the device decides."""
    config = plan.config
    group = config.splits * config.share
    resident = max(1, round(config.clusters * group / (_CLUSTERS[config.cluster_size] * config.cluster_size)))
    rounds = math.ceil(plan.tiles / plan.clusters)
    steps = rounds * plan.steps
    ctas = plan.clusters * group
    step_elements = plan.pair * plan.tile_rows * config.block_k
    step_weights = step_elements * plan.weight_itemsize
    weights = plan.pair * plan.rows_out * plan.depth * plan.weight_itemsize
    tokens = steps * ctas * plan.tokens * config.block_k * plan.token_itemsize / config.share
    read = max(weights / _READ, steps * step_weights * resident / _READ_EACH, (weights + tokens) / _CACHE)
    multiply = steps * step_elements * 2 * plan.tokens * resident / (_MULTIPLY_EACH * 2 / plan.token_itemsize)
    if plan.widens:
        multiply += steps * step_elements * config.columns / (_WIDEN_EACH * plan.warpgroups)
    # Each byte is written once; then a warpgroup reads its rows, and all of its tokens for each of a pair.
    lines = plan.pair * plan.tile_rows * (1 + config.columns) * plan.weight_itemsize
    lines += plan.tokens * (1 + plan.pair * config.rows) * plan.token_itemsize
    shared = steps * lines * config.block_k * resident / _SHARED_EACH
    exchange = 0.0
    sums = plan.pair * plan.tile_rows * plan.tokens * 4
    if plan.split_in_cluster:
        meetings = rounds * plan.part // plan.piece
        exchange = meetings * _SPLIT.get(config.splits, _SPLIT_OF_MANY) + rounds * sums / _EXCHANGE_EACH
    elif config.splits > 1:
        exchange = _AFTER + 2 * rounds * ctas * sums / _CACHE
    # Few stages stall more often, and how many odd clusters fit depends on which multiprocessors a card has.
    doubts = 0.02 * (config.stages < 4) + 0.03 * (config.cluster_size & (config.cluster_size - 1) != 0)
    total = max(read, multiply, shared, steps * _LATENCY / config.stages) * (1 + doubts) + tokens / _TOKENS
    return total + exchange + rounds * _TILE + plan.steps * _STEP
