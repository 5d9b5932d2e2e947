"""Speculative decoding through the whole engine: greedy tokens are those without it, sampled ones have the same distribution.

The model's next token depends on every token in its cache, so that a key or value that is wrong, late or another's is seen; the
draft is another such model, often right, or the same one, and then always right. Where who drafts is drawn anew for every launch,
draft models fall behind and have to catch up.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from remembering_model import RememberingConfig, greedy_after, logits_after, make_table

from llmjax.engine.config import EngineConfig
from llmjax.engine.draft_model import DraftModel
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import NonFiniteError
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.request import Request
from llmjax.scheduling.scheduler import Scheduler
from llmjax.scheduling.speculation import Drafting, LaunchSeconds, Speculation
from llmjax.scheduling.speculation_config import SpeculationConfig

CONTEXT, PAGE = 96, 16
CONFIG = RememberingConfig()
TABLE = make_table(1)
DRAFT_CONFIG = dataclasses.replace(CONFIG, vocab_size=16, num_layers=1)  # another padding, another number of layers
METHODS = ("ngram", "draft")


def draft_params(noise: float) -> dict[str, jax.Array]:
    table = make_table(2, like=TABLE, noise=noise)
    return {"table": jnp.asarray(np.pad(table, ((0, 0), (0, DRAFT_CONFIG.vocab_size - CONFIG.vocab_size))))}


class Watched(Speculation):
    """Remembers what came of the drafts; draws who drafts for every launch, if told to."""

    def __init__(self, config: SpeculationConfig, seconds: LaunchSeconds) -> None:
        super().__init__(config, seconds)
        self.seen: list[tuple[int, int]] = []
        self.random: random.Random | None = None
        self.silent = False

    def plan(self, decoding: Sequence[Request]) -> Drafting | None:
        rng = self.random
        if self.silent:
            return None
        if rng is None:
            return super().plan(decoding)
        if rng.random() < 0.4:
            return None
        length = rng.choice(self._config.lengths)
        return Drafting(length, [rng.randint(0, length) for _ in decoding])

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        assert 0 <= accepted <= proposed <= self._config.tokens
        self.seen.append((proposed, accepted))


def make_engine(method: str, *, noise: float = 0.5) -> Engine:
    options = EngineConfig(
        max_context=CONTEXT, max_sequences=4, max_tokens_per_step=32, prefill_chunk=24, decode_steps=2, row_buckets=(4,),
        token_buckets=(32,), speculative=SpeculationConfig(method=method, tokens=3, adaptive=False),  # type: ignore[arg-type]
    )  # fmt: skip
    draft = DraftModel(DRAFT_CONFIG, draft_params(noise)) if method == "draft" else None
    return Engine(CONFIG, {"table": jnp.asarray(TABLE)}, None, options, draft=draft)


@pytest.fixture(scope="module", params=METHODS)
def made(request: pytest.FixtureRequest) -> Engine:
    return make_engine(request.param)


@pytest.fixture
def engine(made: Engine) -> Iterator[Engine]:
    """Nothing is found yet, and NaN is wherever nobody has written, in the draft model's cache too."""
    use(made)
    yield made
    assert made.runner.compiles_after_ready == 0
    assert made.pool.num_used == 0


def use(engine: Engine, **policy: object) -> Watched:
    """The same programs under another scheduler, everything else forgotten."""
    engine.pool.forget_all()
    runner = engine.runner
    unwritten = lambda cache: jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), cache)  # noqa: E731
    runner._cache, runner._draft_cache = unwritten(runner._cache), unwritten(runner._draft_cache)
    config = dataclasses.replace(engine.config, **policy)
    assert config.speculative is not None
    watched = Watched(config.speculative, runner.launch_seconds)
    engine.speculation, engine.scheduler = watched, Scheduler(config, engine.pool, watched)
    return watched


def has_draft_model(engine: Engine) -> bool:
    return engine.runner._draft_cache is not None


def use_draft(engine: Engine, noise: float) -> None:
    engine.runner._draft_params = draft_params(noise)


def greedy(limit: int, **options: object) -> SamplingParams:
    return SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True, **options)  # type: ignore[arg-type]


def finish(engine: Engine, *, owns_all_pages: bool = True) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
        if owns_all_pages:
            engine.scheduler.check_integrity()
    return done


def prompts(count: int, *lengths: int) -> list[list[int]]:
    """Fresh ones; some say the same again and again, so that prompt lookup finds something."""
    made = []
    for index in range(count):
        length = lengths[index % len(lengths)]
        ids = [random.randrange(CONFIG.num_tokens) for _ in range(length)]
        made.append((ids[:3] * length)[:length] if random.random() < 0.4 else ids)
    return made


def check(engine: Engine, asked: dict[str, tuple[list[int], int]], done: dict[str, RequestOutput]) -> None:
    for name, (prompt, limit) in asked.items():
        assert done[name].outputs[0].token_ids == greedy_after(TABLE, prompt, limit, CONFIG.num_tokens), (
            name,
            len(prompt),
            limit,
        )


