"""Masks of structured output, beside an oracle that knows only texts: a token may follow if what it makes can be completed.

The languages are finite, so that the oracle can write all their texts down.
"""

from __future__ import annotations

import gc
import itertools
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from fakes_text import EOS_ID, IM_START_ID, VOCAB_SIZE, byte_backend, plain_byte_tokenizer, sentencepiece_metadata

from llmjax.engine import grammar, grammar_trial
from llmjax.engine.gguf_tokenizer import tokenizer_from_metadata
from llmjax.engine.grammar import GrammarCompiler, GrammarMatcher
from llmjax.engine.grammar_library import build
from llmjax.engine.token_pieces import BYTE_LEVEL_CHARS
from llmjax.engine.tokenizer import Tokenizer
from llmjax.errors import RequestError
from llmjax.sampling_params import SamplingParams
from llmjax.structured_output import StructuredOutput

ALPHABET = "ab1é{"
CHARS = {byte: char for char, byte in BYTE_LEVEL_CHARS.items()}


def compiler(tokenizer: Tokenizer | None, *, vocab_size: int = 320, **options: object) -> GrammarCompiler:
    sizes = {"vocab_size": vocab_size, "num_tokens": vocab_size, "eos_ids": (EOS_ID,), "compiled": lambda seconds: None}
    return GrammarCompiler(tokenizer, **(sizes | options))  # type: ignore[arg-type]


def with_longer_tokens(rng: random.Random) -> Tokenizer:
    """Bytes, special tokens, and some longer tokens: pieces of texts, characters cut in two among them."""
    pieces: dict[str, int] = {}
    backend = byte_backend()
    for _ in range(40):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 5))).encode()
        cut = text[rng.randrange(2) : len(text) - rng.randrange(2)]
        piece = "".join(CHARS[byte] for byte in cut)
        if len(cut) > 1 and piece not in pieces and backend.token_to_id(piece) is None:
            pieces[piece] = VOCAB_SIZE + len(pieces)
    return Tokenizer(byte_backend(pieces), special_tokens={"eos_token": "<eos>"})


def allowed_ids(matcher: GrammarMatcher) -> set[int]:
    bits = np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")
    return set(map(int, np.flatnonzero(bits)))


def oracle(tokenizer: Tokenizer, texts: set[bytes], so_far: bytes) -> set[int]:
    found = {EOS_ID} if so_far in texts else set()
    for token in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token)
        if token not in tokenizer.special_ids and data and any(text.startswith(so_far + data) for text in texts):
            found.add(token)
    return found


def branches(texts: set[bytes], so_far: bytes) -> bool:
    """Whether the next byte is open, or the end is."""
    return len({text[len(so_far) : len(so_far) + 1] for text in texts if text.startswith(so_far)}) > 1


def walk(tokenizer: Tokenizer, form: StructuredOutput, texts: set[bytes], rng: random.Random) -> None:
    """A random output, its mask compared at every token."""
    made = compiler(tokenizer)
    (matcher,) = made.matchers(SamplingParams(structured=form), (EOS_ID,))
    data = b""
    while not matcher.complete:
        wanted = oracle(tokenizer, texts, data)
        assert matcher.error is None
        found = allowed_ids(matcher)
        assert found <= wanted, data
        # Where only one text can follow, one way to write it is enough.
        assert found == wanted or (found and not branches(texts, data)), data
        token = rng.choice(sorted(wanted))
        goes_on = matcher.take(token)
        if token == EOS_ID:
            assert not goes_on
            return
        data += tokenizer.token_bytes(token)
        if goes_on:
            made.fill([matcher])
    assert oracle(tokenizer, texts, data) == {EOS_ID}  # it ends where nothing else could follow, and only there


def texts_of(pattern: str, longest: int) -> set[bytes]:
    whole = re.compile(pattern)
    texts = ("".join(chars) for length in range(longest + 1) for chars in itertools.product(ALPHABET, repeat=length))
    return {text.encode() for text in texts if whole.fullmatch(text)}


@pytest.mark.parametrize(
    "pattern", ["[ab]{1,3}1?", "(a|ab|b1){1,2}", "é?a{2}|bé{0,3}", "[ab]?[1é{]{2}", "(?i:A?B1?a)", "(a1|1a|é){0,2}b"]
)
def test_masks_of_a_regex_are_those_of_its_texts(pattern: str) -> None:
    rng, texts = random.Random(), texts_of(pattern, 5)
    for _ in range(3):
        tokenizer = with_longer_tokens(rng)
        if "(?i" in pattern:
            texts |= {bytes(word) for text in texts for word in itertools.product(*({c, ord(chr(c).upper())} for c in text))}
        for _ in range(4):
            walk(tokenizer, StructuredOutput(regex=pattern), texts, rng)


