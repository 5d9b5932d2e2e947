"""The OpenAI request bodies, read: JSON in, checked prompts and `SamplingParams` out. Host only: no HTTP, no JAX, no tokenizer.

Serves the HTTP endpoints and the batch runner alike, so that a batch line means what the same body means over HTTP.
What depends on the model (ids against the vocabulary, the context) is checked when the engine takes the request.

Rules
- Every mistake is a `RequestError` whose `param` names the field as the client wrote it. Unknown fields are mistakes: a misspelt
  `max_new_tokens` that has no effect is worse than an error. A field that is null counts as absent.
- Text must be encodable as UTF-8: a lone surrogate is refused, U+0000 is an ordinary character.
- `max_tokens: 0` scores a prompt: it needs `echo` (completions) or `prompt_logprobs`.
- `seed` is shared by all prompts of a body; choice i of a prompt depends on (seed, i).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any, Literal

from llmjax.errors import RequestError
from llmjax.sampling_params import SamplingParams
from llmjax.server import structured_fields
from llmjax.server.prompts import Prompt, encodable, read_messages, read_prompts
from llmjax.server.strict_json import kind, printable
from llmjax.server.tool_calls import ToolUse, read_tools

Endpoint = Literal["completions", "chat"]

ENDPOINTS: dict[str, Endpoint] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
MAX_CHOICES = 1024

_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams)) - {"structured"}  # has other names here
_COMMON = _SAMPLING | structured_fields.NAMES | {"model", "max_completion_tokens", "stream", "stream_options"}
_FIELDS: dict[Endpoint, frozenset[str]] = {
    "completions": _COMMON | {"prompt", "echo", "add_special_tokens"},
    "chat": _COMMON | {"messages", "top_logprobs", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls"},
}
# Accepted and without effect here: bookkeeping of the caller's own.
_BOOKKEEPING = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# Known to clients, not implemented: only values that ask for nothing pass.
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "length_penalty": (1, 1.0),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
}
_INSTEAD = {"functions": "it is the old form of tools, use that", "function_call": "it is the old form of tool_choice, use that"}
# What a template is rendered with anyway; setting it here would mean something else than the same field of the body.
_NOT_FOR_TEMPLATES = frozenset(
    ("arrival_ns", "group", "messages", "params", "priority", "request_id", "self", "template", "tools", "wake")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A checked body.

    Attributes:
        endpoint: which API it was sent to.
        prompts: completions: one or more texts or lists of token ids, in order; empty for chat.
        messages: chat: the conversation, contents as plain text; empty for completions.
        params: sampling settings of every prompt. With `echo`, logprobs are asked for the prompt too.
        model: the name the client asked for, None when it named none. Whether it is served is not checked here.
        stream, include_usage, continuous_usage: send events; and a last one with the usage; and the usage so far with each.
        echo: the answer's text starts with the prompt.
        add_special_tokens: put the tokenizer's own special tokens (such as a beginning of sequence) around text prompts.
        prompt_logprobs_asked: the body itself asked for `prompt_logprobs`, so the answer carries them.
        template_options: keyword arguments for the chat template, the tools among them.
        tools: chat: the functions that the answer may call, None for none.
    """

    endpoint: Endpoint
    params: SamplingParams
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    add_special_tokens: bool = True
    prompt_logprobs_asked: bool = False
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: ToolUse | None = None


def parse_request(endpoint: Endpoint, body: Any, defaults: Mapping[str, Any] | None = None) -> ApiRequest:
    """Check a decoded body. `defaults`, by `SamplingParams` field, are for what the body leaves out. Raises `RequestError`."""
    if not isinstance(body, Mapping):
        raise RequestError(f"the body must be a JSON object, got {kind(body)}")
    fields = _with_defaults(endpoint, body, defaults or {})
    _check_names(endpoint, fields)
    stream = _flag(fields, "stream", False)
    common: dict[str, Any] = {
        "endpoint": endpoint,
        "model": _text(fields, "model"),
        "stream": stream,
        "include_usage": _stream_option(fields, stream, "include_usage"),
        "continuous_usage": _stream_option(fields, stream, "continuous_usage_stats"),
        "prompt_logprobs_asked": "prompt_logprobs" in fields,
    }
    if endpoint == "completions":
        echo = _flag(fields, "echo", False)
        prompts = read_prompts(fields.get("prompt"))
        params = _sampling(endpoint, fields, echo=echo)
        if len(prompts) * params.n > MAX_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts times n {params.n} is above {MAX_CHOICES} choices: send fewer at once", "n"
            )
        add_special_tokens = _flag(fields, "add_special_tokens", True)
        return ApiRequest(**common, prompts=prompts, echo=echo, add_special_tokens=add_special_tokens, params=params)
    tools = read_tools(fields)
    return ApiRequest(
        **common,
        messages=read_messages(fields.get("messages")),
        params=_sampling(endpoint, fields),
        template_options=read_template_options(fields) | ({"tools": list(tools.tools)} if tools is not None else {}),
        tools=tools,
    )