def ask(engine: Engine, prompt: list[int], limit: int, **options: object) -> str:
    return engine.add_request(prompt, greedy(limit, **options))


@pytest.mark.parametrize("mixed", [False, True])
def test_greedy_tokens_are_those_of_the_model_alone(engine: Engine, mixed: bool) -> None:
    """Every length about the ends of pages and chunks, every limit about those of launches, up to a full context."""
    watched = use(engine)
    watched.random = random.Random() if mixed else None
    asked = {}
    for prompt in prompts(24, 1, 2, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 90, 95):
        limit = min(random.choice([1, 2, 3, 4, 5, 8, 30, 95]), CONTEXT - len(prompt))
        asked[ask(engine, prompt, limit)] = (prompt, limit)
    check(engine, asked, finish(engine))
    proposed, accepted = np.sum(watched.seen, axis=0)
    assert 0 < accepted < proposed


@pytest.mark.parametrize("made", ["draft"], indirect=True)
def test_a_draft_that_is_the_model_itself_is_always_right(engine: Engine) -> None:
    """Whatever was launched in between: so its cache holds what it should at every position, holes filled. By plain decoding it
    would take three or four times as many launches."""
    use_draft(engine, 0.0)
    try:
        for mixed in (False, True):
            watched = use(engine)
            watched.random = random.Random() if mixed else None
            before, asked = engine.stats.launches, {}
            for prompt in prompts(10, 1, 15, 16, 33, 40, 60):
                asked[ask(engine, prompt, 36)] = (prompt, 36)
            check(engine, asked, finish(engine))
            assert watched.seen
            assert all(proposed == accepted for proposed, accepted in watched.seen)
            assert mixed or engine.stats.launches - before < 60
    finally:
        use_draft(engine, 0.5)


@pytest.mark.parametrize("mixed", [False, True])
def test_preemption_in_a_small_pool(engine: Engine, mixed: bool) -> None:
    watched = use(engine)
    watched.random = random.Random() if mixed else None
    taken, before = engine.pool.allocate(engine.pool.num_free - 7), engine.stats.preemptions
    asked = {ask(engine, prompt, 60): (prompt, 60) for prompt in prompts(6, 1, 9, 17)}
    done = finish(engine, owns_all_pages=False)
    engine.pool.free(taken)
    check(engine, asked, done)
    assert engine.stats.preemptions > before


def test_prefix_hits_give_what_is_computed_anew(engine: Engine) -> None:
    """A, B, A (B63), with the cache off and on; then turns of a conversation, whose drafted answers are found. A rejected
    draft lies in no page that is found, and a row that begins behind found pages knows its history."""
    a, b = prompts(2, 50, 33)
    for prefix_cache in (False, True):
        watched = use(engine, prefix_cache=prefix_cache)
        for prompt in (a, b, a):
            name = ask(engine, prompt, 30)
            done = finish(engine)
            check(engine, {name: (prompt, 30)}, done)
        assert (done[name].num_cached_tokens > 0) == prefix_cache
    for mixed in (False, True):
        watched.random = random.Random() if mixed else None
        turn = prompts(1, 5)[0]
        for _ in range(3):
            name = ask(engine, turn, 20)
            done = finish(engine)
            check(engine, {name: (turn, 20)}, done)
            turn = [*turn, *done[name].outputs[0].token_ids, *prompts(1, 3)[0]]
        assert done[name].num_cached_tokens >= 32


def test_rows_end_at_a_stop_id_among_the_drafts(engine: Engine) -> None:
    for place in range(9):
        prompt = prompts(1, 14)[0]
        want = greedy_after(TABLE, prompt, 40, CONFIG.num_tokens)
        stop = want[place]
        first = want.index(stop)
        beside = prompts(1, 20)[0]
        names = ask(engine, prompt, 40, stop_token_ids=[stop]), ask(engine, beside, 30)
        done = finish(engine)
        output = done[names[0]].outputs[0]
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (want[: first + 1], "stop", stop)
        check(engine, {names[1]: (beside, 30)}, done)


def test_stop_ids_wait_for_min_tokens(engine: Engine) -> None:
    """Each of the verified positions counts its own output: the stop id cannot be sampled before, among the drafts too."""
    for least in (1, 4, 6, 11):
        prompt = prompts(1, 10)[0]
        stops, out = [3, 7, 8, 9], []
        while len(out) < 30:
            logits = np.array(logits_after(TABLE, [*prompt, *out], CONFIG.num_tokens))
            if len(out) < least:
                logits[stops] = -np.inf
            out.append(int(logits.argmax()))
            if out[-1] in stops:
                break
        name = ask(engine, prompt, 30, stop_token_ids=stops, min_tokens=least)
        assert finish(engine)[name].outputs[0].token_ids == out


