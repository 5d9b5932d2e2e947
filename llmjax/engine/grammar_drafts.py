"""Drafts for outputs that must keep to a form, and a mask for each place of them. Host only: numpy, no JAX.

A mask depends on all tokens before it, and grammars are the host's: so are the drafts of such outputs, which must be known before
the launch. Where the form leaves one token, that is the draft, and is right; where it leaves several, it is what prompt lookup
finds, if the form allows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from llmjax.engine.grammar import GrammarCompiler, GrammarMatcher
from llmjax.engine.prompt_lookup import PromptLookup


@dataclasses.dataclass(slots=True)
class FormDrafts:
    """Drafts of one output, and the masks of the next token and of the one behind each draft: int32 [W], one more than drafts.

    No draft completes the output: some token follows each, so that every mask allows one.
    """

    drafts: list[int]
    allowed: list[np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class FormToDraft:
    """An output that is to have at most `most` drafts; `lookup` has all its tokens."""

    matcher: GrammarMatcher
    lookup: PromptLookup
    most: int


def draft_forms(compiler: GrammarCompiler, forms: Sequence[FormToDraft], *, shortest: int, longest: int) -> list[FormDrafts]:
    """Drafts of each output, in the same order. The matchers stay where they stand; `shortest` and `longest` are of the lookup.

    Place by place for all of them, so that the masks of a place can be found side by side.
    """
    made = [FormDrafts([], [form.matcher.allowed]) for form in forms]
    matchers = [form.matcher for form in forms]
    drafting = list(range(len(forms)))
    while drafting:
        tried: list[tuple[int, int, GrammarMatcher]] = []
        for index in drafting:
            form, drafts, matcher = forms[index], made[index].drafts, matchers[index]
            if len(drafts) == form.most:
                continue
            token = matcher.only_token()
            if token is None:
                token = form.lookup.next(drafts, shortest=shortest, longest=longest)
            if token is None or not matcher.allows(token):
                continue
            ahead = matcher if drafts else matcher.copy()
            if ahead.take(token):
                tried.append((index, token, ahead))
        compiler.fill([ahead for _, _, ahead in tried])
        going = [entry for entry in tried if not entry[2].complete and entry[2].error is None]
        for index, token, ahead in going:
            made[index].drafts.append(token)
            made[index].allowed.append(ahead.allowed)
            matchers[index] = ahead
        drafting = [index for index, _, _ in going]
    return made
