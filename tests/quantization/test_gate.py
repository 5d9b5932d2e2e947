"""Verdicts over written-down figures: each limit alone decides, NaN and too little data are refused by name."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from fakes_gate import ScriptedGenerator, TableScorer

from llmjax.errors import ConfigError
from llmjax.quantization.agreement import Agreement
from llmjax.quantization.gate import METRICS, Limits, judge
from llmjax.quantization.quality import Quality, QualityData, Subject, measure_quality
from llmjax.quantization.scores import Generation
from llmjax.quantization.tasks import Paired, Task

SOUND = Quality(
    agreement=Agreement(
        tokens=5000,
        baseline_nll=10000.0,
        candidate_nll=10025.0,
        square_sum=50.0,
        same_best=4900,
        kl_sum=15.0,
        kl_max=0.4,
    ),
    loops=Paired(both=4, only_baseline=1, only_candidate=1, neither=58),
    exact_match=Paired(both=30, only_baseline=1, only_candidate=0, neither=19),
    arithmetic=Paired(both=40, only_baseline=3, only_candidate=2, neither=19),
)


def read(**changes) -> Quality:
    return dataclasses.replace(SOUND, agreement=dataclasses.replace(SOUND.agreement, **changes))


def test_a_sound_candidate_passes_every_check():
    verdict = judge(SOUND)
    assert (verdict.decision, verdict.passed, verdict.refused, verdict.skipped) == ("pass", True, (), ("block_error",))
    names = [check.name for check in verdict.checks]
    assert {"perplexity_ratio", "top1_agreement", "kl", "loop_rate_increase", "exact_match_ratio", "arithmetic_drop"} < set(names)
    assert "passes all" in verdict.line()


@pytest.mark.parametrize(
    ("quality", "refused"),
    [
        (read(candidate_nll=10000.0 + 5000 * math.log(1.0201)), "perplexity_ratio"),
        (read(same_best=4749), "top1_agreement"),
        (read(kl_sum=50.1), "kl"),
        (read(kl_p99=0.041), "kl_p99"),
        (read(kl_p99=math.nan), "kl_p99"),
        (dataclasses.replace(SOUND, loops=Paired(4, 0, 20, 40)), "loop_rate_increase"),
        (dataclasses.replace(SOUND, exact_match=Paired(20, 11, 0, 19)), "exact_match_ratio"),
        (dataclasses.replace(SOUND, arithmetic=Paired(20, 23, 2, 19)), "arithmetic_drop"),
        (read(candidate_broken=1, first_broken=(3, 9)), "candidate.finite"),
        (read(baseline_broken=1, first_broken=(3, 9)), "baseline.finite"),
        (dataclasses.replace(SOUND, candidate_errors=1, first_error="NaN"), "candidate.outputs"),
        (dataclasses.replace(SOUND, baseline_errors=1, first_error="NaN"), "baseline.outputs"),
        (read(tokens=999, baseline_nll=2000.0, candidate_nll=2000.0, same_best=999, kl_sum=0.0), "tokens"),
        (dataclasses.replace(SOUND, loops=Paired(neither=15)), "loop_rate_increase.outputs"),
        (dataclasses.replace(SOUND, loops=None), "loop_rate_increase"),
        (dataclasses.replace(SOUND, loops=Paired()), "loop_rate_increase"),
        (dataclasses.replace(SOUND, exact_match=Paired(neither=50)), "exact_match_ratio"),
        (read(candidate_nll=1e9), "perplexity_ratio"),
        (read(candidate_nll=math.nan), "perplexity_ratio"),
        (dataclasses.replace(SOUND, blocks={"layers.0.mlp": 1.0, "layers.1.mlp": 3.01}), "block_error"),
        (dataclasses.replace(SOUND, blocks={"layers.0.mlp": math.nan, "layers.1.mlp": 3.0}), "block_error"),
        (read(kl_sum=math.nan), "kl"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_fail", ["stop", "fallback"])
def test_one_thing_wrong_refuses_by_its_name(quality, refused, on_fail):
    verdict = judge(quality, on_fail=on_fail)
    assert (verdict.decision, verdict.refused) == (on_fail, (refused,))
    assert "refused" in verdict.line()
    json.loads(json.dumps(verdict.as_json(), allow_nan=False), parse_constant=pytest.fail)


def test_values_on_the_limit_pass():
    assert judge(read(same_best=4750, kl_sum=50.0)).passed


def test_the_reason_says_how_much_is_needed_and_where_it_broke():
    assert "12 tokens of held-out text: too few to judge, 1000 are needed" in judge(read(tokens=12)).line()
    assert "first in text 3 at token 10" in judge(read(candidate_broken=2, first_broken=(3, 9))).line()
    assert "0 tokens" in judge(Quality(Agreement())).line()
    blocks = {"layers.0.mlp": 1.0, "layers.7.attention": 11.5}
    assert "block_error 11.5 in layers.7.attention is above 3" in judge(dataclasses.replace(SOUND, blocks=blocks)).line()
    blocks["layers.0.mlp"] = math.nan
    assert "block_error has no value: it is not finite in layers.0.mlp" in judge(dataclasses.replace(SOUND, blocks=blocks)).line()


def test_chance_is_allowed_for_and_a_real_loss_is_not():
    few = dataclasses.replace(SOUND, loops=Paired(4, 1, 5, 22))  # 4 of 32 more: 12.5 %, by 6 that differ
    (check,) = (check for check in judge(few).checks if check.name == "loop_rate_increase")
    assert check.passed
    assert check.value == 4 / 32
    assert check.allowance == pytest.approx(1.645 * math.sqrt(6) / 32)
    assert not judge(dataclasses.replace(SOUND, loops=Paired(0, 0, 32, 0))).passed


def test_what_is_not_asked_for_is_skipped_and_what_is_named_must_be_measured():
    bare = dataclasses.replace(SOUND, exact_match=None, arithmetic=None)
    assert judge(bare).skipped == ("block_error", "exact_match_ratio", "arithmetic_drop")
    assert judge(bare).passed
    named = Limits.of([{"metric": "exact_match_ratio", "min": 0.9}])
    assert judge(bare, named).refused == ("exact_match_ratio",)
    without = Limits.of([{"metric": "loop_rate_increase", "max": None}])
    assert judge(dataclasses.replace(bare, loops=None), without).passed


def test_limits_as_yaml_has_them():
    limits = Limits.of([{"metric": "perplexity_ratio", "max": 40}, {"metric": "loop_rate", "max": 0.01}], min_tokens=10)
    assert (limits.max_perplexity_ratio, limits.max_loop_rate, limits.min_tokens) == (40, 0.01, 10)
    assert limits.min_top1_agreement == Limits().min_top1_agreement
    assert judge(SOUND, limits).refused == ("loop_rate",)
    fields = {f"{metric.bound}_{name}" for name, metric in METRICS.items()}
    assert fields == set(vars(limits)) - {"min_tokens", "min_outputs", "required"}


@pytest.mark.parametrize(
    ("bounds", "why"),
    [
        ([{"metric": "perplexity", "max": 1}], "no metric 'perplexity'"),
        ([{"max": 1}], "no metric None"),
        ([{"metric": "kl", "min": 1}], "one bound, max"),
        ([{"metric": "top1_agreement", "min": 0.5, "max": 1}], "one bound, min"),
        ([{"metric": "kl", "max": 1}, {"metric": "kl", "max": 2}], "twice"),
        ([{"metric": "kl", "max": math.nan}], "finite number"),
        ([{"metric": "kl", "max": -1}], "finite number"),
        ([{"metric": "kl", "max": 10**400}], "finite number"),
        ([{"metric": "kl", "max": "1"}], "finite number"),
        ([{"metric": "kl", "max": True}], "finite number"),
    ],
)
def test_limits_that_cannot_be_are_refused_in_one_line(bounds, why):
    with pytest.raises(ConfigError, match=why):
        Limits.of(bounds)
    for options in ({"min_tokens": 0}, {"min_outputs": 1.5}, {"required": frozenset({"loops"})}):
        with pytest.raises(ConfigError):
            Limits(**options)


def echo(prompt) -> Generation:
    return Generation(tuple(range(60)), f"answer to {prompt}")


def looping(prompt) -> Generation:
    return Generation((0,) * 60, "!" * 60)


def logits(tokens) -> np.ndarray:
    return np.random.default_rng(list(tokens)).normal(0, 3, (len(tokens) - 1, 30))


def data() -> QualityData:
    random = np.random.default_rng(5)
    return QualityData(
        texts=iter([random.integers(0, 30, 400).tolist() for _ in range(3)]),
        prompts=(f"p{i}" for i in range(70)),
        tasks=(Task(f"t{i}", f"answer to t{i}") for i in range(20)),
        shown=4,
    )


def test_a_model_that_loops_and_reads_well_is_refused_for_its_loops():
    """Report B52 (vLLM 14126): "!!!!" for ever. Reading tells nothing of it here, on purpose."""
    scorer = TableScorer(logits)
    sound = measure_quality(Subject(scorer, ScriptedGenerator(echo)), Subject(scorer, ScriptedGenerator(echo)), data())
    assert judge(sound).passed
    assert (sound.loops, sound.exact_match, sound.arithmetic) == (Paired(neither=70), Paired(both=20), None)
    bad = measure_quality(Subject(scorer, ScriptedGenerator(echo)), Subject(scorer, ScriptedGenerator(looping)), data())
    assert judge(bad).refused == ("loop_rate_increase", "exact_match_ratio")
    assert (bad.loops, bad.exact_match) == (Paired(only_candidate=70), Paired(only_baseline=20))
    assert [one.kind for one in bad.samples] == ["loop"] * 4 + ["exact_match"] * 4
    assert bad.samples[4].expected == "answer to t0"
    assert bad.samples[0].candidate == "!" * 60


def test_the_first_texts_are_those_whose_blocks_are_compared_and_all_are_read():
    scorer, seen = TableScorer(logits), list[list[int]]()

    def blocks(texts):
        seen.extend(texts)
        return {"layers.0.mlp": 2.0}

    given = list(data().texts)
    for count, kept in ((200, 3), (400, 2), (2000, 1)):
        seen.clear()
        texts = [(text * 5)[:count] for text in given]
        found = measure_quality(Subject(scorer), Subject(scorer), QualityData(iter(texts)), block_errors=blocks)
        assert seen == texts[:kept]
        assert (found.agreement.texts, found.worst_block) == (3, ("layers.0.mlp", 2.0))
    assert measure_quality(Subject(scorer), Subject(scorer), data()).blocks is None


def test_an_output_that_ends_in_an_error_is_refused_and_shown():
    failing = ScriptedGenerator(lambda prompt: echo(prompt) if prompt != "p3" else Generation((), "", "logits were NaN"))
    scorer = TableScorer(logits)
    found = measure_quality(Subject(scorer, ScriptedGenerator(echo)), Subject(scorer, failing), data())
    verdict = judge(found)
    assert verdict.refused == ("candidate.outputs",)
    assert "1 outputs of the candidate ended in an error (logits were NaN)" in verdict.line()
    assert found.samples[3].candidate == "[logits were NaN]"


def test_the_same_again_is_the_same_verdict():
    subject = Subject(TableScorer(logits), ScriptedGenerator(echo))
    first, again = (judge(measure_quality(subject, subject, data())).as_json() for _ in range(2))
    assert json.dumps(first) == json.dumps(again)


def test_without_a_generator_nothing_is_generated():
    found = measure_quality(Subject(TableScorer(logits)), Subject(TableScorer(logits)), data())
    assert (found.loops, found.exact_match, found.samples) == (None, None, ())
    assert judge(found).refused == ("loop_rate_increase",)