def test_aborts_while_drafts_are_in_flight(engine: Engine) -> None:
    rng = random.Random()
    asked = {ask(engine, prompt, 40): (prompt, 40) for prompt in prompts(12, 1, 16, 30, 55)}
    done, gone = {}, set()
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if len(gone) < 6 and (left := [name for name in asked if name not in done]):
            gone.add(victim := rng.choice(left))
            engine.abort(victim)
        engine.scheduler.check_integrity()
    for name in gone:
        prompt, limit = asked.pop(name)
        tokens = done[name].outputs[0].token_ids
        assert done[name].outputs[0].finish_reason == "abort"
        assert tokens == greedy_after(TABLE, prompt, limit, CONFIG.num_tokens)[: len(tokens)]
    check(engine, asked, done)


SETTINGS = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"temperature": 0.0, "logit_bias": {2: 1.5, 5: -4.0}, "logprobs": 1, "logprobs_mode": "processed"},
    {"temperature": 0.8, "top_p": 0.8, "seed": 5, "logprobs": 2, "n": 2},
    {"temperature": 1.3, "top_k": 4, "min_p": 0.05, "seed": 6, "logprobs": 0, "frequency_penalty": 0.5},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 0.8, "logprobs": 4, "logprobs_mode": "processed"},
)


def test_tokens_and_logprobs_are_those_of_plain_steps(engine: Engine) -> None:
    """Greedy ones with any draft; sampled ones with certain drafts too, token for token. Penalties count the drafts before."""
    ids = prompts(len(SETTINGS), 20, 31)
    outputs = []
    for off in (True, False):
        watched = use(engine)
        watched.silent = off
        names = []
        for prompt, settings in zip(ids, SETTINGS, strict=True):
            if has_draft_model(engine) and settings["temperature"]:
                continue
            names.append(engine.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True, **settings)))  # type: ignore[arg-type]
        done = finish(engine)
        outputs.append([done[name].outputs for name in names])
        assert off or sum(accepted for _, accepted in watched.seen) > 0
    for plain, drafted in zip(*outputs, strict=True):
        for one, other in zip(plain, drafted, strict=True):
            assert one.token_ids == other.token_ids
            scores = [
                [entry for position in o.logprobs or [] for entry in (position.chosen, *position.top)] for o in (one, other)
            ]
            assert [(e.token_id, e.rank) for e in scores[0]] == [(e.token_id, e.rank) for e in scores[1]]
            np.testing.assert_allclose([e.logprob for e in scores[0]], [e.logprob for e in scores[1]], rtol=2e-6, atol=2e-6)
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, rel=1e-6)


@pytest.mark.parametrize("made", ["draft"], indirect=True)
def test_the_distribution_of_whole_outputs_is_the_models(engine: Engine) -> None:
    """Three tokens of 1500 requests, with filters and a penalty: chi-square over all outputs, in fixed noise. (With prompt lookup
    they are those of plain steps token for token.)"""
    prompt, count = [1, 2, 3], 1500
    settings = {"temperature": 1.2, "top_k": 3, "frequency_penalty": 0.4}
    want: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for out, chance in want.items():
            for token, p in enumerate(distribution([*prompt, *out], out, **settings)):
                if p:
                    longer[*out, token] = chance * p
        want = longer
    watched = use(engine)
    names = [
        engine.add_request(prompt, SamplingParams(max_tokens=3, seed=seed, ignore_eos=True, **settings))  # type: ignore[arg-type]
        for seed in range(count)
    ]
    done = finish(engine, owns_all_pages=False)  # looking at all of the queue takes time
    seen = dict.fromkeys(want, 0)
    for name in names:
        seen[tuple(done[name].outputs[0].token_ids)] += 1
    likely = [out for out, chance in want.items() if chance * count >= 5]
    rare = [out for out in want if out not in likely]
    cells = [([out], want[out]) for out in likely] + [(rare, sum(want[out] for out in rare))]
    chi = sum((sum(seen[out] for out in outs) - count * p) ** 2 / (count * p) for outs, p in cells if p)
    freedom = len(cells) - 1
    assert chi < freedom + 4 * np.sqrt(2 * freedom), (chi, freedom)
    proposed, accepted = np.sum(watched.seen, axis=0)
    assert 0.2 < accepted / proposed < 0.98


def distribution(ids: list[int], out: Sequence[int], *, temperature: float, top_k: int, frequency_penalty: float) -> np.ndarray:
    logits = logits_after(TABLE, ids, CONFIG.num_tokens).astype(np.float64)
    logits = logits - frequency_penalty * np.bincount(np.array(out, int), minlength=CONFIG.num_tokens)
    kept = logits >= np.sort(logits)[-top_k]
    weights = np.where(kept, np.exp((logits - logits.max()) / temperature), 0.0)
    return weights / weights.sum()


@pytest.mark.slow
def test_a_draft_model_that_is_not_finite_is_told_at_the_start() -> None:
    with pytest.raises(NonFiniteError, match="the draft model gives NaN"):
        make_engine("draft", noise=np.nan)
