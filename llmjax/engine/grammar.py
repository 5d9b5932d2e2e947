"""`GrammarCompiler` and `GrammarMatcher`: which tokens keep an output to the form it must have. Host only: numpy, no JAX.

Joins a `StructuredOutput` with the bytes of a tokenizer's tokens, through llguidance
(https://github.com/guidance-ai/llguidance), which is imported when the first form is compiled. Must not know scheduling, rows or
the device: a mask is a numpy vector here.

A schema is other people's input. So it is tried out in another process before it is compiled in this one (`grammar_trial`), and
never on the thread that steps the engine where `GrammarCompiler.start` is used.
"""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.engine import grammar_trial
from llmjax.engine.grammar_library import NO_TEXT, RefusedError, TokenBytes, build, limits, one_line
from llmjax.engine.tokenizer import Tokenizer
from llmjax.sampling_params import SamplingParams
from llmjax.structured_output import StructuredOutput

if TYPE_CHECKING:
    import llguidance

MAX_COMPILED = 128  # forms kept though no request uses them
MAX_REFUSED = 128  # forms that were given up and are remembered


class Grammar:
    """A compiled form, for any number of outputs. `matcher` stands at the beginning and is only copied."""

    def __init__(self, wanted: StructuredOutput, matcher: llguidance.LLMatcher) -> None:
        self.wanted = wanted
        self.matcher = matcher


