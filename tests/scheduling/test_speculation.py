"""Who drafts, when nobody does, and what that is worth: in virtual time, with drafts of known acceptance."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from fakes_speculation import PLAIN_SECONDS, USUAL, Run, Text, control, costs, launch_seconds, run

from llmjax.scheduling.launch_seconds import PLAIN, LaunchSeconds
from llmjax.scheduling.request_speculation import JUDGED, WARM_UP, RequestSpeculation
from llmjax.scheduling.speculation import FIRST_WAIT, MAX_WAIT, PROBE, Speculation, tokens_a_round
from llmjax.scheduling.speculation_config import SpeculationConfig

LAG = 2  # rounds launched before the one that decides has been read


def drafted(result: Run) -> list[int]:
    """Indices of the launches in which somebody drafted."""
    return [index for index, drafting in enumerate(result.launches) if drafting is not None]


def switches(speculation: Speculation) -> dict[tuple[str, str], int]:
    return dict(speculation.counts.switches)


@pytest.mark.parametrize(("acceptance", "drafts", "tokens"), [(0.0, 3, 1.0), (0.5, 3, 1.875), (1.0, 5, 6.0), (0.66, 1, 1.66)])
def test_the_tokens_of_a_round(acceptance: float, drafts: int, tokens: float) -> None:
    assert tokens_a_round(acceptance, drafts) == pytest.approx(tokens)


# Against always and never


@pytest.mark.parametrize("acceptance", [0.5, 0.66, 0.8, 0.95])
@pytest.mark.parametrize(
    "cost",
    [costs({2: 1.15, 3: 1.25}), USUAL, costs({2: 1.8, 3: 2.2}), costs({2: 3.0, 3: 4.0})],
    ids=["cheap", "usual", "dear", "cpu"],
)
def test_it_is_about_as_fast_as_the_better_of_always_and_never(acceptance: float, cost: Callable[[int, int], float]) -> None:
    texts = [Text(acceptance, 300)] * 24
    never = run(None, texts, batch=8, cost=cost).rate
    always = run(control(cost, adaptive=False), texts, batch=8, cost=cost).rate
    adaptive = run(control(cost), texts, batch=8, cost=cost, noise=0.02).rate
    assert adaptive > 0.98 * never
    if acceptance > 0.5:  # at 50 % requests stop, by what they were asked to
        assert adaptive > 0.97 * max(always, never)


@pytest.mark.parametrize("batch", [1, 8, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_tenth_of_bad_texts_costs_nothing(batch: int, seed: int) -> None:
    texts = [Text(0.15 if index % 10 == 5 else 0.75, 300) for index in range(4 * max(batch, 10))]
    never = run(None, texts, batch=batch).rate
    always = run(control(adaptive=False), texts, batch=batch, seed=seed).rate
    speculation = control()
    adaptive = run(speculation, texts, batch=batch, seed=seed, noise=0.02).rate
    assert adaptive > 0.985 * max(always, never)  # the two are of different dice
    assert switches(speculation)["off", "acceptance"] >= len(texts) // 10 - 2  # the last ones may have just begun


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_bad_texts_alone_are_as_fast_as_without_once_they_are_known(batch: int) -> None:
    speculation = control()
    result = run(speculation, [Text(0.15, 1500)] * batch, batch=batch, noise=0.02)
    wasted = [index for index in drafted(result) if index < FIRST_WAIT]
    assert len(wasted) <= WARM_UP + 12  # two standard errors at 15 % take a few rounds more than at none
    later = drafted(result)[len(wasted) :]
    assert len(later) <= PROBE * 5
    launches = len(result.launches)
    assert result.seconds / (launches * PLAIN_SECONDS) < 1.02 * (1 + 0.65 * len(wasted) / launches)


@pytest.mark.parametrize("batch", [1, 16])
def test_a_draft_that_is_always_wrong_is_off_within_the_documented_window(batch: int) -> None:
    speculation = control()
    texts = [Text(0.0, 500) for _ in range(batch)]
    result = run(speculation, texts, batch=batch)
    assert 1 <= len([index for index in drafted(result) if index < FIRST_WAIT]) <= WARM_UP + LAG
    assert switches(speculation)["off", "acceptance"] == batch
    assert all(request.speculation is not None and request.speculation.off == "acceptance" for request in result.requests)
    assert result.seconds < 1.05 * 500 * PLAIN_SECONDS


def test_tries_are_short_rare_and_rarer() -> None:
    result = run(control(), [Text(0.0, 6000)])
    found = drafted(result)
    tries = [[found[0]]]
    for index in found[1:]:
        if index == tries[-1][-1] + 1:
            tries[-1].append(index)
        else:
            tries.append([index])
    assert all(len(one) <= PROBE for one in tries[1:])
    waits = [after[0] - before[-1] for before, after in itertools.pairwise(tries)]
    assert waits[:4] == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT, 8 * FIRST_WAIT]
    assert set(waits[4:]) <= {MAX_WAIT}
    assert len(waits) > 6


def test_a_text_that_becomes_easy_is_taken_up_again() -> None:
    speculation = control()
    result = run(speculation, [Text(lambda position: 0.1 if position < 200 else 0.9, 3000)])
    assert switches(speculation)["on", "acceptance"] == 1
    assert len(drafted(result)[-200:]) == 200
    assert result.tokens / len(result.launches) > 2


def test_nothing_oscillates() -> None:
    """Where it makes no difference, noise does not switch: at most with the tries, which are rarer and rarer."""
    cost = costs({2: tokens_a_round(0.7, 2), 3: tokens_a_round(0.7, 3)})
    for seed in range(3):
        speculation = control(cost, min_acceptance=0.3)
        result = run(speculation, [Text(0.7, 1000)] * 32, batch=8, cost=cost, seed=seed, noise=0.03)
        assert speculation.counts.switches.get(("off", "cost"), 0) <= len(result.launches) / 100


def test_the_better_length_is_chosen_and_kept() -> None:
    for acceptance, cost, best in ((0.9, costs({2: 1.4, 4: 1.8}), 4), (0.55, costs({2: 1.4, 4: 2.2}), 2)):
        result = run(control(cost, tokens=4, min_acceptance=0.2), [Text(acceptance, 600)] * 8, batch=4, cost=cost, noise=0.02)
        lengths = [drafting.length for drafting in result.launches if drafting is not None]
        assert lengths[40:].count(best) > 0.95 * len(lengths[40:])
        assert sum(a != b for a, b in itertools.pairwise(lengths)) <= 4


def test_costs_are_followed() -> None:
    """Rounds that turn out slower than at the start are given up; and the other way round they are found."""
    cheap, dear = costs({2: 1.3, 3: 1.4}), costs({2: 3.0, 3: 3.5})
    config = SpeculationConfig(method="draft")
    speculation = Speculation(config, launch_seconds(cheap, config))
    result = run(speculation, [Text(0.8, 2000)], cost=dear)
    assert len([index for index in drafted(result) if index > 100]) < 60
    assert switches(speculation)["off", "cost"] >= 1
    speculation = Speculation(config, launch_seconds(dear, config))
    result = run(speculation, [Text(0.8, 4000)], cost=cheap)
    assert len(drafted(result)[-300:]) == 300
    assert switches(speculation)["on", "cost"] == 1


# Who may not


def test_beyond_max_length_nobody_drafts() -> None:
    for batch in (1, 16):
        speculation = control(max_length=100)
        result = run(speculation, [Text(0.9, 300)] * batch, batch=batch)
        assert switches(speculation)["off", "length"] == batch
        assert ("off", "acceptance") not in switches(speculation)
        for request in result.requests:
            assert request.speculation is not None
            assert request.speculation.off == "length"
            assert 0 < request.speculation.rounds * 1.5 < 100
    assert not drafted(run(control(max_length=100), [Text(0.9, 50, prompt=150)]))


def test_beyond_max_length_nobody_drafts_along() -> None:
    """One that is off for its acceptance does, as long as it is short, where others draft."""
    speculation = control(max_length=60)
    result = run(speculation, [Text(0.1, 400), *[Text(0.95, 40)] * 60], batch=4)
    record = result.requests[0].speculation
    assert record is not None
    assert record.off == "length"
    assert WARM_UP < record.rounds < 60
    assert switches(speculation) == {("off", "acceptance"): 1, ("off", "length"): 1}


def test_a_large_batch_does_not_draft_and_one_row_more_or_less_does_not_switch() -> None:
    speculation = control(disable_above_batch=8)
    result = run(speculation, [Text(0.9, 100)] * 16, batch=9)
    assert all(rows < 9 for rows, drafting in zip(result.rows, result.launches, strict=True) if drafting is not None)
    assert speculation.off is None
    assert switches(speculation) == {("off", "batch"): 1, ("on", "batch"): 1}
    speculation = control(disable_above_batch=8)
    requests = run(None, [Text(0.9, 100)] * 9, batch=9).requests
    for request in requests:
        request.num_left = 50
    plans = [speculation.plan(requests[:rows]) for rows in (9, 8, 9, 8, 7)]
    assert [plan is not None for plan in plans[:4]] == [False] * 4
    assert switches(speculation)["off", "batch"] == 1


def test_outputs_with_a_form_draft_as_others_do() -> None:
    speculation = control()
    result = run(speculation, [Text(0.9, 200, structured=True), Text(0.9, 200), Text(0.05, 200, structured=True)])
    with_form, free, hard = (request.speculation for request in result.requests)
    for one in (with_form, free):
        assert one is not None
        assert one.off is None
        assert one.rounds > 10
    assert hard is not None
    assert hard.off == "acceptance"


def test_one_that_is_off_makes_no_launch_speculate_but_drafts_along() -> None:
    speculation = control()
    good, bad = run(speculation, [Text(0.9, 600), Text(0.1, 600)]).requests
    assert bad.speculation is not None
    assert good.speculation is not None
    assert bad.speculation.off == "acceptance"
    assert bad.speculation.rounds >= good.speculation.rounds  # as long as the other lasts, and then the tries
    assert bad.speculation.rounds < good.speculation.rounds + WARM_UP + 3 * PROBE


def test_why_nobody_drafted_is_told() -> None:
    result = run(control(disable_above_batch=1), [Text(0.9, 20)] * 4, batch=4)
    assert [r.speculation and (r.speculation.held, r.speculation.rounds) for r in result.requests[:3]] == [("batch", 0)] * 3
    cost = costs({2: 9.0, 3: 9.0})
    (request,) = run(control(cost), [Text(0.9, 50)], cost=cost).requests
    assert request.speculation is not None
    assert (request.speculation.off, request.speculation.held, request.speculation.rounds) == (None, "cost", 0)


# What is expected


def test_a_new_request_is_expected_to_be_like_its_class() -> None:
    speculation = control()
    run(speculation, [Text(0.95, 300, prompt_class="code"), Text(0.2, 300, prompt_class="cjk")] * 6, batch=4)
    rates = speculation.rates
    assert rates.prior(0, "code") > 0.85
    assert rates.prior(0, "cjk") < 0.4
    overall = rates.overall()
    assert overall is not None
    assert rates.prior(0, "cjk") < overall < rates.prior(0, "code")
    assert rates.prior(0, "unseen") == pytest.approx(overall, abs=0.05)
    assert set(rates.by_class()) == {"code", "cjk"}
    assert set(rates.by_lane()) == {0}


def test_counts_agree_with_each_other() -> None:
    speculation = control()
    result = run(speculation, [Text(0.8, 200)] * 8, batch=4)
    counts, records = speculation.counts, [request.speculation for request in result.requests]
    assert counts.rounds == sum(record.rounds for record in records if record)
    assert counts.drafted == sum(record.drafted for record in records if record)
    assert counts.accepted == sum(record.accepted for record in records if record) == sum(counts.accepted_at())
    at = counts.accepted_at()
    assert at == sorted(at, reverse=True)
    assert at[0] / counts.rounds == pytest.approx(0.8, abs=0.05)


def test_a_request_in_between_is_judged_by_a_standard_error_after_its_window() -> None:
    record = RequestSpeculation(0.7)
    for _ in range(JUDGED - 1):
        record.read(1, 0)
        record.read(1, 1) if record.rounds % 2 else record.read(2, 1)
    assert not record.fails(0.5)
    assert record.fails(0.9)
    assert 0.4 < record.acceptance < 0.6


def test_nothing_proposed_counts_as_not_accepted() -> None:
    record = RequestSpeculation(0.7)
    for _ in range(WARM_UP):
        assert record.read(0, 0) == 1
    assert record.fails(0.5)
    assert (record.rounds, record.drafted) == (WARM_UP, 0)


# Fixed


def test_always_drafts_as_much_as_there_is_room_for() -> None:
    result = run(control(adaptive=False), [Text(0.0, 50)] * 2)
    assert all(drafting is not None and drafting.length == 3 for drafting in result.launches[:-LAG])
    assert not drafted(run(control(adaptive=False, disable_above_batch=2), [Text(0.9, 50)] * 3, batch=3))[10:20]


def test_in_a_deterministic_engine_rounds_are_counted_and_switch_nobody() -> None:
    speculation = control(deterministic=True)
    result = run(speculation, [Text(0.0, 100), Text(0.5, 100)], batch=2)
    assert all(request.speculation is not None and request.speculation.off is None for request in result.requests)
    assert switches(speculation) == {}
    assert speculation.counts.rounds > 90


def test_the_same_history_gives_the_same_decisions() -> None:
    texts = [Text(0.3 + 0.1 * (index % 6), 200) for index in range(20)]
    first, second = (run(control(), texts, batch=4, seed=3, noise=0.05) for _ in range(2))
    assert first.launches == second.launches


# What launches cost


def test_times_are_followed_but_a_pause_is_not() -> None:
    seconds = LaunchSeconds({8: 1.0, 16: 1.0}, {(8, 2): 2.0})
    for _ in range(60):
        seconds.measured(8, 2, 1.5)
    assert seconds.of(7, 2) == pytest.approx(1.5, rel=0.01)
    seconds.measured(5, 2, 1000.0)
    assert seconds.of(8, 2) < 1.7
    assert seconds.of(9, PLAIN) == 1.0
    assert seconds.of(9, 2) == seconds.of(17, PLAIN) == float("inf")
    seconds.measured(9, 2, 1.0)  # there is no such program
    assert seconds.of(9, 2) == float("inf")


def test_a_time_that_the_host_had_part_in_only_lowers() -> None:
    seconds = LaunchSeconds({1: 1.9}, {(1, 3): 9.4})
    seconds.measured(1, 3, 4.9, at_most=True)
    assert seconds.of(1, 3) == pytest.approx(4.9)
    for _ in range(60):
        seconds.measured(1, 3, 30.0, at_most=True)
        seconds.measured(1, PLAIN, 1.9)
    assert seconds.of(1, 3) == pytest.approx(4.9)


def test_a_program_that_was_not_run_for_long_is_taken_to_have_changed_like_the_others() -> None:
    seconds = LaunchSeconds({8: 1.0}, {(8, 2): 2.0})
    for _ in range(200):
        seconds.measured(8, 2, 3.0)
    assert seconds.of(8, PLAIN) == pytest.approx(1.5, rel=0.02)