def test_masks_of_a_choice_are_those_of_its_texts() -> None:
    rng = random.Random()
    for _ in range(15):
        chars = ALPHABET + '\\"\n.*|/^$ €'
        texts = ["".join(rng.choices(chars, k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 6))]
        walk(with_longer_tokens(rng), StructuredOutput(choice=texts), {text.encode() for text in texts}, rng)


def test_masks_of_json_are_those_of_its_texts() -> None:
    rng = random.Random()
    schema = {
        "type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {"a": {"enum": [1, "1a", None]}, "b": {"type": "boolean"}},
    }  # fmt: skip
    heads = ["1", '"1a"', "null"]
    texts = {f'{{"a":{a}{b}}}'.encode() for a in heads for b in ("", ',"b":true', ',"b":false')}
    form = StructuredOutput(json_schema=schema, any_whitespace=False)
    for _ in range(6):
        walk(with_longer_tokens(rng), form, texts, rng)


def test_masks_of_a_sentencepiece_vocabulary() -> None:
    tokenizer = tokenizer_from_metadata(sentencepiece_metadata(["▁a", "a▁b", "▁", "ab"]), Path("x.gguf"))
    made = compiler(tokenizer, eos_ids=(2,))
    (matcher,) = made.matchers(SamplingParams(structured=StructuredOutput(choice=[" a b", "ab"])), (2,))
    names = {tokenizer.token_bytes(token) for token in allowed_ids(matcher)}
    assert names == {b" ", b" a", b"a", b"ab"}


# -- ends


def test_an_end_that_is_not_wanted_is_masked_and_a_complete_output_ends_all_the_same() -> None:
    made, form = compiler(plain_byte_tokenizer()), StructuredOutput(regex="ab?")
    a, b = b"ab"
    for params in (SamplingParams(structured=form, ignore_eos=True), SamplingParams(structured=form, min_tokens=9)):
        (matcher,) = made.matchers(params, (EOS_ID,))
        assert matcher.take(a)
        made.fill([matcher])
        assert allowed_ids(matcher) == {b}
        matcher.take(b)
        assert matcher.complete
    (matcher,) = made.matchers(SamplingParams(structured=form, min_tokens=1), (EOS_ID,))
    assert matcher.take(a)
    made.fill([matcher])
    assert allowed_ids(matcher) == {b, EOS_ID}


def test_min_tokens_that_forbids_what_the_form_needs() -> None:
    made = compiler(plain_byte_tokenizer())
    a, b = b"ab"
    (matcher,) = made.matchers(SamplingParams(structured=StructuredOutput(regex="ab"), min_tokens=5), (EOS_ID, b))
    assert matcher.take(a)
    made.fill([matcher])
    assert matcher.error is not None
    assert "no token can follow" in matcher.error
    with pytest.raises(RequestError, match="min_tokens forbids"):
        made.matchers(SamplingParams(structured=StructuredOutput(regex="ab"), min_tokens=5), (EOS_ID, a))


