"""`ToolParser`: a model's text, taken apart into what it says and the functions it calls, while it is being written.

The result does not depend on how the text is cut into pieces. Held back is only what may still become the beginning of a call,
and white space that may stand beside one, of both at most `MAX_HELD` characters. What turns out to be no call is content again,
character for character. Pure: no ids, no clock, no HTTP.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Literal

from llmjax.server.tool_parsers.call_object import SPACES, CallObject


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a family of models writes calls.

    Attributes:
        name: what the setting `tool_parser` calls it.
        begin: stands before a call, anywhere in the text.
        end: stands behind it, "" for nothing.
        bare: a call may come without `begin`, at the start of the text or after another call; then it must name a known
            function, so that an answer that is JSON stays an answer.
        after: characters that may stand between a call and `end`, or the next call.
        arguments_key: the member that models of this family write.
        between: what they write between two calls.
    """

    name: str
    begin: str
    end: str
    bare: bool
    after: str
    arguments_key: str
    between: str

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts around a call."""
        return tuple(marker for marker in (self.begin, self.end) if marker)


@dataclasses.dataclass(frozen=True)
class CallDelta:
    """What is new of call number `index`. The first of a call has its name, the others more of its arguments."""

    index: int
    name: str | None
    arguments: str


@dataclasses.dataclass
class Parsed:
    """What a piece of text brought."""

    content: str = ""
    calls: list[CallDelta] = dataclasses.field(default_factory=list)


MAX_HELD = 4096  # characters of what may be a call, or of white space beside one, that are held back
MAX_FALSE_STARTS = 16  # of calls in one output; from there on all is content, because each is read again
_LITERAL = re.compile(r'[^"\\\x00-\x1f]+')
_State = Literal["start", "text", "call", "after"]


class ToolParser:
    """The parser of one output.

    Args:
        form: how the model writes calls.
        names: the known functions.
        max_calls: further calls are left out; None takes all.

    Attributes:
        num_calls: calls found so far.
    """

    def __init__(self, form: CallFormat, names: Collection[str] = (), max_calls: int | None = None) -> None:
        self._form = form
        self._names = frozenset(names)
        self._max_calls = max_calls
        self.num_calls = 0
        self._state: _State = "start" if form.bare else "text"
        self._held = ""  # text that may yet belong to a call; within one that is certain, the beginning of `end`
        self._lead = 0  # how much of it is text again if it does not
        self._bare = False
        self._call = CallObject()
        self._announced = False
        self._said = False  # there was content behind the last call
        self._false_starts = 0
        self._input = ""
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def feed(self, text: str) -> Parsed:
        """Take a piece of the output."""
        self._read(text)
        return self._drain()

    def finish(self) -> Parsed:
        """The output has ended: what was held back."""
        while self._state == "call" and not self._announced:
            self._read(self._give_back())
        if self._state == "call":
            self._pass_on()
        elif not (self.num_calls and self._means_nothing(self._held)):
            self._say(self._held)
        self._held = ""
        return self._drain()

    def _means_nothing(self, held: str) -> bool:
        """Whether this may be left out at the end of an output with calls."""
        if self._state == "text":
            return not held.strip(SPACES) and not self._said
        return self._form.end.startswith(held.lstrip(SPACES + self._form.after))

    def _drain(self) -> Parsed:
        parsed = Parsed("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return parsed

    def _read(self, text: str) -> None:
        self._input, position = text, 0
        while position < len(self._input):
            if run := self._read_run(position):
                position += run
                continue
            char = self._input[position]
            position += 1
            if self._state == "call":
                again = self._add_to_call(char)
            elif self._state == "after":
                again = self._add_after(char)
            else:
                again = self._add_text(char)
            if again:  # these characters mean something else than was thought
                self._input, position = again + self._input[position:], 0
        self._hand_on()

    def _read_run(self, position: int) -> int:
        """Take at once what would mean the same a character at a time; how much that was."""
        if self._state == "call":
            found = _LITERAL.match(self._input, position) if self._announced and self._call.literal else None
            if found is None:
                return 0
            self._call.add_literal(found[0])
            return len(found[0])
        if self._false_starts >= MAX_FALSE_STARTS:
            self._say(self._held + self._input[position:])
            self._held = ""
            return len(self._input) - position
        if self._state != "text":
            blank = SPACES + (self._form.after if self._state == "after" else "")
            if self._held.strip(blank):
                return 0
            room = self._input[position : position + MAX_HELD - len(self._held)]
            run = room[: len(room) - len(room.lstrip(blank))]
            self._held += run
            return len(run)
        if self._held.strip(SPACES):
            return 0
        mark = self._input.find(self._form.begin[0], position)
        run = self._input[position : mark if mark >= 0 else len(self._input)]
        if said := run.rstrip(SPACES):
            self._say(self._held + said)
            self._held = ""
        held = self._held + run[len(said) :]
        whole = len(held) // MAX_HELD * MAX_HELD
        self._say(held[:whole])
        self._held = held[whole:]
        return len(run)

    # Each of these takes a character, and returns text that has to be read again.

    def _add_text(self, char: str) -> str:
        held = self._held + char
        word = held.lstrip(SPACES)
        if self._state == "start" and word == "{":
            self._begin(held, len(held), bare=True)
            return char
        if self._form.begin.startswith(word) and len(held) <= MAX_HELD:
            self._held = held
            if word == self._form.begin:
                self._begin(held, len(held), bare=False)
            return ""
        self._state = "text"
        self._say(self._held)
        self._held = ""
        if char in SPACES or char == self._form.begin[0]:
            self._held = char
        else:
            self._say(char)
        return ""

    def _begin(self, held: str, lead: int, *, bare: bool) -> None:
        self._state, self._call, self._announced = "call", CallObject(bare=bare), False
        self._held, self._lead, self._bare = held[: len(held) - bare], lead, bare

    def _add_to_call(self, char: str) -> str:
        call = self._call
        if self._announced and not call.closed and self._at_end(char):
            return ""
        if not self._announced or call.closed:
            self._held += char
        call.add(char)
        if call.broken:
            return self._leave() if self._announced else self._give_back()
        if self._bare and call.name is not None and call.name not in self._names:
            return self._give_back()
        if call.ready and not self._announced:
            self._announced, self._said, self._lead = True, False, 0
            self._tell(CallDelta(self.num_calls, call.name, ""))
            self.num_calls += 1
            self._held = ""
        if call.done:
            self._held = ""
            self._leave()
        elif len(self._held) - self._lead > MAX_HELD:
            return self._leave() if self._announced else self._give_back()
        return ""

    def _at_end(self, char: str) -> bool:
        """Whether `char` belongs to the closing marker, or may: it ends arguments that do not end by themselves."""
        if self._call.quoted:
            return False
        if not self._form.end.startswith(self._held + char):
            if self._held:
                self._pass_on()
            if not self._form.end.startswith(char):
                return False
        self._held += char
        if self._held == self._form.end:
            self._hand_on()
            self._held, self._state = "", "text"
        return True

    def _pass_on(self) -> None:
        """What looked like the closing marker belongs to the arguments."""
        self._hand_on()
        if self._held and not self._call.closed:
            self._tell(CallDelta(self.num_calls - 1, None, self._held))
            self._held = ""

    def _hand_on(self) -> None:
        """Give out the arguments of a call that is certain."""
        if self._state == "call" and self._announced and (arguments := self._call.take()):
            self._tell(CallDelta(self.num_calls - 1, None, arguments))

    def _leave(self) -> str:
        self._hand_on()
        self._state = "after"
        again, self._held = self._held, ""
        return self._false_start(again) if again else ""

    def _give_back(self) -> str:
        held, self._held = self._held, ""
        self._say(held[: self._lead])
        self._state = "text"
        return self._false_start(held[self._lead :])

    def _false_start(self, again: str) -> str:
        self._false_starts += 1
        if self._false_starts >= MAX_FALSE_STARTS:
            self._state = "text"
        return again

    def _add_after(self, char: str) -> str:
        held = self._held + char
        word = held.lstrip(SPACES + self._form.after)
        if len(held) > MAX_HELD:
            self._state, self._held = "text", ""
            return held
        if not word or (self._form.end and self._form.end.startswith(word)):
            self._held = held
            if word and word == self._form.end:
                self._held, self._state = "", "text"
            return ""
        if self._form.bare and word == "{":
            self._begin(held, len(held), bare=True)
            return char
        if self._form.begin.startswith(word):
            self._held = held
            if word == self._form.begin:
                self._begin(held, len(held), bare=False)
            return ""
        self._state, self._held = "text", ""
        return held

    def _say(self, text: str) -> None:
        if text:
            self._said = True
            self._content.append(text)

    def _tell(self, delta: CallDelta) -> None:
        if self._max_calls is None or delta.index < self._max_calls:
            self._calls.append(delta)
