"""`StructuredOutput`: the form that an output must have. Host only: knows neither JAX, nor the tokenizer, nor how it is enforced.

Values are checked here for their kind and size. Whether a schema or grammar can be compiled is told when the request is added, by
`llmjax.engine.grammar`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.errors import RequestError

MAX_GRAMMAR_CHARS = 65536
MAX_GRAMMAR_LINES = 1000  # a rule is a line, and rules that lead to one another are compiled by recursion
MAX_CHOICES = 1000

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What an output must be: exactly one of the first five.

    Attributes:
        json_object: any JSON object.
        json_schema: JSON that a JSON Schema allows, given as an object or as its text; kept as text. Properties come in the
            order in which the schema names them.
        regex: text that matches as a whole: Rust's syntax, so without look-around and back-references.
        choice: one of these texts.
        grammar: a context-free grammar in llguidance's Lark syntax (it begins at the rule `start`), or in llama.cpp's GBNF (at
            `root`).
        any_whitespace: JSON may have whitespace between its tokens; False allows none.
        lenient: keywords of a schema that cannot be enforced are ignored instead of refused.
        field: what the caller calls this, for messages; no part of equality.

    Raises `RequestError`, with `field` as its `param`.
    """

    json_object: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    any_whitespace: bool = True
    lenient: bool = False
    field: str = dataclasses.field(default="structured", compare=False)

    def __post_init__(self) -> None:
        for name in ("json_object", "any_whitespace", "lenient"):
            if not isinstance(getattr(self, name), bool):
                raise self.error(f"{name} must be true or false, got {getattr(self, name)!r:.60}")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise self.error(f"give exactly one of {', '.join(KINDS)}; got {', '.join(given) or 'none'}")
        put = object.__setattr__
        if self.json_schema is not None:
            put(self, "json_schema", self._schema(self.json_schema))
        if self.choice is not None:
            put(self, "choice", self._choice(self.choice))
        for name in ("regex", "grammar"):
            if (text := getattr(self, name)) is not None:
                self._text(name, text)
        if self.grammar is not None and self.grammar.count("\n") >= MAX_GRAMMAR_LINES:
            raise self.error(f"a grammar has at most {MAX_GRAMMAR_LINES} lines: make it smaller")

    @property
    def kind(self) -> str:
        """The name of the one that was given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def schema_text(self) -> str:
        """`json_schema` as JSON text."""
        assert isinstance(self.json_schema, str)
        return self.json_schema

    @property
    def choices(self) -> tuple[str, ...]:
        """`choice` as a tuple."""
        assert isinstance(self.choice, tuple)
        return self.choice

    def error(self, message: str) -> RequestError:
        """A refusal of this, which names the caller's field once."""
        return RequestError(f"{self.field}: {message}", self.field)

    def _schema(self, value: Any) -> str:
        try:
            schema = json.loads(value) if isinstance(value, str) else value
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise self.error(f"json_schema is not JSON ({why:.200})") from None
        if not isinstance(schema, Mapping):
            raise self.error(f"json_schema must be a JSON object, got {schema!r:.60}")
        return self._text("json_schema", text)

    def _choice(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise self.error(f"choice must be a list of at least one text, got {value!r:.60}")
        if len(value) > MAX_CHOICES:
            raise self.error(f"choice takes at most {MAX_CHOICES} texts, got {len(value)}")
        for item in value:
            if not isinstance(item, str):
                raise self.error(f"choice must hold texts, got {item!r:.60}")
        self._text("choice", "".join(value))
        return tuple(dict.fromkeys(value))

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise self.error(f"{name} must be a text that is not empty, got {value!r:.60}")
        if len(value) > MAX_GRAMMAR_CHARS:
            raise self.error(f"{name} has {len(value)} characters, at most {MAX_GRAMMAR_CHARS} are taken: make it smaller")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.error(f"{name} has a lone surrogate, which is half of a character: send the whole one") from None
        return value