@pytest.mark.parametrize("vocab_size", [256, 260, 288, 320])
def test_a_vocabulary_without_an_end(vocab_size: int) -> None:
    made = compiler(plain_byte_tokenizer(), vocab_size=vocab_size, eos_ids=())
    (matcher,) = made.matchers(SamplingParams(structured=StructuredOutput(regex="a*b")), ())
    assert len(matcher.allowed) == -(-vocab_size // 32)
    for _ in range(3):
        assert allowed_ids(matcher) == set(b"ab")
        assert matcher.take(ord("a"))
        made.fill([matcher])
    matcher.take(ord("b"))
    assert matcher.complete
    (matcher,) = made.matchers(SamplingParams(structured=StructuredOutput(regex="a+")), ())
    matcher.take(ord("a"))
    made.fill([matcher])
    assert (allowed_ids(matcher), matcher.complete, matcher.error) == (set(b"a"), False, None)


def test_ids_beyond_the_tokenizer_or_the_model_are_never_allowed() -> None:
    form = StructuredOutput(regex="(?s:.)*")
    for options, last in (({"vocab_size": 320, "num_tokens": 300}, 260), ({"vocab_size": 320, "num_tokens": 100}, 100)):
        (matcher,) = compiler(plain_byte_tokenizer(), **options).matchers(SamplingParams(structured=form), ())
        assert max(allowed_ids(matcher)) < last
        assert not allowed_ids(matcher) & {IM_START_ID, EOS_ID - 1}  # nor special ones


def test_copies_go_their_own_ways() -> None:
    made = compiler(plain_byte_tokenizer())
    one, two, three = made.matchers(SamplingParams(structured=StructuredOutput(choice=["ab", "cd", "ce"]), n=3), (EOS_ID,))
    one.take(ord("a"))
    two.take(ord("c"))
    made.fill([one, two])
    assert [allowed_ids(m) for m in (one, two, three)] == [set(b"b"), set(b"de"), set(b"ac")]


def test_a_token_that_is_not_allowed_is_an_error_of_that_output_alone() -> None:
    made = compiler(plain_byte_tokenizer())
    one, two = made.matchers(SamplingParams(structured=StructuredOutput(choice=["ab"]), n=2), (EOS_ID,))
    assert not one.take(ord("x"))
    assert one.error is not None
    assert "\n" not in one.error
    assert two.take(ord("a"))


# -- what cannot be compiled

BAD = [
    ({"json_schema": {"type": "objec"}}, "Invalid type: objec"),
    ({"json_schema": {"$ref": "#/nowhere"}}, "does not exist"),
    ({"json_schema": {"$ref": "http://example.com/x"}}, "Resource"),
    ({"json_schema": {"not": {"type": "string"}}}, 'Unimplemented keys: \\["not"'),
    ({"json_schema": {"enum": []}}, "Unsatisfiable"),
    ({"json_schema": {"type": "string", "pattern": "(?<!a)b"}}, "look-around"),
    ({"json_schema": {"$ref": "#"}}, "allows no text"),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": "(a)\\1"}, "backreferences"),
    ({"regex": "^$"}, "allows no text"),
    ({"regex": "[^\\x00-\\U0010ffff]"}, "allows no text"),
    ({"regex": "(" * 3000 + "a" + ")" * 3000}, "cannot be compiled"),
    ({"grammar": "start: nowhere"}, "unknown name"),
    ({"grammar": "start: start"}, "allows no text"),
    ({"grammar": "start: " + "(" * 200 + '"a"' + ")" * 200}, "nested"),
    ({"grammar": "hello"}, "cannot be compiled"),
    ({"grammar": 'root ::= "a" nowhere'}, "not found"),
    ({"grammar": "start: <|nowhere|>"}, "special token"),
    ({"grammar": "start: @nowhere"}, "nowhere"),
]


def test_what_cannot_be_compiled_is_refused_in_one_line_and_the_next_form_works() -> None:
    made = compiler(plain_byte_tokenizer())
    for arguments, words in BAD:
        form = StructuredOutput(**arguments, field="response_format")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=words) as caught:
            made.matchers(SamplingParams(structured=form), (EOS_ID,))
        assert caught.value.param == "response_format"
        assert str(caught.value).startswith("response_format: ")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
        assert made.matchers(SamplingParams(structured=StructuredOutput(regex="a+")), (EOS_ID,))


def test_a_form_that_is_too_complex_is_refused_or_its_output_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    made, form = compiler(plain_byte_tokenizer()), StructuredOutput(regex="(.{1,300}){1,30}")
    monkeypatch.setattr(grammar, "limits", lambda: llguidance.LLParserLimits(max_lexer_states=5, verbose_errors=False))
    with pytest.raises(RequestError, match=r"too complex: .*; make it simpler"):
        made.compile(form)
    monkeypatch.setattr(grammar, "limits", lambda: llguidance.LLParserLimits(max_lexer_states=100, verbose_errors=False))
    (matcher,) = made.matchers(SamplingParams(structured=form), (EOS_ID,))
    for _ in range(150):
        if matcher.take(ord("a")):
            made.fill([matcher])
        if matcher.error is not None:
            break
    assert matcher.error is not None
    assert "\n" not in matcher.error
    assert not matcher.complete


def test_what_can_be_ignored_is_if_the_caller_says_so() -> None:
    made = compiler(plain_byte_tokenizer())
    schema = {"type": "integer", "not": {"const": 3}}
    with pytest.raises(RequestError):
        made.compile(StructuredOutput(json_schema=schema))
    assert made.compile(StructuredOutput(json_schema=schema, lenient=True))


def chain(links: int, link: str) -> str:
    return "start: r0\n" + "".join(f"r{i}: {link.format(i + 1)}\n" for i in range(links)) + f'r{links}: "a"'


