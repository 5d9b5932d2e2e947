"""What sort of text a prompt is, told from its looks: requests of one sort are expected to be drafted alike. Host only.

A guess that only chooses what is expected of a request before anything is known of it. Nothing is read beyond the end of the
prompt, where the question stands: what comes before it (instructions, a template) is often shared by all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from llmjax.engine.tokenizer import Tokenizer

PromptClass = Literal["code", "json", "cjk", "prose", "tokens", "structured"]
UNKNOWN: PromptClass = "tokens"
"""Of a prompt without a text."""
FORM: PromptClass = "structured"
"""Of any prompt whose answer must have a form: that decides more than the prompt does, and others draft for it."""

_CHARACTERS = 1000
_TOKENS = 256
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_JSON = re.compile(r"\bjson\b|\"[^\"\n]{1,60}\"\s*:|^\s*[\[{]\s*$", re.IGNORECASE | re.MULTILINE)
_CODE = re.compile(
    r"```|\b(?:def|class|function|fn|func|struct|enum|impl|interface)\s+\w+\s*[({:<]|\b(?:import|from|using|package)\s+[\w.]+;?$"
    r"|^\s*(?:#include|//|/\*|@\w+|public |private |static |const |let |var |return\b|SELECT\b|if\s*\()"
    r"|\b(?:write|implement|fix|refactor|debug|explain)\b[^.\n]{0,40}\b(?:function|class|script|program|method|query|code)\b"
    r"|[;{}]\s*$|\b(?:python|java|javascript|typescript|golang|rust|sql|c\+\+|bash|regex)\b",
    re.IGNORECASE | re.MULTILINE,
)
_FEW = 2
"""Marks of code or JSON that are enough; a fence, a language's name or a definition may be the only one in a short question."""
_SHORT = 300


def class_of(text: str | None, ids: Sequence[int], tokenizer: Tokenizer | None) -> PromptClass:
    """The class of a prompt, from its text or, without one, from the end of its ids."""
    if text is None and tokenizer is not None:
        text = tokenizer.decode(list(ids[-_TOKENS:]), skip_special_tokens=True)
    return UNKNOWN if text is None else class_of_text(text)


def class_of_text(text: str) -> PromptClass:
    """The class of a text, from its end. Deterministic, and well under a millisecond."""
    end = text[-_CHARACTERS:]
    letters = sum(map(str.isalpha, end))
    if letters and len(_CJK.findall(end)) > 0.3 * letters:
        return "cjk"
    enough = 1 if len(end) < _SHORT else _FEW
    json, code = len(_JSON.findall(end)), len(_CODE.findall(end))
    if json >= enough and json >= code:
        return "json"
    return "code" if code >= enough else "prose"
