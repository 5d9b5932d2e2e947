"""The bodies of the API as JSON schemas: what a request may hold, and what an answer holds. Knows no routes and no HTTP.

Bounds come from where they are enforced, the names of fields from the protocol, so that neither is written twice. What a schema
cannot say (two fields that exclude each other, token ids below the size of the vocabulary) is in the descriptions.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from typing import Any

from llmjax import sampling_params as limits
from llmjax import structured_output as forms
from llmjax.engine.health import State
from llmjax.engine.outputs import CompletionOutput
from llmjax.server.prompts import MAX_PROMPTS, ROLES
from llmjax.server.protocol import MAX_CHOICES, Endpoint, known_fields, values_without_effect
from llmjax.server.tool_calls import MAX_TOOLS

Schema = dict[str, Any]

_INT32 = 2**31 - 1
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_NON_EMPTY: Schema = {"type": "string", "minLength": 1}
_ID: Schema = {"type": "integer", "minimum": 0, "maximum": _INT32, "description": "Token id, below the vocabulary's size."}
IDS: Schema = {"type": "array", "items": _ID}
_PROMPT_IDS: Schema = {**IDS, "minItems": 1}


def ref(name: str) -> Schema:
    """A reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def optional(schema: Schema) -> Schema:
    """The same, or null, which counts as absent."""
    if "enum" in schema:
        schema = {**schema, "enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {"anyOf": [schema, {"type": "null"}]} if "$ref" in schema else schema


def record(properties: dict[str, Schema], *, required: Iterable[str] | None = None, more: bool = False, **other: Any) -> Schema:
    """An object. All properties are required unless told; no others are there unless `more`."""
    names = list(properties if required is None else required)
    schema: Schema = {"type": "object", "properties": properties, **other}
    if names:
        schema["required"] = names
    if not more:
        schema["additionalProperties"] = False
    return schema


def _array(items: Schema, **other: Any) -> Schema:
    return {"type": "array", "items": items, **other}


def _range(kind: Schema, low: float, high: float, description: str) -> Schema:
    return {**kind, "minimum": low, "maximum": high, "description": description}


def _told(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


# -- requests

_FUNCTION = record(
    {
        "name": {**STRING, "pattern": "^[A-Za-z0-9_-]{1,64}$"},
        "description": optional(STRING),
        "parameters": _told(optional(OBJECT), "JSON schema of an object. Default: one without properties."),
        "strict": _told(optional(BOOLEAN), "The arguments keep to the schema; a keyword that cannot be enforced is an error."),
    },
    required=("name",),
    more=True,
)
_NAMED = record({"type": {"const": "function"}, "function": record({"name": STRING}, more=True)}, more=True)
_CHOICE = {**_array(_NON_EMPTY, minItems=1, maxItems=forms.MAX_CHOICES), "description": "The output is one of these."}
_PATTERN = {**_NON_EMPTY, "maxLength": forms.MAX_GRAMMAR_CHARS}
_REGEX = _told(_PATTERN, "The output matches as a whole; Rust's syntax, no look-around.")
_GRAMMAR = _told(_PATTERN, "The output is of this grammar: llguidance's Lark, or GBNF.")
_SCHEMA = _told(OBJECT, "The output is JSON of this JSON schema.")

_FIELDS: dict[str, Schema] = {
    "prompt": {
        "anyOf": [
            _NON_EMPTY,
            _PROMPT_IDS,
            _array(_NON_EMPTY, minItems=1, maxItems=MAX_PROMPTS),
            _array(_PROMPT_IDS, minItems=1, maxItems=MAX_PROMPTS),
        ],
        "description": "A text, a list of token ids, or a list of either. Prompt and output fit into the model's context.",
    },
    "messages": _array(ref("Message"), minItems=1, description="The conversation so far."),
    "stream": _told(BOOLEAN, "Answer with server-sent events."),
    "stream_options": record(
        {
            "include_usage": _told(optional(BOOLEAN), "A last chunk with the usage."),
            "continuous_usage_stats": _told(optional(BOOLEAN), "The usage so far with every chunk."),
            "include_obfuscation": optional(BOOLEAN),
        },
        required=(),
        description="Only with stream: true.",
    ),
    "echo": _told(BOOLEAN, "Begin the text, and the logprobs, with the prompt."),
    "add_special_tokens": _told(BOOLEAN, "Put the tokenizer's own special tokens around a text prompt. Default true."),
    "chat_template_kwargs": _told(OBJECT, "Variables for the chat template, named as Python names variables."),
    "n": _range(INTEGER, 1, limits.MAX_CHOICES, f"Choices a prompt; of all prompts together at most {MAX_CHOICES}."),
    "best_of": _told(INTEGER, "Only with the value of n."),
    "max_tokens": _range(
        INTEGER, 0, _INT32, "New tokens at most. 0 scores the prompt; it needs echo or prompt_logprobs. Default: 16 for "
        "completions, what the context has room for in chat.",
    ),
    "max_completion_tokens": _range(INTEGER, 0, _INT32, "The same as max_tokens; if both are there they are equal."),
    "min_tokens": _range(INTEGER, 0, _INT32, "Nothing ends the output before; at most max_tokens."),
    "temperature": _range(_NUMBER, 0, 100, "0, or anything below 0.001, is greedy. Default 1."),
    "top_k": _range(INTEGER, -1, _INT32, "0 or -1: all."),
    "top_p": {**_NUMBER, "exclusiveMinimum": 0, "maximum": 1, "description": "1: all."},
    "min_p": _range(_NUMBER, 0, 1, "0: all."),
    "repetition_penalty": {
        **_NUMBER, "exclusiveMinimum": 1e-6, "maximum": 1000, "description": "Divides positive logits of tokens seen. Default 1."
    },
    "presence_penalty": _range(_NUMBER, -2, 2, "Taken from logits of tokens in the output."),
    "frequency_penalty": _range(_NUMBER, -2, 2, "The same, once for each time."),
    "logit_bias": {
        **OBJECT,
        "maxProperties": limits.MAX_LOGIT_BIAS,
        "propertyNames": {"pattern": r"^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": {**_NUMBER, "minimum": -100, "maximum": 100},
        "description": "Token id to what is added to its logit.",
    },
    "seed": _range(INTEGER, -(2**63), 2**64 - 1, "The same seed, the same output. Default: a fresh one."),
    "stop": {
        "anyOf": [
            {**STRING, "minLength": 1, "maxLength": limits.MAX_STOP_STRING_CHARS},
            _array(
                {**STRING, "minLength": 1, "maxLength": limits.MAX_STOP_STRING_CHARS}, maxItems=limits.MAX_STOP_STRINGS
            ),
        ],
        "description": "The text ends before the first of these.",
    },
    "stop_token_ids": {**IDS, "maxItems": limits.MAX_STOP_TOKEN_IDS, "description": "Ids that end the output."},
    "include_stop_str_in_output": _told(BOOLEAN, "Keep the stop string at the end of the text."),
    "ignore_eos": _told(BOOLEAN, "The model's own end does not end the output."),
    "logprobs": _range(INTEGER, 0, limits.MAX_LOGPROBS, "Logprobs of the tokens, and of so many alternatives."),
    "top_logprobs": _range(INTEGER, 0, limits.MAX_LOGPROBS, "Alternatives a token; only with logprobs: true."),
    "prompt_logprobs": _range(INTEGER, 0, limits.MAX_LOGPROBS, "The same for the prompt; not with stream: true."),
    "logprobs_mode": {
        "enum": ["raw", "processed"],
        "description": "raw: of the model's own logits; processed: of the distribution that was sampled from. Default raw.",
    },
    "skip_special_tokens": _told(BOOLEAN, "Leave special tokens out of the text. Default true."),
    "tools": _array(
        record({"type": {"const": "function"}, "function": _FUNCTION}, more=True),
        maxItems=MAX_TOOLS,
        description="Functions that the model may call, of different names; the chat template must take them.",
    ),
    "tool_choice": {
        "anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED],
        "description": "Whether a function must be called, and which. Default auto.",
    },
    "parallel_tool_calls": _told(BOOLEAN, "Several calls may be made in one answer. Default true."),
    "response_format": record(
        {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": record(
                {"name": optional(STRING), "description": optional(STRING), "schema": _SCHEMA, "strict": optional(BOOLEAN)},
                required=("schema",),
            ),
        },
        required=("type",),
        description="The form of the output. json_schema is there for that type, and for no other.",
    ),
    "structured_outputs": record(
        {
            "json": _SCHEMA, "regex": _REGEX, "choice": _CHOICE, "grammar": _GRAMMAR, "json_object": {"const": True},
            "disable_any_whitespace": optional(BOOLEAN),
        },
        required=(),
        description="The same, exactly one of the first five.",
    ),
    "guided_json": _SCHEMA,
    "guided_regex": _REGEX,
    "guided_choice": _CHOICE,
    "guided_grammar": _GRAMMAR,
    "cache_salt": {
        **STRING, "minLength": 1, "maxLength": limits.MAX_SALT_CHARS, "description": "Whoever has it shares cached prefixes."
    },
}  # fmt: skip
_CHAT_LOGPROBS = _told(BOOLEAN, "Logprobs of the tokens.")


def request_schema(endpoint: Endpoint, served_names: Sequence[str], *, strict: bool) -> Schema:
    """The body of an endpoint that generates."""
    required = "messages" if endpoint == "chat" else "prompt"
    properties: dict[str, Schema] = {"model": model_name(served_names)}
    names = known_fields(endpoint)
    for name in [required, *sorted(names - {required, "model"})]:
        field = _CHAT_LOGPROBS if (name, endpoint) == ("logprobs", "chat") else _FIELDS.get(name, {})
        properties[name] = field if name == required else optional(field)
    properties["best_of"] = optional(_FIELDS["best_of"])
    for name, values in sorted(values_without_effect().items()):
        if name not in properties:
            properties[name] = {"description": "Not looked at."} if values is None else _idle(values)
    what = "are refused" if strict else "are ignored, and listed in the header x-llmjax-warning"
    return record(
        properties,
        required=[required],
        more=not strict,
        description=f"Fields that are null count as absent; unknown ones {what}.",
    )


def _idle(values: Sequence[Any]) -> Schema:
    return {"enum": [*values, None], "description": "Not supported: only values that ask for nothing are taken."}


def model_name(served_names: Sequence[str]) -> Schema:
    """The field `model` of any body."""
    return {"type": ["string", "null"], "enum": [*served_names, None], "description": f"Default: {served_names[0]}."}


_PART = record({"type": {"const": "text"}, "text": STRING}, more=True)
_CALL = record(
    {"id": STRING, "type": {"const": "function"}, "function": record({"name": STRING, "arguments": STRING})},
    description="A call of a function; the arguments are the text of a JSON object.",
)
_CALL_BACK = record(
    {
        "id": {},
        "type": {},
        "function": record({"name": STRING, "arguments": {"anyOf": [STRING, OBJECT]}}, required=("name",), more=True),
    },
    required=("function",),
    more=True,
    description="A call that an answer made, sent back.",
)
_CALL_PIECE = record(
    {
        "index": {**INTEGER, "minimum": 0},
        "id": STRING,
        "type": {"const": "function"},
        "function": record({"name": STRING, "arguments": STRING}, required=("arguments",)),
    },
    required=("index", "function"),
    description="The first piece of a call has its id, type and name; all have a piece of the arguments.",
)
_MESSAGE_FIELDS: dict[str, Schema] = {
    "name": optional(STRING),
    "tool_call_id": optional(STRING),
    "reasoning_content": optional(STRING),
}
_MESSAGE: Schema = {
    "anyOf": [
        record(
            {
                "role": {"enum": list(ROLES)},
                "content": {"anyOf": [STRING, _array(_PART)]},
                "tool_calls": optional(_array(_CALL_BACK)),
                **_MESSAGE_FIELDS,
            },
            required=("role", "content"),
        ),
        record(
            {
                "role": {"const": "assistant"},
                "tool_calls": _array(_CALL_BACK, minItems=1),
                "content": {"type": "null"},
                **_MESSAGE_FIELDS,
            },
            required=("role", "tool_calls"),
        ),
    ],
    "description": "One message; an assistant's content beside tool calls may be absent.",
}

# -- answers

_FINISH: Schema = {
    "type": "string",
    "enum": [*typing.get_args(typing.get_args(typing.get_type_hints(CompletionOutput)["finish_reason"])[0]), "tool_calls"],
}
_STOP: Schema = {"type": ["string", "integer", "null"], "description": "The stop string or stop id that ended it."}
_LOGPROB = {**_NUMBER, "description": "Nats; minus infinity is -9999."}
_TOKEN = {"token": STRING, "logprob": _LOGPROB, "bytes": _array({**INTEGER, "minimum": 0, "maximum": 255})}
_CHAT_LOGPROBS_ANSWER = record(
    {"content": _array(record({**_TOKEN, "top_logprobs": _array(record(_TOKEN))})), "refusal": {"type": "null"}}
)
_OLD_LOGPROBS = record(
    {
        "tokens": _array(STRING),
        "token_logprobs": _array(optional(_NUMBER)),
        "top_logprobs": _array(optional({**OBJECT, "additionalProperties": _NUMBER})),
        "text_offset": _array({**INTEGER, "minimum": 0}, description="In characters, from the start of the prompt."),
    },
    description="Parallel lists, an entry a token; with echo the prompt's first token has no logprob.",
)
_PROMPT_LOGPROBS = _array(
    optional(
        {
            **OBJECT,
            "additionalProperties": record({"logprob": _LOGPROB, "rank": {**INTEGER, "minimum": 1}, "decoded_token": STRING}),
        }
    ),
    description="An entry a prompt token, null for the first: token id to logprob.",
)
_INDEX = {**INTEGER, "minimum": 0}


def _logprobs(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _whole(answer: dict[str, Schema]) -> Schema:
    """A choice of an answer that was not streamed."""
    properties = {
        "index": _INDEX,
        **answer,
        "finish_reason": _FINISH,
        "stop_reason": _STOP,
        "prompt_logprobs": optional(_PROMPT_LOGPROBS),
    }
    return record(properties, required=[name for name in properties if name != "prompt_logprobs"])


def _piece(answer: dict[str, Schema]) -> Schema:
    """A choice of a chunk; `stop_reason` comes with the last one."""
    properties = {"index": _INDEX, **answer, "finish_reason": optional(_FINISH), "stop_reason": _STOP}
    return record(properties, required=[name for name in properties if name != "stop_reason"])


def _answer(kind: str, choice: Schema, usage: Schema | None = None) -> Schema:
    properties = {
        "id": STRING, "object": {"const": kind}, "created": INTEGER, "model": STRING, "choices": _array(choice)
    }  # fmt: skip
    if usage is not None:
        return record({**properties, "usage": usage})
    return record({**properties, "usage": optional(ref("Usage"))}, required=list(properties))


_ASSISTANT = record(
    {"role": {"const": "assistant"}, "content": optional(STRING), "refusal": {"type": "null"}, "tool_calls": _array(_CALL)},
    required=("role", "content", "refusal"),
)
_DELTA = record({"role": {"const": "assistant"}, "content": optional(STRING), "tool_calls": _array(_CALL_PIECE)}, required=())
_COUNT = {**INTEGER, "minimum": 0}
_CARD = {
    "id": STRING, "object": {"const": "model"}, "created": INTEGER, "owned_by": STRING,
    "max_model_len": _told(INTEGER, "Tokens of prompt and output together."),
}  # fmt: skip


def components() -> dict[str, Schema]:
    """The schemas that bodies refer to, by name."""
    old, chat = _logprobs(_OLD_LOGPROBS), _logprobs(_CHAT_LOGPROBS_ANSWER)
    error = {"message": STRING, "type": STRING, "param": _told(optional(STRING), "The field that is wrong."), "code": STRING}
    usage = {
        "prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT,
        "prompt_tokens_details": record({"cached_tokens": _COUNT}),
    }  # fmt: skip
    return {
        "Message": _MESSAGE,
        "Usage": record(usage, description="Every prompt once, every sampled token."),
        "Completion": _answer("text_completion", _whole({"text": STRING, "logprobs": old}), ref("Usage")),
        "CompletionChunk": _answer("text_completion", _piece({"text": STRING, "logprobs": old})),
        "ChatCompletion": _answer("chat.completion", _whole({"message": _ASSISTANT, "logprobs": chat}), ref("Usage")),
        "ChatCompletionChunk": _answer("chat.completion.chunk", _piece({"delta": _DELTA, "logprobs": chat})),
        "Model": record(_CARD),
        "Models": record({"object": {"const": "list"}, "data": _array(ref("Model"), minItems=1)}),
        "Health": record({"status": {"enum": list(typing.get_args(State))}, "reason": STRING}),
        "Error": record({"error": record(error)}),
    }