def test_long_chains_of_rules_neither_crash_nor_disturb() -> None:
    made = compiler(plain_byte_tokenizer())
    definitions: dict[str, object] = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(990)}
    forms = [
        StructuredOutput(json_schema={"$defs": {**definitions, "a990": {"type": "null"}}, "$ref": "#/$defs/a0"}),
        StructuredOutput(grammar=chain(990, '({} "y"?)+')),
        StructuredOutput(grammar='start: ("a"{1000}){1000}'),
        StructuredOutput(regex="a{99999}{99999}"),
    ]
    for form in forms:
        try:
            (matcher,) = made.matchers(SamplingParams(structured=form), (EOS_ID,))
        except RequestError:
            continue  # refused is as good
        for _ in range(20):
            if not matcher.take(min(allowed_ids(matcher) - {EOS_ID})):
                break
            made.fill([matcher])
            if matcher.complete or matcher.error is not None:
                break
    assert made.matchers(SamplingParams(structured=StructuredOutput(regex="a+")), (EOS_ID,))
    assert threading.stack_size() == 0


def test_without_a_tokenizer_of_bytes_there_is_no_structured_output() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer, and this engine has none"):
        compiler(None).compile(StructuredOutput(json_object=True))
    tokenizer = plain_byte_tokenizer()
    tokenizer.is_byte_exact = False
    with pytest.raises(RequestError, match="tokens are bytes"):
        compiler(tokenizer).compile(StructuredOutput(json_object=True))


# -- what is known


def test_a_form_is_compiled_once_while_anybody_has_it_or_it_was_used_lately() -> None:
    seconds: list[float] = []
    made = compiler(plain_byte_tokenizer(), compiled=seconds.append)
    held = made.compile(StructuredOutput(regex="a"))
    for number in range(140):
        made.compile(StructuredOutput(regex=f"b{number}"))
    assert len(seconds) == 141
    assert made.compile(StructuredOutput(regex="a", field="other")) is held
    made.compile(StructuredOutput(regex="b139"))
    assert len(seconds) == 141
    assert min(seconds) > 0
    gc.collect()
    made.compile(StructuredOutput(regex="b0"))
    assert len(seconds) == 142


def test_many_threads_may_compile() -> None:
    made = compiler(plain_byte_tokenizer())
    found: list[object] = []

    def work(number: int) -> None:
        for repeat in range(10):
            params = SamplingParams(structured=StructuredOutput(regex=f"[a-c]{{{1 + (number + repeat) % 5}}}"))
            found.extend(allowed_ids(matcher) for matcher in made.matchers(params, (EOS_ID,)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [set(b"abc")] * 60


# -- what is too costly

COSTLY = [
    StructuredOutput(json_schema={"type": "integer", "multipleOf": 99999989}),
    StructuredOutput(grammar='start: "<" x\nx: %json {"type": "integer", "multipleOf": 99999989}'),
    StructuredOutput(json_schema={"type": "string", "allOf": [{"pattern": f"w{i}x{i}y.{{3,40}}"} for i in range(26)]}),
    StructuredOutput(grammar="start: A\nA: " + " & ".join(f"/(?s:.*)w{i}x{i}y(?s:.{{3,40}})/" for i in range(60))),
]


def test_forms_that_would_take_minutes_are_given_up_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "TRIAL_SECONDS", 0.5)
    built: list[str] = []
    monkeypatch.setattr(grammar, "build", lambda tokenizer, text, bounds: built.append(text) or build(tokenizer, text, bounds))
    made = compiler(plain_byte_tokenizer())
    costly = [made.start(form) for form in COSTLY]
    (matcher,) = made.matchers(SamplingParams(structured=StructuredOutput(regex="ab")), (EOS_ID,))
    assert allowed_ids(matcher) == {ord("a")}
    for future in costly:
        with pytest.raises(RequestError, match=r"too complex.*make it smaller"):
            future.result(60)
    assert len(built) == 1  # none of the others reached this process
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "compile_tried", None)  # what was given up is known
        with pytest.raises(RequestError, match="too complex"):
            made.compile(COSTLY[0])


def test_a_burst_of_a_form_is_compiled_once_a_thread() -> None:
    seconds: list[float] = []
    made = compiler(plain_byte_tokenizer(), compiled=seconds.append)
    found = [made.start(StructuredOutput(regex="[a-c]{3}")) for _ in range(16)]
    assert all(future.result(60) for future in found)
    assert 1 <= len(seconds) <= grammar_trial.THREADS
