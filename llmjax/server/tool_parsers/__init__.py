"""How models write function calls: the known formats, which of them a chat template teaches, and the parser for all of them.

    from llmjax.server.tool_parsers import HERMES, parse_calls

    content, calls = parse_calls(output.text, HERMES)

Pure: text in, content and calls out.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from llmjax.server.tool_parsers.parser import CallDelta, CallFormat, Parsed, ToolParser

__all__ = [
    "FORMATS",
    "HERMES",
    "LLAMA",
    "TOOL_PARSERS",
    "CallDelta",
    "CallFormat",
    "Parsed",
    "ToolParser",
    "ToolParserName",
    "format_of",
    "parse_calls",
]

# Qwen 2.5 and 3, the Hermes models and many others. Models of this family sometimes write a brace too many at the end.
HERMES = CallFormat(
    name="hermes",
    begin="<tool_call>",
    end="</tool_call>",
    bare=False,
    after="}",
    arguments_key="arguments",
    between="\n",
)
# Llama 3.1 to 3.3.
LLAMA = CallFormat(
    name="llama",
    begin="<|python_tag|>",
    end="",
    bare=True,
    after=";",
    arguments_key="parameters",
    between="; ",
)
FORMATS = {form.name: form for form in (HERMES, LLAMA)}
# What a setting may be: a format, or "auto" for the one that the chat template teaches, or "none".
ToolParserName = Literal["auto", "hermes", "llama", "none"]
TOOL_PARSERS: tuple[str, ...] = ("auto", *FORMATS, "none")


def format_of(template: str) -> CallFormat | None:
    """The format that a chat template teaches, told by the texts that it is made of. None for one that is not known."""
    if HERMES.begin in template:
        # Qwen3-Coder and GLM 4.5 put XML, not JSON, between the same markers.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if LLAMA.begin in template or '"parameters": dictionary of argument name' in template:
        return LLAMA
    return None


def parse_calls(text: str, form: CallFormat, names: Collection[str] = ()) -> tuple[str, list[tuple[str, str]]]:
    """A whole output as its content and its calls, each a name and the JSON text of its arguments.

    Args:
        form: how the model writes calls.
        names: the functions that it may call; without markers only these are calls.
    """
    parser = ToolParser(form, names)
    content, calls = "", list[tuple[str, str]]()
    for parsed in (parser.feed(text), parser.finish()):
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                calls.append((delta.name, ""))
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return content, calls
