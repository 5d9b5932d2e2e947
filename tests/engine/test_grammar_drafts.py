"""Drafts for forms, and their masks, beside matchers that take the same tokens one by one."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from fakes_text import EOS_ID, plain_byte_tokenizer

from llmjax.engine.grammar import GrammarCompiler, GrammarMatcher
from llmjax.engine.grammar_drafts import FormDrafts, FormToDraft, draft_forms
from llmjax.engine.prompt_lookup import PromptLookup
from llmjax.sampling_params import SamplingParams
from llmjax.structured_output import StructuredOutput

VOCAB = 288


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(
        plain_byte_tokenizer(), vocab_size=VOCAB, num_tokens=260, eos_ids=(EOS_ID,), compiled=lambda seconds: None
    )


def matcher_of(form: StructuredOutput, said: bytes = b"", **options: object) -> GrammarMatcher:
    params = SamplingParams(structured=form, max_tokens=None, **options)  # type: ignore[arg-type]
    (matcher,) = compiler().matchers(params, (EOS_ID, *params.stop_ids))
    for token in said:
        assert matcher.take(token)
        compiler().fill([matcher])
    return matcher


def to_draft(matcher: GrammarMatcher, most: int, before: bytes) -> FormToDraft:
    lookup = PromptLookup(100)
    lookup.add(list(before))
    return FormToDraft(matcher, lookup, most)


def draft(*forms: FormToDraft) -> list[FormDrafts]:
    return draft_forms(compiler(), forms, shortest=1, longest=3)


@pytest.mark.parametrize(
    ("form", "said", "before", "text"),
    [
        (StructuredOutput(choice=["abcdefgh"]), b"a", b"qa", b"bcdef"),  # one text is left
        (StructuredOutput(choice=["abcdef"]), b"a", b"qa", b"bcde"),  # what completes it is no draft
        (StructuredOutput(choice=["ab"]), b"a", b"qa", b""),
        (StructuredOutput(choice=["abXcd", "abYcd"]), b"a", b"qa", b"b"),  # up to a choice
        (StructuredOutput(choice=["abXcd", "abYcd"]), b"a", b"bY.a", b"bYc"),  # which was made before
        (StructuredOutput(choice=["abXcd", "abYcd"]), b"a", b"bZ.a", b"b"),  # as none can be made here
        (StructuredOutput(regex="[ab]{2,9}"), b"a", b"abbaba", b"babab"),
        (StructuredOutput(regex="[ab]{2,9}"), b"a", b"a", b""),
    ],
)
def test_drafts_are_what_must_follow_or_followed_before(form: StructuredOutput, said: bytes, before: bytes, text: bytes) -> None:
    matcher = matcher_of(form, said)
    allowed = matcher.allowed.copy()
    (made,) = draft(to_draft(matcher, 5, before))
    assert bytes(made.drafts) == text
    assert len(made.allowed) == len(made.drafts) + 1
    for place in range(len(made.allowed)):
        fresh = matcher_of(form, said + text[:place])
        assert not fresh.complete
        np.testing.assert_array_equal(made.allowed[place], fresh.allowed)
    np.testing.assert_array_equal(matcher.allowed, allowed)
    assert matcher.take((text or b"b")[0]) or matcher.complete  # it stands where it stood


def test_many_at_once_have_each_its_own() -> None:
    forms = [StructuredOutput(choice=[text]) for text in ("abcdefgh", "axyz", "aQ", "a1234567")]
    most = [5, 5, 5, 0]
    made = draft(*(to_draft(matcher_of(form, b"a"), count, b"a") for form, count in zip(forms, most, strict=True)))
    assert [bytes(one.drafts) for one in made] == [b"bcdef", b"xy", b"", b""]
    assert draft() == []


def test_what_may_not_yet_be_said_is_no_draft() -> None:
    form = StructuredOutput(regex="[abc]{9}")
    for least, text in ((0, b"bca"), (3, b"bca"), (4, b"bc"), (9, b"bc")):
        matcher = matcher_of(form, b"a", min_tokens=least, stop_token_ids=[ord("a")])
        (made,) = draft(to_draft(matcher, 3, b"abca"))
        assert bytes(made.drafts) == text


def test_only_one_token() -> None:
    for ids, only in (([], None), ([0], 0), ([31], 31), ([95], 95), ([3, 4], None), ([3, 35], None), ([31, 63], None)):
        matcher = matcher_of(StructuredOutput(regex="[ab]+"))
        bits = np.zeros(VOCAB, np.uint8)
        bits[ids] = 1
        matcher.allowed = np.packbits(bits, bitorder="little").view(np.int32)
        assert matcher.only_token() == only
        assert [token for token in range(VOCAB) if matcher.allows(token)] == ids
