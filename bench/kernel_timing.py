"""Times contenders for a call on the device, and checks their results: one compiled program makes many calls.

Each call of a round has weights or pages of its own, so that the last-level cache does not answer, and waits for the one
before, through an optimization barrier that also keeps XLA from merging calls that share an operand. Rounds are repeated in a
loop on the device, so that the host does not count; a pass of the loop holds many calls, because each pass costs a launch.
Knows no particular operation.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.kernel_cases import Case, Group
from pallas_kernels import tuning
from pallas_kernels.dispatch import REFERENCE, Implementation, UnsupportedShape
from pallas_kernels.smoke import TOLERANCE, Call, reference, worst_error

READ_TBS = {"NVIDIA H200": 4.32}  # what a pure read reaches: the floor of a call is its bytes over this
PEAK_TBS = {"NVIDIA H200": 4.8}  # the memory's own rate: nothing real is above it
MULTIPLY_TFLOPS = {"NVIDIA H200": 797.0}  # what bf16 matmuls on random data reach
PEAK_TFLOPS = {"NVIDIA H200": 990.0}
GAIN = 0.98  # a candidate must take at most this part of the reference's time: less may be noise
CALL_SECONDS = 5e-6  # what a call costs beside its bytes, about: how long a launch lasts is estimated with it
CALLS = 16  # in a pass of the loop: with two, the pass's own launch added 6 us to each ...
PASS_SECONDS = 1e-3  # ... unless they take so long
LAUNCHES = 5
WARM_SECONDS = 0.3  # of launches before a group is timed: the card's clocks fall while programs compile
HUNG_SECONDS = 30.0  # a launch takes milliseconds; nothing but the end of the process stops a kernel that waits for ever


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """What is timed for a case.

    Attributes:
        label: for people; the reference's is "xla".
        function: takes the operation's arguments, or what `arguments` gives.
        arguments: as in `Case`.
        implementation: its name in the tuning table. None for a peer: timed, neither compared nor chosen.
        config: of the implementation; None for the reference.
        data: turns the case's data into what a peer wants.
    """

    label: str
    function: Callable[..., Any]
    arguments: Callable[[Any, Any, Any, jax.Array], Call]
    implementation: str | None = None
    config: Any = None
    data: Callable[[Any], Any] | None = None


@dataclasses.dataclass(kw_only=True)
class Measured:
    """What came of a contender.

    Attributes:
        seconds: device time of a call, the median of some launches; NaN where it did not run.
        spread: (slowest - fastest) / median of the launches.
        error: the largest of all calls of the last round, as `worst_error` measures it; NaN for a peer.
        problem: why it cannot win; empty if it can.
    """

    contender: Contender
    seconds: float = math.nan
    spread: float = math.nan
    error: float = math.nan
    problem: str = ""


Peers = Callable[[Case], Sequence[Contender]]


def contenders(
    case: Case, group: Group, shapes: Any, *, limit: int, avoid: str = ""
) -> tuple[list[Contender], tuning.Key | None]:
    """The reference, at most `limit` candidates of each other implementation, and the key of the case for the table. `avoid`: a
    regular expression for labels of candidates that are left out."""
    found = [
        Contender(
            label=REFERENCE,
            function=case.operation.implementations[REFERENCE].function,
            arguments=case.arguments,
            implementation=REFERENCE,
        )
    ]
    key = None
    for name, implementation in case.operation.implementations.items():
        if implementation.shape_key is None or implementation.candidates is None:
            continue
        try:
            key = _shape_key(implementation, case, group, shapes)
        except UnsupportedShape:
            continue
        found += [
            Contender(
                label=f"{name} {' '.join(f'{field}={value}' for field, value in config_fields(config).items())}",
                function=_configured(implementation.function, config),
                arguments=case.arguments,
                implementation=name,
                config=config,
            )
            for config in _spread(implementation.candidates(key), limit)
        ]
    return [one for one in found if one.label == REFERENCE or not avoid or not re.search(avoid, one.label)], key


def _spread(configs: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` of them: the first, which is the default, and the others evenly from the rest."""
    chosen = np.linspace(0, len(configs) - 1, min(limit, len(configs))).round().astype(int)
    return [configs[index] for index in chosen]


