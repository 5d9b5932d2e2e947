"""`ChoiceText`: the text of one choice, from its sampled tokens. Joins detokenisation and stop strings; no JAX."""

from __future__ import annotations

from collections.abc import Sequence

from llmjax.engine.detokenizer import Detokenizer
from llmjax.engine.stop_strings import StopStrings
from llmjax.engine.tokenizer import Tokenizer
from llmjax.sampling_params import SamplingParams


class ChoiceText:
    """What may be shown of one choice, token by token, and when a stop string has ended it.

    Rules:
    - Special tokens have no text unless `skip_special_tokens` is off.
    - A token that ended the output by being a stop or end-of-sequence id has no text either way (`ended`), as in vLLM.
    - A stop string counts when its last character comes with the `min_tokens`-th token or later; one that is complete
      earlier stays in the text.
    - When the output ends otherwise, the text held back for a stop string is shown (`finish`), and an incomplete
      character as U+FFFD.

    Args:
        tokenizer: not changed.
        prompt_ids: the tokens before the choice.
        params: the request's; read are `stop`, `include_stop_str_in_output`, `min_tokens`, `skip_special_tokens`.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._active = params.min_tokens == 0
        self._parts: list[str] = []
        self._stopped = False

    @property
    def text(self) -> str:
        """All text shown so far."""
        return "".join(self._parts)

    def add(self, token_id: int, num_output_tokens: int, *, ended: bool = False) -> tuple[str, str | None]:
        """Add a sampled token.

        Args:
            num_output_tokens: how many there are with this one.
            ended: the output ends with this token because it is a stop or end-of-sequence id.

        Returns the text that became showable, and the stop string that ended the output; add nothing after that.
        """
        assert not self._stopped, "the output ended with a stop string"
        self._active = num_output_tokens >= self._min_tokens
        return self._take("" if ended else self._detokenizer.add(token_id))

    def finish(self) -> str:
        """The text still held back, when the output ends for another reason than a stop string. Empty after one."""
        if self._stopped:
            return ""
        # A stop string can still be complete here, as U+FFFD; the reason why the output ended stays the other one.
        text, _ = self._take(self._detokenizer.flush())
        held = self._stops.flush()
        self._parts.append(held)
        return text + held

    def _take(self, text: str) -> tuple[str, str | None]:
        released, matched = self._stops.feed(text, active=self._active)
        self._stopped = matched is not None
        self._parts.append(released)
        return released, matched


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """A token by itself, for logprobs: its text (U+FFFD where it is only part of a character) and its bytes.

    The bytes of consecutive tokens, special ones and a stopping one apart, concatenate to the bytes of the text.
    """
    data = tokenizer.token_bytes(token_id)
    return data.decode("utf-8", "replace"), data