def read_template_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The field `chat_template_kwargs` of a body, checked."""
    options = fields.get("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise RequestError(f"chat_template_kwargs must be an object, got {kind(options)}", "chat_template_kwargs")
    for name in options:
        if not name.isidentifier() or name in _NOT_FOR_TEMPLATES:
            raise RequestError(f"chat_template_kwargs cannot set {printable(name)!r}", "chat_template_kwargs")
    return dict(options)


# -- names and plain values


def _with_defaults(endpoint: Endpoint, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in body.items() if value is not None}
    has_limit = "max_tokens" in fields or "max_completion_tokens" in fields
    for name, value in defaults.items():
        if value is None or name in fields or (name == "max_tokens" and has_limit):
            continue
        fields[name] = value
        if name == "logprobs" and endpoint == "chat":
            fields |= {"logprobs": True, "top_logprobs": value}
    return fields


def _check_names(endpoint: Endpoint, fields: Mapping[str, Any]) -> None:
    known = _FIELDS[endpoint] | _BOOKKEEPING
    for name, value in fields.items():
        if name in known:
            continue
        if name == "best_of":
            if value != fields.get("n", 1):
                raise RequestError("best_of is not supported apart from n: leave it out", name)
        elif name in _ASKS_NOTHING:
            if value not in _ASKS_NOTHING[name]:
                raise RequestError(f"{name} is not supported: {_INSTEAD.get(name, 'leave it out')}", name)
        else:
            raise _unknown(name, known)


def known_fields(endpoint: Endpoint) -> frozenset[str]:
    """Names that have a meaning in a body of this endpoint."""
    return _FIELDS[endpoint]


def values_without_effect() -> dict[str, tuple[Any, ...] | None]:
    """Names that are accepted and mean nothing here, with the values that may be given; None: any value."""
    return {**_ASKS_NOTHING, **dict.fromkeys(_BOOKKEEPING)}


def unknown_fields(endpoint: Endpoint, body: Mapping[str, Any]) -> list[str]:
    """Names in a body that mean nothing to this endpoint, null or not; `parse_request` refuses those that are not null."""
    known = _FIELDS[endpoint] | _BOOKKEEPING | _ASKS_NOTHING.keys() | {"best_of"}
    return [name for name in body if name not in known]


def _unknown(name: str, known: Collection[str]) -> RequestError:
    near = ["max_tokens"] if name in ("max_new_tokens", "num_predict") else difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RequestError(f"unknown field {printable(name)!r}{hint}", printable(name))


def _flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {kind(value)}", name)
    return value


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string, got {kind(value)}", name)
    return encodable(value, name)


def _stream_option(fields: Mapping[str, Any], stream: bool, wanted: str) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping):
        raise RequestError(f"stream_options must be an object, got {kind(options)}", "stream_options")
    if not stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    for name, value in options.items():
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise RequestError(f"unknown field {printable(name)!r} in stream_options", "stream_options")
        if not isinstance(value, bool | None):
            raise RequestError(f"stream_options.{name} must be true or false, got {kind(value)}", "stream_options")
    return bool(options.get(wanted))


# -- sampling


def _sampling(endpoint: Endpoint, fields: Mapping[str, Any], *, echo: bool = False) -> SamplingParams:
    kwargs = {name: fields[name] for name in _SAMPLING if name in fields}
    limit = _put_limit(kwargs, fields, endpoint)
    if endpoint == "chat":
        kwargs["logprobs"] = _chat_logprobs(fields)
    if echo and kwargs.get("prompt_logprobs") is None:
        # With nothing to generate the engine must be asked for the prompt's logprobs, or it had nothing to do.
        kwargs["prompt_logprobs"] = kwargs.get("logprobs", 0 if kwargs["max_tokens"] == 0 else None)
    if kwargs["max_tokens"] == 0 and not isinstance(kwargs["max_tokens"], bool) and kwargs.get("prompt_logprobs") is None:
        how = "prompt_logprobs" if endpoint == "chat" else "echo, or prompt_logprobs"
        raise RequestError(f"{limit} is 0: ask for at least 1 token, or for {how}", limit)
    for text in kwargs["stop"] if isinstance(kwargs.get("stop"), list) else [kwargs.get("stop")]:
        if isinstance(text, str):
            encodable(text, "stop")
    kwargs["structured"] = structured_fields.read_structured(fields)
    try:
        return SamplingParams(**kwargs)
    except RequestError as error:
        ours = str(error.param)
        theirs = {"max_tokens": limit, "logprobs": "top_logprobs" if endpoint == "chat" else "logprobs"}.get(ours, ours)
        raise RequestError(str(error).replace(ours, theirs, 1), theirs) from None


def _put_limit(kwargs: dict[str, Any], fields: Mapping[str, Any], endpoint: Endpoint) -> str:
    """Settle `max_tokens`; returns the name that the client used for it."""
    kwargs.setdefault("max_tokens", None if endpoint == "chat" else 16)
    if "max_completion_tokens" not in fields:
        return "max_tokens"
    if "max_tokens" in fields and fields["max_tokens"] != fields["max_completion_tokens"]:
        raise RequestError("max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    kwargs["max_tokens"] = fields["max_completion_tokens"]
    return "max_completion_tokens"


def _chat_logprobs(fields: Mapping[str, Any]) -> Any:
    wanted = _flag(fields, "logprobs", False)
    if "top_logprobs" in fields and not wanted:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    return fields.get("top_logprobs", 0) if wanted else None