class GrammarCompiler:
    """Compiles forms for one tokenizer. May be used by many threads.

    Args:
        tokenizer: None refuses every form.
        vocab_size: rows of the model's vocabulary, the width of a mask.
        num_tokens: ids from here on are never allowed.
        eos_ids: what ends a complete output.
        compiled: told the seconds of each compilation that succeeded.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        num_tokens: int,
        eos_ids: Sequence[int],
        compiled: Callable[[float], None],
    ) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._num_tokens = num_tokens if tokenizer is None else min(num_tokens, tokenizer.vocab_size)
        self.eos_ids = tuple(token for token in eos_ids if token < self._num_tokens)
        self._beyond = () if self.eos_ids else (self._num_tokens,)  # llguidance must have an end of sequence
        self._compiled = compiled
        self._lock = threading.Lock()  # guards what is known, and is never held for long
        self._slow_lock = threading.Lock()
        self._known: weakref.WeakValueDictionary[StructuredOutput, Grammar] = weakref.WeakValueDictionary()
        self._recent: collections.OrderedDict[StructuredOutput, Grammar] = collections.OrderedDict()
        self._refused: collections.OrderedDict[StructuredOutput, str] = collections.OrderedDict()
        self._vocabulary: TokenBytes | None = None
        self._library_tokenizer: llguidance.LLTokenizer | None = None
        self._executor: llguidance.LLExecutor | None = None

    def compile(self, wanted: StructuredOutput) -> Grammar:
        """The compiled form; waits for it unless it is known. Raises `RequestError` naming `wanted.field`."""
        return self.start(wanted).result()

    def start(self, wanted: StructuredOutput) -> concurrent.futures.Future[Grammar]:
        """The same as a future, which may be done. Whoever holds its result finds it again at once."""
        with self._lock:
            grammar = self._known.get(wanted)
            if grammar is None:
                return grammar_trial.submit(lambda: self._compile(wanted))
            self._keep(grammar)
        done: concurrent.futures.Future[Grammar] = concurrent.futures.Future()
        done.set_result(grammar)
        return done

    def matchers(self, params: SamplingParams, stop_ids: Iterable[int]) -> list[GrammarMatcher]:
        """One for each of the `params.n` outputs, at its beginning. `stop_ids` end an output, but not before `min_tokens`.

        Raises `RequestError` where no token can be the first.
        """
        assert params.structured is not None
        wanted = params.structured
        never = (*self._beyond, *(self.eos_ids if params.ignore_eos else ()))
        matcher = GrammarMatcher(
            self.compile(wanted).matcher,
            ends=self._words((*self.eos_ids, *self._beyond)),
            never=self._words(never),
            early=self._words({*never, *stop_ids}),
            min_tokens=params.min_tokens,
        )
        self.fill([matcher])
        if matcher.complete or matcher.error is not None:
            raise wanted.error(
                "min_tokens forbids every token that the output could begin with: lower it, or stop at other tokens"
                if params.min_tokens
                else NO_TEXT
            )
        return [matcher, *(matcher.copy() for _ in range(params.n - 1))]

    def fill(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Find what each may be followed by; on several threads where it pays."""
        if not matchers:
            return
        words = -(-(self._num_tokens + len(self._beyond)) // 32)
        filled = np.zeros((len(matchers), words), np.int32)
        if len(matchers) == 1:
            matchers[0].matcher.unsafe_compute_mask_ptr(filled.ctypes.data, filled.nbytes)
        else:
            assert self._executor is not None, "a matcher exists, so the tokenizer does"
            numbered = [(matcher.matcher, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(numbered, filled.ctypes.data, words * 4, len(matchers))
        masks = np.zeros((len(matchers), self.num_words), np.int32)
        masks[:, :words] = filled[:, : self.num_words]
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.allow(mask)

    @property
    def num_words(self) -> int:
        """int32 words of a mask; bit i of word w is token 32 w + i."""
        return -(-self.vocab_size // 32)

    def _words(self, ids: Iterable[int]) -> np.ndarray:
        bits = np.zeros(self.num_words * 32, np.uint8)
        bits[[token for token in ids if token < len(bits)]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    # -- compiling

    def _keep(self, grammar: Grammar) -> None:
        self._known[grammar.wanted] = grammar
        self._recent[grammar.wanted] = grammar
        self._recent.move_to_end(grammar.wanted)
        if len(self._recent) > MAX_COMPILED:
            self._recent.popitem(last=False)

    def _compile(self, wanted: StructuredOutput) -> Grammar:
        with self._lock:  # a burst of one form: the first of them has compiled it, or was refused
            if (known := self._known.get(wanted)) is not None:
                self._keep(known)
                return known
            if (refused := self._refused.get(wanted)) is not None:
                raise wanted.error(refused)
        tokenizer, vocabulary = self._tokenizer_of_library(wanted)
        started = time.perf_counter()
        try:
            text = _grammar_text(wanted)
        except ValueError as error:
            raise wanted.error(f"it cannot be compiled: {one_line(str(error))}") from None
        try:
            matcher = grammar_trial.compile_tried(vocabulary, text, lambda: build(tokenizer, text, limits()))
        except RefusedError as error:
            if isinstance(error, grammar_trial.TooComplexError):
                with self._lock:
                    self._refused[wanted] = str(error)
                    if len(self._refused) > MAX_REFUSED:
                        self._refused.popitem(last=False)
            raise wanted.error(str(error)) from None
        self._compiled(time.perf_counter() - started)
        grammar = Grammar(wanted, matcher)
        with self._lock:
            self._keep(grammar)
        return grammar

    def _tokenizer_of_library(self, wanted: StructuredOutput) -> tuple[llguidance.LLTokenizer, TokenBytes]:
        """Made at the first use, from the bytes of every token."""
        import llguidance

        tokenizer = self._tokenizer
        if tokenizer is None:
            raise wanted.error("it needs a tokenizer, and this engine has none")
        if not tokenizer.is_byte_exact:
            raise wanted.error("it needs a tokenizer whose tokens are bytes, and this model's are not")
        with self._slow_lock:
            if self._library_tokenizer is None or self._vocabulary is None:
                self._vocabulary = self._token_bytes(tokenizer)
                encode = functools.partial(tokenizer.encode, add_special_tokens=False)
                self._library_tokenizer = self._vocabulary.library_tokenizer(encode)
                self._executor = llguidance.LLExecutor()
            return self._library_tokenizer, self._vocabulary

    def _token_bytes(self, tokenizer: Tokenizer) -> TokenBytes:
        """Where the model has no end of sequence, there is one token more than it has."""
        num_tokens = self._num_tokens
        tokens = [tokenizer.token_bytes(token) for token in range(num_tokens)]
        special = sorted({*(token for token in tokenizer.special_ids if token < num_tokens), *self.eos_ids})
        if not self.eos_ids:
            tokens.append(b"<end>")
            special.append(num_tokens)
        return TokenBytes(tokens, special, list(self.eos_ids or self._beyond))


class GrammarMatcher:
    """Where one output stands in its form.

    Attributes:
        allowed: int32 words of the mask of the next token.
        complete: nothing but an end can follow, so the output ends here.
        error: why it cannot go on although it is not complete, else None.
    """

    def __init__(
        self, begin: llguidance.LLMatcher, *, ends: np.ndarray, never: np.ndarray, early: np.ndarray, min_tokens: int
    ) -> None:
        self.matcher = begin.deep_copy()
        self.allowed = np.zeros_like(ends)
        self.complete = False
        self.error: str | None = None
        self._ends, self._never, self._early = ends, never, early
        self._min_tokens = min_tokens
        self._taken = 0

    def copy(self) -> GrammarMatcher:
        """Another one that stands where this one does."""
        other = copy.copy(self)
        other.matcher = self.matcher.deep_copy()
        return other

    def take(self, token: int) -> bool:
        """Add a sampled token. Whether it can go on, as far as is known without the next mask."""
        self._taken += 1
        if not self.matcher.consume_token(token):
            self._fail(self.matcher.get_error())
        elif self.matcher.is_stopped():
            self.complete = True
        return not self.complete and self.error is None

    def only_token(self) -> int | None:
        """The next token where just one is allowed, else None."""
        (words,) = self.allowed.nonzero()
        if len(words) != 1:
            return None
        bits = int(self.allowed[words[0]]) & 0xFFFFFFFF
        return None if bits & (bits - 1) else 32 * int(words[0]) + bits.bit_length() - 1

    def allows(self, token: int) -> bool:
        """Whether `token` may be the next."""
        return bool((int(self.allowed[token // 32]) >> (token % 32)) & 1)

    def allow(self, mask: np.ndarray) -> None:
        """Take the library's mask of the next token, of which some may be forbidden here."""
        if self.matcher.is_error():
            self._fail(self.matcher.get_error())
            return
        self.allowed = mask & ~(self._early if self._taken < self._min_tokens else self._never)
        # A complete output ends even where its end is forbidden: nothing else could follow.
        if not (self.allowed & ~self._ends).any():
            if self.matcher.is_accepting():
                self.complete = True
            else:
                self._fail("no token can follow")

    def _fail(self, reason: str) -> None:
        self.error = f"the output could not be kept to its form: {one_line(reason)}"


def _grammar_text(wanted: StructuredOutput) -> str:
    """The form as llguidance takes it. Raises `ValueError`."""
    from llguidance import LLMatcher, grammar_from

    if wanted.kind in ("json_object", "json_schema"):
        schema = wanted.schema_text if wanted.kind == "json_schema" else '{"type":"object"}'
        options: Any = {"whitespace_flexible": wanted.any_whitespace, "lenient": wanted.lenient}
        return LLMatcher.grammar_from_json_schema(schema, defaults=options)
    if wanted.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_literal, wanted.choices)))
    if wanted.kind == "regex":
        assert wanted.regex is not None
        return LLMatcher.grammar_from_regex(wanted.regex)
    assert wanted.grammar is not None
    return grammar_from("grammar", wanted.grammar)


def _literal(text: str) -> str:
    """A regular expression that matches only this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
