"""`PrefixCache`: pages whose keys and values were computed before are read again instead of being computed again.

Owns what a page's key is, and when a page gets one. It must not know launches or rows: the scheduler says what has been written
and read back. A page of page_size tokens is named by a hash of (the key before it, its token ids); the first one of a sequence by
that of (the request's `cache_salt`, its token ids). So equal keys mean equal sequences from the first token to the page's
last, under one salt; nothing else changes what a page holds. The hash is cryptographic (BLAKE2b, 128 bit): one user must
not be able to make up a prompt that finds another's pages.

*Full pages only, and never the last token.* A request needs the logits after its last known token, so that one is always
computed, and with it its whole page: a request finds at most the full pages before its last token. The alternative, to copy
the last page and compute one token, saves nothing: a launch of one token costs what a launch of a page does (the weights are
read once either way); and it would need a program that copies. So nobody ever writes to a page that another reads, and there
is no copy on write.

*Nothing is found before it is there.* A page gets its key when the result of the launch that filled it has been read
(`commit`), never at dispatch: what was in flight when a request was aborted stays nameless. Tokens that were decoded count like
those of the prompt, so the next turn of a conversation finds the answer too, and a preempted request itself.

*Deterministic engines* compute a prompt in chunks that begin at multiples of the chunk size, and decoding is another program
with another last bit. There pages are committed only from whole chunks, and a hit ends where a chunk does: what is left is
computed in the launches it would be without the cache, from keys and values that are the same to the bit.
"""

from __future__ import annotations

import array
import hashlib
import math
import sys
from collections.abc import Iterable

from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request

KEY_BYTES = 16
NEVER = sys.maxsize


class PrefixCache:
    """Finds and names pages of `pool`.

    Args:
        chunk: tokens of the chunks that prompts are computed in, where hits must end at one (a deterministic engine); else None.

    Attributes:
        query_tokens: prompt tokens of the requests that were looked up, each request once.
        hit_tokens: how many of these were found.
    """

    def __init__(self, pool: PagePool, *, chunk: int | None = None) -> None:
        self._pool = pool
        self._chunk = chunk
        self._align = math.lcm(chunk or 1, pool.page_size) // pool.page_size  # pages
        self._unseen: set[int] = set()  # named pages that a draft model has not computed to the end
        self.query_tokens = 0
        self.hit_tokens = 0

    def num_held(self, request: Request) -> int:
        """Pages the request would find that others hold: so many fewer must be free for it."""
        return sum(self._pool.holders(page) > 0 for page in self._find(request))

    def num_found(self, request: Request) -> int:
        """Known tokens that the request would not compute."""
        return len(self._find(request)) * self._pool.page_size

    def begin(self, request: Request) -> None:
        """Give a request that has no pages those that hold the beginning of its known tokens."""
        pages = self._find(request)
        self._pool.share(pages)
        request.pages = pages
        request.commit_at = (len(pages) + 1) * self._pool.page_size
        request.num_computed_tokens = len(pages) * self._pool.page_size
        seen = next((index for index, page in enumerate(pages) if page in self._unseen), len(pages))
        request.num_drafted = seen * self._pool.page_size
        if request.num_preemptions == 0 and not request.scores_prompt:
            request.num_cached_tokens = request.num_computed_tokens
            self.query_tokens += request.num_prompt_tokens
            self.hit_tokens += request.num_cached_tokens

    def commit(self, request: Request, start: int, end: int, *, decoded: bool) -> None:
        """A launch that computed the request's tokens at positions start..end-1 has been read: name the pages it filled.

        To be called when `end` is at least `request.commit_at`; else nothing was filled, and the call is wasted.
        """
        if self._chunk is not None and (decoded or end - start != self._chunk):
            return
        size = self._pool.page_size
        full = end // size
        keys = self._keys(request, full)
        for index in range(request.commit_at // size - 1, full):
            page = request.pages[index]
            self._pool.commit(page, keys[index])
            (self._unseen.discard if request.num_drafted >= (index + 1) * size else self._unseen.add)(page)
        request.commit_at = (full + 1) * size

    def drafted(self, request: Request) -> None:
        """A draft model computes tokens of a request that it had not seen: nobody who finds their pages need ask for it again."""
        self._unseen.difference_update(request.pages[: request.num_drafted // self._pool.page_size])

    def forget_all(self, running: Iterable[Request]) -> None:
        """Nothing computed so far is found any more, nor what `running` requests go on to make of it."""
        self._pool.forget_all()
        for request in running:
            request.commit_at = NEVER

    def _find(self, request: Request) -> list[int]:
        """Pages of the longest beginning that is there. A request that scores its prompt needs all its logits: none."""
        pages: list[int] = []
        if request.scores_prompt:
            return pages
        most = (request.num_tokens - 1) // self._pool.page_size
        for key in self._keys(request, most):
            page = self._pool.find(key)
            if page is None or len(pages) == most:
                break
            pages.append(page)
        del pages[len(pages) // self._align * self._align :]
        return pages

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """At least the first `count` keys of a request's known tokens. Each is computed once."""
        keys = request.page_keys
        if len(keys) < count:
            size = self._pool.page_size
            key = keys[-1] if keys else _root(request.params.cache_salt)
            tokens = array.array("i", request.known_ids(len(keys) * size, count * size))
            data, width = tokens.tobytes(), tokens.itemsize * size
            for first in range(0, len(data), width):
                key = hashlib.blake2b(key + data[first : first + width], digest_size=KEY_BYTES).digest()
                keys.append(key)
        return keys


def _root(salt: str | None) -> bytes:
    """What the first page's key depends on besides its tokens."""
    return hashlib.blake2b(("" if salt is None else salt).encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
