"""Calls in a model's text: both formats by example, and that no cut of a text changes what is found in it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.server.tool_parsers import FORMATS, HERMES, LLAMA, CallFormat, ToolParser, format_of, parse_calls
from llmjax.server.tool_parsers.parser import MAX_FALSE_STARTS, MAX_HELD

NAMES = ("f", "g", "get_weather")
TRICKY = {
    "path": 'C:\\dir\\"x"',
    "code": "if (a) { b[0] = '}'; }\n\t// </tool_call> <|python_tag|> ; {",
    "text": "漢🔥\u2028é\u0000",
    "deep": [{"a": [[], {}, [1.5e-3, True, None]]}],
    "": {},
}


def pieces_of(text: str, form: CallFormat, pieces: list[str], **options: Any) -> tuple[str, list[list[str]]]:
    """Content and calls, each a name and its arguments, of a text that comes in pieces."""
    assert "".join(pieces) == text
    parser = ToolParser(form, NAMES, **options)
    content, calls = "", list[list[str]]()
    for parsed in (*map(parser.feed, pieces), parser.finish()):
        content += parsed.content
        for delta in parsed.calls:
            if delta.name is not None:
                assert delta.index == len(calls)
                assert not delta.arguments
                calls.append([delta.name, ""])
            else:
                assert delta.arguments
                calls[delta.index][1] += delta.arguments
    return content, calls


def written(form: CallFormat, name: str, arguments: str) -> str:
    body = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": {arguments}}}'
    return f"<tool_call>\n{body}\n</tool_call>" if form is HERMES else body


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_arguments_arrive_as_they_were_written(form: CallFormat, ascii_only: bool) -> None:
    arguments = json.dumps(TRICKY, ensure_ascii=ascii_only)
    both = written(form, "f", arguments) + form.between + written(form, "get_weather", "{}")
    content, calls = parse_calls(both, form, NAMES)
    assert (content, calls) == ("", [("f", arguments), ("get_weather", "{}")])
    assert json.loads(calls[0][1]) == TRICKY


HERMES_CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("just text", "just text", []),
    ("  \n", "  \n", []),
    ("", "", []),
    ("Let me see.\n\n<tool_call>{}</tool_call>", "Let me see.\n\n<tool_call>{}</tool_call>", []),
    ('Let me see.\n\n<tool_call>{"name": "f"}</tool_call>', "Let me see.", [("f", "{}")]),
    ('<tool_call>{"name": "f"}</tool_call>\n Done. ', "\n Done. ", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>\n', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}\n</tool_', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}} what</tool_call>', " what</tool_call>", [("f", "{}")]),
    ('<tool_call>{"arguments": {"a": 1}, "id": [1, "}"], "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": null, "x": -1.5}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>', "", [("unheard_of", "{}")]),
    # a model's line breaks within strings become escapes; all else stays
    ('<tool_call>{"name": "f", "arguments": {"a": "x\ny\t\\\nz"\n}}</tool_call>', "", [("f", '{"a": "x\\ny\\t\\nz"\n}')]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "\\</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a": "\\</tool_call>"}')],
    ),
    # broken before it is certain to be a call: content again, and what follows is still looked at
    ('<tool_call>{"name": f}</tool_call> or so', '<tool_call>{"name": f}</tool_call> or so', []),
    ("<tool_call>{'name': 'f', 'arguments': {}}", "<tool_call>{'name': 'f', 'arguments': {}}", []),
    ("<tool_call>\n{\"name\": \"f\", \"arguments\": {'a': 1}}", "<tool_call>\n{\"name\": \"f\", \"arguments\": {'a': 1}}", []),
    ('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
    ('<tool_call>{"name": "f", "arguments": "[1]"}', '<tool_call>{"name": "f", "arguments": "[1]"}', []),
    ('<tool_call>{"name": "f",}', '<tool_call>{"name": "f",}', []),
    ('<tool_call>{"name": ""}', '<tool_call>{"name": ""}', []),
    ('<tool_call>{"name": "\\ud800"}', '<tool_call>{"name": "\\ud800"}', []),
    ('<tool_call>{"name": "f", "name": "g"}', '<tool_call>{"name": "f", "name": "g"}', []),
    ('<tool_call>{"arguments": {"a": 1}}', '<tool_call>{"arguments": {"a": 1}}', []),
    ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    (' <tool_call>{"x": <tool_call>{"name": "f"}</tool_call>', ' <tool_call>{"x":', [("f", "{}")]),
    (' <tool_call>{"x": "<tool_call>{"name": "f"}', ' <tool_call>{"x": "', [("f", "{}")]),
    ("a <tool_call <<tool_cal", "a <tool_call <<tool_cal", []),
    # broken afterwards: what there is belongs to the arguments, up to the end mark
    ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> x', " x", [("f", '{"a": 1')]),
    ('<tool_call>{"name": "f", "arguments": {"a": <</tool_call>', "", [("f", '{"a": <')]),
    ('<tool_call>{"name": "f", "arguments": {"a": </tool', "", [("f", '{"a": </tool')]),
    ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>', "", [("f", '{"a": "</tool_call>')]),
]  # fmt: skip
LLAMA_CASES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("just text", "just text", []),
    ("{", "{", []),
    ('\n{"name": "f", "parameters": {"a": 1}}\n', "", [("f", '{"a": 1}')]),
    ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"};', "", [("f", "{}"), ("g", "{}")]),
    ('{"name": "f"};<|python_tag|>{"name": "other"}', "", [("f", "{}"), ("other", "{}")]),
    ('Sure.\n<|python_tag|>{"name": "f", "parameters": {}}', "Sure.", [("f", "{}")]),
    # JSON that is an answer stays one
    (' {"name": "Ann", "parameters": {}}', ' {"name": "Ann", "parameters": {}}', []),
    ('{"a": {"name": "f"}}', '{"a": {"name": "f"}}', []),
    ('I would use {"name": "f", "parameters": {}}', 'I would use {"name": "f", "parameters": {}}', []),
    ('{"name": "f"}; {"name": "Ann"}', '; {"name": "Ann"}', [("f", "{}")]),
    ('{"name": "f"} and more', " and more", [("f", "{}")]),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ('{"name": "f", "parameters": {"a": <', "", [("f", '{"a": <')]),
]
CASES = [*((HERMES, *case) for case in HERMES_CASES), *((LLAMA, *case) for case in LLAMA_CASES)]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES, ids=[f"{case[0].name}-{case[1]!a:.60}" for case in CASES])
def test_by_example_whole_and_a_character_at_a_time(
    form: CallFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse_calls(text, form, NAMES) == (content, calls)
    assert pieces_of(text, form, list(text)) == (content, [list(call) for call in calls])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
SHARDS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "{", "}", '"', "\\", ",", ":", ";", "[", "]", "\n", " ",
     '"name"', '"f"', '"arguments"', '"parameters"', '{"name": "f", "arguments": {', '{"name":"g"}', "🔥", "1", "null"]
)  # fmt: skip


@st.composite
def outputs(draw: st.DrawFn) -> tuple[CallFormat, str]:
    """A format and an output that has well-formed calls, text and shards of calls in any order."""
    form = draw(st.sampled_from([HERMES, LLAMA]))
    call = st.builds(
        lambda name, arguments, plain: written(form, name, json.dumps(arguments, ensure_ascii=plain)),
        st.sampled_from(NAMES), ARGUMENTS, st.booleans(),
    )  # fmt: skip
    return form, "".join(draw(st.lists(SHARDS | st.text(max_size=5) | call, max_size=9)))


@given(outputs(), st.data())
def test_no_cut_changes_what_is_found(output: tuple[CallFormat, str], data: st.DataObject) -> None:
    form, text = output
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    ends = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(ends)]
    content, calls = pieces_of(text, form, pieces)
    assert (content, calls) == pieces_of(text, form, [text])
    if not calls:
        assert content == text


@given(st.sampled_from([HERMES, LLAMA]), st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3))
def test_calls_come_back_from_what_a_model_writes(form: CallFormat, calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = form.between.join(written(form, name, json.dumps(arguments)) for name, arguments in calls)
    content, found = parse_calls(text, form, NAMES)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_text_and_arguments_are_handed_on_at_once() -> None:
    """Held back is only what may become a call, and nothing of a call that is certain."""
    parser = ToolParser(HERMES)
    assert parser.feed("Hello <b>you</b> ").content == "Hello <b>you</b>"
    assert parser.feed("there <to").content == " there"
    parsed = parser.feed('ol_call>{"name": "f", "arguments": { "a": [1, 2], "b')
    assert (parsed.content, [(delta.name, delta.arguments) for delta in parsed.calls]) == (
        "", [("f", ""), (None, '{ "a": [1, 2], "b')],
    )  # fmt: skip
    assert [delta.arguments for delta in parser.feed('": "x</tool_call>y').calls] == ['": "x</tool_call>y']


def test_an_answer_in_json_is_not_held_back_for_long() -> None:
    for text in ('{"a"', '{"name": "Ann"', '\n{"type": "x", "name": "Ann"'):
        parser = ToolParser(LLAMA, NAMES)
        assert parser.feed(text[:-1]).content == ""
        assert parser.feed(text[-1]).content == text


def test_calls_beyond_the_limit_are_left_out() -> None:
    text = "a" + written(HERMES, "f", "{}") + written(HERMES, "g", '{"b": 1}') + "c"
    assert pieces_of(text, HERMES, [text], max_calls=1) == ("ac", [["f", "{}"]])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}return JSON within <tool_call></tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=a>{% endif %}", None),
        ("{% if tools %}<tool_call>name\n<arg_key>a</arg_key>{% endif %}", None),
        ('{{ "{\\"name\\"..." }}{{ "<|python_tag|>" + code }}', "llama"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.', "llama"),
        ("{{ messages[0].content }}", None),
        ("[TOOL_CALLS]", None),
    ],
)
def test_a_template_tells_the_format(template: str, name: str | None) -> None:
    form = format_of(template)
    assert (form and form.name) == name


HOSTILE = {
    "calls within calls": '<tool_call>{"x":[' * 2000,
    "calls that break behind their arguments": '<tool_call>{"name":"f","arguments":{},' * 2000,
    "white space": " " * 40_000 + "{" + "\n" * 40_000,
    "white space behind a call": '{"name": "f", "parameters": {}}' + "; \n" * 20_000 + "x",
    "white space before a call": "x" + " " * 9_000 + '<tool_call>{"name": "f", "arguments": {}}</tool_call>' + " " * 9_000 + "x",
    "members behind arguments": '<tool_call>{"name":"f","arguments":{},"x":"' + "y" * 60_000,
    "arguments before a name": '<tool_call>{"arguments":{"x":"' + "y" * 60_000 + '"},"name":"f"}',
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_held_back_and_read_again_is_bounded(form: CallFormat, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, longest = itertools.count(), 0

    def counted(real: Any) -> Any:
        def step(parser: ToolParser, char: str) -> str:
            nonlocal longest
            next(steps)
            longest = max(longest, len(parser._held))
            return str(real(parser, char))

        return step

    for name in ("_add_text", "_add_to_call", "_add_after"):
        monkeypatch.setattr(ToolParser, name, counted(getattr(ToolParser, name)))
    whole = pieces_of(text, form, [text])
    assert next(steps) <= len(text) + MAX_FALSE_STARTS * (MAX_HELD + 1)
    assert longest <= 2 * MAX_HELD  # white space before what may be a call counts by itself
    pieces = ["".join(part) for part in itertools.batched(text, 7)]
    assert pieces_of(text, form, pieces) == whole
    if not whole[1]:
        assert whole[0] == text


def test_a_call_is_found_until_too_many_were_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    false = "<tool_call>none "
    assert parse_calls(false * (MAX_FALSE_STARTS - 1) + call, HERMES)[1] == [("f", "{}")]
    text = false * MAX_FALSE_STARTS + call
    assert parse_calls(text, HERMES) == (text, [])