def config_fields(config: Any) -> dict[str, Any]:
    """The fields of a configuration, as JSON can keep them."""
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config._asdict())


def program(
    contender: Contender, case: Case, turns: Callable[[Any], Sequence[Any]], passes: int, rounds: int
) -> Callable[[Any, Any], list[Any]]:
    """(query, data) -> what is kept of the results of the last of `passes`, `rounds` times one for each turn.

    All of them, because XLA drops what nobody reads, and with it the call: also through a barrier, and out of a loop.
    """

    def one_pass(index: jax.Array, query: Any, data: Any) -> tuple[Any, list[Any]]:
        results = []
        for number in range(rounds):
            for turn in turns(data):
                call = contender.arguments(query, data, turn, index * rounds + number)
                result = contender.function(*call.args, **call.kwargs)
                query, kept = lax.optimization_barrier((case.carry(query, result), case.kept(result)))
                results.append(kept)
        return query, results

    def run(query: Any, data: Any) -> list[Any]:
        shapes = jax.eval_shape(one_pass, np.int32(0), query, data)[1]
        empty = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return lax.fori_loop(0, passes, lambda index, carry: one_pass(index, carry[0], data), (query, empty))[1]

    return run


def run_group(
    group: Group, *, seed: int, launch_seconds: float, limit: int, peers: Peers, deadline: float, avoid: str = ""
) -> Iterator[tuple[Case, tuning.Key | None, list[Measured]]]:
    """Compiles all contenders of a group in parallel, then times them one by one and gives each case as it is done.

    Args:
        seed: of the data.
        launch_seconds: device time of one timed launch, at least.
        limit: candidates of an implementation.
        peers: what else to time for a case.
        deadline: `time.monotonic()` after which nothing is begun.
        avoid: labels of candidates that are left out; see `contenders`.
    """
    device = tuning.target()
    shapes = jax.eval_shape(lambda: group.data(seed))
    calls = len(group.turns(shapes))
    planned = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in group.cases:
            found, key = contenders(case, group, shapes, limit=limit, avoid=avoid)
            floor = floor_seconds(case, device) or case.bytes / 0.02e12
            seconds = calls * (floor + CALL_SECONDS)  # of a round
            rounds = math.ceil(min(CALLS / calls, max(1, PASS_SECONDS / seconds)))
            passes = math.ceil(launch_seconds / (rounds * seconds)) or 1
            every = (*found, *peers(case))
            runs = [(one, pool.submit(_compile, one, case, group, shapes, passes, rounds, deadline)) for one in every]
            planned.append((case, key, passes * rounds, runs))
    if time.monotonic() > deadline:
        return
    data = jax.block_until_ready(jax.jit(group.data, static_argnums=0)(seed))
    for number, (case, key, rounds, runs) in enumerate(planned):
        if time.monotonic() > deadline:
            yield case, key, []
            continue
        query = jax.jit(case.query)(jax.random.key(seed + 1))
        expected = _expected(case, query, data, group.turns(data), rounds)
        if number == 0:
            _warm_up(runs[0][1].result(), query, data)
        measured = [
            _measure(case, contender, compiled.result(), query, data, expected, rounds, device)
            for contender, compiled in runs
            if time.monotonic() < deadline
        ]
        yield case, key, measured


def floor_seconds(case: Case, device: str | None) -> float | None:
    """The least that a call can take on a device; None for one whose rates are not known."""
    if device not in READ_TBS:
        return None
    return max(case.bytes / READ_TBS[device], case.flops / MULTIPLY_TFLOPS[device]) / 1e12


def winner(*cases: Iterable[Measured]) -> tuple[Measured | None, Measured | None]:
    """The contender for the table, and the reference, as measured in the first case: None for what did not run or is wrong in
    any. Of several cases the sum of the times counts."""
    by_label = [{one.contender.label: one for one in measured if one.contender.implementation is not None} for measured in cases]
    first, *others = by_label
    right = [one for label, one in first.items() if all(label in case and not case[label].problem for case in by_label)]

    def seconds(one: Measured) -> float:
        return one.seconds + sum(case[one.contender.label].seconds for case in others)

    xla = next((one for one in right if one.contender.implementation == REFERENCE), None)
    best = min((one for one in right if one is not xla), key=seconds, default=None)
    if xla is not None and (best is None or seconds(best) > GAIN * seconds(xla)):
        best = xla
    return best, xla


