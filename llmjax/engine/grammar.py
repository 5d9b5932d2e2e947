"""`GrammarCompiler` and `GrammarMatcher`: which tokens keep an output to the form it must have. Host only: numpy, no JAX.

Joins a `StructuredOutput` with the bytes of a tokenizer's tokens, through llguidance
(https://github.com/guidance-ai/llguidance), which is imported when the first form is compiled. Must not know scheduling, rows or
the device: a mask is a numpy vector here.

A schema is other people's input. So it is compiled on threads with a deep stack (the library recurses over rules that lead to one
another), with the library's limits lowered to fractions of a second, and never on the thread that steps the engine where
`GrammarCompiler.start` is used.
"""

from __future__ import annotations

import collections
import concurrent.futures
import copy
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmjax.engine.tokenizer import Tokenizer
from llmjax.sampling_params import SamplingParams
from llmjax.structured_output import StructuredOutput

if TYPE_CHECKING:
    import llguidance

MAX_COMPILED = 128  # forms kept though no request uses them
COMPILE_THREADS = 2
COMPILE_STACK = 256 * 2**20  # bytes of address space; a chain of rules as long as the size limits allow takes a tenth of it
_REASON_CHARS = 200
_NOTHING = "it allows no text but the empty one, or none that this model's tokens can write"


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
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
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
                return self._submit(wanted)
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
                else _NOTHING
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

    def _submit(self, wanted: StructuredOutput) -> concurrent.futures.Future[Grammar]:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        before = threading.stack_size(COMPILE_STACK)  # of threads started from now on: those of this pool
        try:
            return self._threads.submit(self._compile, wanted)
        finally:
            threading.stack_size(before)

    def _keep(self, grammar: Grammar) -> None:
        self._known[grammar.wanted] = grammar
        self._recent[grammar.wanted] = grammar
        self._recent.move_to_end(grammar.wanted)
        if len(self._recent) > MAX_COMPILED:
            self._recent.popitem(last=False)

    def _compile(self, wanted: StructuredOutput) -> Grammar:
        import llguidance

        tokenizer = self._tokenizer_of_library(wanted)
        started = time.perf_counter()
        try:
            text = _grammar_text(wanted)
        except ValueError as error:
            raise wanted.error(f"it cannot be compiled: {_one_line(str(error))}") from None
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        if not matcher.is_error():
            probe = matcher.deep_copy()
            probe.compute_bitmask()  # what is too complex often shows here
            if probe.is_error():
                reason = probe.get_error()
                if "NoExtension" in reason:
                    raise wanted.error(_NOTHING)
                raise wanted.error(f"it is too complex: {_one_line(reason)}; make it simpler")
        if matcher.is_error():
            raise wanted.error(f"it cannot be compiled: {_one_line(matcher.get_error())}")
        self._compiled(time.perf_counter() - started)
        grammar = Grammar(wanted, matcher)
        with self._lock:
            self._keep(grammar)
        return grammar

    def _tokenizer_of_library(self, wanted: StructuredOutput) -> llguidance.LLTokenizer:
        """Made at the first use, from the bytes of every token."""
        import llguidance

        tokenizer = self._tokenizer
        if tokenizer is None:
            raise wanted.error("it needs a tokenizer, and this engine has none")
        if not tokenizer.is_byte_exact:
            raise wanted.error("it needs a tokenizer whose tokens are bytes, and this model's are not")
        with self._slow_lock:
            if self._library_tokenizer is None:
                vocabulary = _Vocabulary(tokenizer, self._num_tokens, self.eos_ids)
                self._library_tokenizer = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(vocabulary),
                    n_vocab=len(vocabulary.tokens),
                    eos_token=list(self.eos_ids or self._beyond),
                )
                self._executor = llguidance.LLExecutor()
            return self._library_tokenizer


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
        self.error = f"the output could not be kept to its form: {_one_line(reason)}"


def _limits() -> llguidance.LLParserLimits:
    """About a third of a second to compile, and ten milliseconds a token, at most."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000, step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False
    )


class _Vocabulary:
    """A tokenizer as llguidance wants it. Where the model has no end of sequence, there is one token more than it has."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, eos_ids: Sequence[int]) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(num_tokens)]
        self.special_token_ids = sorted({*(token for token in tokenizer.special_ids if token < num_tokens), *eos_ids})
        self.eos_token_id = eos_ids[0] if eos_ids else num_tokens
        if not eos_ids:
            self.tokens.append(b"<end>")
            self.special_token_ids.append(num_tokens)
        self._tokenizer = tokenizer
        ordinary = set(range(num_tokens)) - set(self.special_token_ids)
        self._ids = {self.tokens[token]: token for token in sorted(ordinary, reverse=True)}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids of a text. Where only one text can follow, llguidance allows of all ways to write it the one told here.

        That is the tokenizer's, as the model has learnt it, unless it adds or changes something (a space at the beginning, a
        special token); then the longest tokens from left to right.
        """
        data = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(data.decode("utf-8", "replace"), add_special_tokens=False)
        exact = all(token < len(self.tokens) and self._ids.get(self.tokens[token]) == token for token in ids)
        if exact and b"".join(self.tokens[token] for token in ids) == data:
            return ids
        ids = []
        while data:
            sizes = range(min(self._longest, len(data)), 0, -1)
            size = next((size for size in sizes if data[:size] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


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


def _one_line(message: str) -> str:
    """The part of a message of llguidance that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    chosen = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return re.sub(r"\s+", " ", chosen)[:_REASON_CHARS]
