"""What a body asks to be continued: `prompt` and `messages`, checked. Knows nothing of sampling or HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.errors import RequestError
from llmjax.server.strict_json import kind

Prompt = str | list[int]

MAX_PROMPTS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


def read_prompts(value: Any) -> tuple[Prompt, ...]:
    """The prompts of a completions body: a string, token ids, or a list of either. An error names the bad element's index."""
    if value is None:
        raise RequestError("prompt is missing: give a string, or a list of token ids", "prompt")
    if isinstance(value, str):
        return (encodable(value, "prompt"),)
    if not isinstance(value, list):
        raise RequestError(
            f"prompt must be a string, a list of strings, of token ids, or of lists of token ids, got {kind(value)}", "prompt"
        )
    if not value:
        raise RequestError("prompt is an empty list: give at least one token", "prompt")
    if not isinstance(value[0], str | list):
        return (_token_ids(value, "prompt"),)
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(value)} prompts, at most {MAX_PROMPTS} are taken at once", "prompt")
    texts = isinstance(value[0], str)
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        where = f"prompt[{index}]"
        if texts and isinstance(item, str):
            prompts.append(encodable(item, where, "prompt"))
        elif not texts and isinstance(item, list):
            prompts.append(_token_ids(item, where))
        else:
            raise RequestError(
                f"{where} must be {'a string' if texts else 'a list of token ids'} like prompt[0], got {kind(item)}", "prompt"
            )
    return tuple(prompts)


def _token_ids(items: list[Any], where: str) -> list[int]:
    if not items:
        raise RequestError(f"{where} is an empty list: give at least one token", "prompt")
    for index, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int):
            raise RequestError(f"{where}[{index}] must be a token id, got {kind(item)}", "prompt")
        if not 0 <= item < 2**31:
            raise RequestError(f"{where}[{index}] is {item!s:.40}, which is no token id", "prompt")
    return items


def read_messages(value: Any) -> tuple[dict[str, Any], ...]:
    """The messages of a chat body, with null fields left out and contents as plain text. Raises `RequestError`.

    An assistant's content beside tool calls may be absent; it is None then, which templates tell from "".
    """
    if not isinstance(value, list):
        what = "is missing" if value is None else f"must be a list, got {kind(value)}"
        raise RequestError(f"messages {what}: give a list of objects with role and content", "messages")
    if not value:
        raise RequestError("messages is empty: give at least one", "messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {kind(value)}", "messages")
    message = {name: item for name, item in value.items() if item is not None}
    for name in message:
        if name == "function_call":
            raise RequestError(f"{where}.function_call is the old form, which is not supported: use tool_calls", "messages")
        if name not in _MESSAGE_FIELDS:
            raise RequestError(f"{where} has an unknown field {name!a:.80}", "messages")
    role = message.get("role")
    if role == "function":
        raise RequestError(f"{where}.role function is the old form, which is not supported: use tool, and tools", "messages")
    if role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}", "messages")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in message and not isinstance(message[name], str):
            raise RequestError(f"{where}.{name} must be a string, got {kind(message[name])}", "messages")
    if "content" not in message and not (role == "assistant" and message.get("tool_calls")):
        raise RequestError(f"{where}.content is missing: give a string", "messages")
    message["content"] = _content(message["content"], f"{where}.content") if "content" in message else None
    check_encodable(message, where, "messages")
    if "tool_calls" in message:
        _check_calls(message["tool_calls"], f"{where}.tool_calls")
    return message


def _content(value: Any, where: str) -> str:
    """A text, or a list of text parts, which are joined without anything between."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a string or a list of text parts, got {kind(value)}", "messages")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            sort = part.get("type") if isinstance(part, Mapping) else kind(part)
            raise RequestError(f"{where}[{index}] is {sort!a:.40}: only parts of type text are supported", "messages")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{index}].text must be a string", "messages")
        texts.append(part["text"])
    return "".join(texts)


def _check_calls(calls: Any, where: str) -> None:
    """The calls that an assistant made. Their arguments may be any text: a model wrote them."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list, got {kind(calls)}", "messages")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{index}] must be an object with id, type and function, which has a name", "messages")
        if not isinstance(function.get("arguments", ""), str | Mapping):
            raise RequestError(f"{where}[{index}].function.arguments must be a string of JSON", "messages")


def check_encodable(value: Any, where: str, param: str) -> None:
    """Raises `RequestError` for a text anywhere in a JSON value that UTF-8 cannot carry."""
    stack: list[Any] = [value]  # not by recursion: it may be nested as deep as JSON goes
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            encodable(value, where, param)
        elif isinstance(value, Mapping):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            stack += value


def encodable(text: str, where: str, param: str | None = None) -> str:
    """`text` itself, if UTF-8 can carry it; else a `RequestError` that names `where` and the character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} has a lone surrogate (\\u{ord(text[error.start]):04x}) at character {error.start}: it is not Unicode text",
            param or where,
        ) from None
    return text