def _shape_key(implementation: Implementation, case: Case, group: Group, shapes: Any) -> tuning.Key:
    """The key as it would be asked for while tracing."""
    found: list[tuning.Key] = []

    def trace(query: Any, data: Any) -> None:
        call = case.arguments(query, data, group.turns(data)[0], np.int32(0))
        assert implementation.shape_key is not None
        found.append(implementation.shape_key(*call.args, **call.kwargs))

    jax.eval_shape(trace, _query_shape(case), shapes)
    return found[0]


def _query_shape(case: Case) -> Any:
    return jax.eval_shape(lambda: case.query(jax.random.key(0)))


def _compile(contender: Contender, case: Case, group: Group, shapes: Any, passes: int, rounds: int, deadline: float) -> Any:
    """The executable, or why there is none."""
    if time.monotonic() > deadline:
        return "not compiled in time"
    try:
        query = _query_shape(case)
        own = shapes if contender.data is None else jax.eval_shape(contender.data, shapes)
        return jax.jit(program(contender, case, group.turns, passes, rounds)).lower(query, own).compile()
    except Exception as error:  # one that fails must not take the others along
        return _reason(error)


def _measure(
    case: Case,
    contender: Contender,
    compiled: Any,
    query: Any,
    data: Any,
    expected: list[Any],
    rounds: int,
    device: str | None,
) -> Measured:
    measured = Measured(contender=contender)
    if isinstance(compiled, str):
        measured.problem = compiled
        return measured
    try:
        own = data if contender.data is None else jax.block_until_ready(jax.jit(contender.data)(data))
        with _watched(f"{contender.label} of {case.model} {case.operation.name} {case.name}"):
            results = jax.block_until_ready(compiled(query, own))  # the first launch records the command buffers
        times = []
        for _ in range(LAUNCHES):
            started = time.perf_counter()
            results = jax.block_until_ready(compiled(query, own))
            times.append((time.perf_counter() - started) / (rounds * len(expected)))
        measured.seconds = statistics.median(times)
        measured.spread = (max(times) - min(times)) / measured.seconds
        if contender.implementation is not None:
            measured.error = max(
                float(_worst_error(case.result(one), other))
                for one, other in zip(results[-len(expected) :], expected, strict=True)
            )
            if not measured.error <= TOLERANCE:
                measured.problem = f"WRONG: error {measured.error:.3g}, allowed {TOLERANCE}"
        if case.bytes / measured.seconds / 1e12 > PEAK_TBS.get(device or "", math.inf):
            measured.problem = "INVALID: faster than the memory, so calls were dropped, merged or answered by the cache"
        if case.flops / measured.seconds / 1e12 > PEAK_TFLOPS.get(device or "", math.inf):
            measured.problem = "INVALID: faster than the tensor cores, so calls were dropped or merged"
    except Exception as error:  # as above
        measured.problem = _reason(error)
    return measured


def _warm_up(compiled: Any, query: Any, data: Any) -> None:
    started = time.monotonic()
    while not isinstance(compiled, str) and time.monotonic() < started + WARM_SECONDS:
        jax.block_until_ready(compiled(query, data))


@contextlib.contextmanager
def _watched(name: str) -> Iterator[None]:
    """Ends the process, and says why, if what is inside does not come back."""

    def give_up() -> None:
        print(f"{name} did not come back in {HUNG_SECONDS:.0f} s; leave it out with --avoid", flush=True)
        os._exit(70)

    timer = threading.Timer(HUNG_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_worst_error = jax.jit(worst_error)  # never NaN: what is not finite counts as infinite


def _expected(case: Case, query: Any, data: Any, turns: Sequence[Any], rounds: int) -> list[Any]:
    right = jax.jit(
        lambda query, data, turn, index: case.result(
            case.kept(reference(case.operation, case.arguments(query, data, turn, index)))
        ),
    )
    return [right(query, data, turn, jnp.int32(rounds - 1)) for turn in turns]


def _configured(function: Callable[..., Any], config: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, config=config, **kwargs)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
