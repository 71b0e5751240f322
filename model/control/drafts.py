"""Speculative decoding: cheap draft tokens, several of which are verified in one forward pass.

A pass that computes one token reads every weight, and costs hardly more for a few tokens. So a
decoding request may bring draft tokens: guesses of what follows its last token. All are computed in
one pass, and each gives logits. From these a token is drawn exactly as without drafts: the random
number depends on the seed and the position in the output alone. Drafts are accepted as long as they
equal the drawn tokens; the next pass continues after the first that differs (Leviathan et al. 2023,
arXiv:2211.17192; because a draw depends on its position, accepting needs no further random number,
and the output is the same with and without drafts).

Decides: which drafts are accepted; what the n-gram drafter proposes: the tokens that followed the
last two tokens earlier in the text (Saxena 2023, prompt look-up). It finds them as LZ77 compressors
find matches, by a chain of earlier positions for each pair. A long prompt is chained in parts, so
that no step waits for it; a part that is not chained yet is searched, with the same result.

Invariants: drafts depend on the tokens of the request alone, so ranks that share a network propose
the same; they change only how soon tokens come, not which.

Does not know: networks, blocks, which requests have room for drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

from model.control.request import Request

_MAX_MATCH = 16  # common tokens that count
_MAX_PLACES = 8  # earlier places that are compared
_MAX_INDEXED = 1024  # tokens of a text that are chained in one call


class Drafter(Protocol):
    """A source of draft tokens."""

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Sequence[int]]:
        """Return for each request the guesses of its next tokens, up to its number, often none.

        Args:
            wanted: requests that run and have read all their tokens.
        """
        ...

    def discard(self, request: Request) -> None:
        """Forget a request that has ended. O(1)."""
        ...


def may_have_drafts(request: Request) -> bool:
    """Return True if several next tokens of a request can be verified in one pass. O(1).

    Not where logits depend on the tokens before them by more than the network: penalties count
    them, a grammar follows them, bad words end with them, and `min_tokens` bars the end up to a
    position.
    """
    params = request.params
    follows = params.grammar is not None or params.counts_tokens or params.bad_words
    return not follows and not params.min_tokens


def accepted_tokens(
    request: Request, drafts: Sequence[int], first: int, ahead: Sequence[int | None]
) -> list[int]:
    """Return the tokens that a pass with drafts gives: those up to the first wrong draft.

    O(drafts).

    Args:
        request: the request that they belong to.
        drafts: its draft tokens, which were computed.
        first: the token that was drawn for the place of the first draft.
        ahead: the token drawn after each draft; None: its logits were NaN or infinite, and it does
            not count; if the draft was right the next pass finds that out.

    Returns:
        At least `first`; none follows one that ends the request.
    """
    tokens = [first]
    for draft, token in zip(drafts, ahead, strict=True):
        if tokens[-1] != draft or request.ends_by(draft) or token is None:
            break
        tokens.append(token)
    return tokens


class NgramDrafts:
    """A drafter that continues as the text did after an earlier place with the same tokens."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[Sequence[int]]:
        """Return draft tokens for each request. O(new tokens, and those proposed).

        A new request of 128k tokens takes a millisecond: _MAX_INDEXED are chained, and the others
        searched.
        """
        found: list[Sequence[int]] = []
        for request, most in wanted:
            text = self._texts.setdefault(request.request_id, _Text())
            found.append(text.following(request.tokens, most))
        return found

    def discard(self, request: Request) -> None:
        """Forget a request that has ended. O(1)."""
        self._texts.pop(request.request_id, None)


class _Text:
    """The places of every pair of tokens in one text."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}  # a pair -> where the token behind its last one is
        self._before = array("q", [-1, -1])  # for each place the one of the same pair before it

    def following(self, tokens: array[int], most: int) -> array[int]:
        """Return the tokens after the earlier place whose tokens before match the last ones best.

        At most `most`; empty if the last two tokens did not stand together before.
        """
        if len(tokens) < 3:
            return tokens[:0]
        self._index(tokens)
        best, longest = -1, 1
        for place in islice(self._places(tokens), _MAX_PLACES):
            common = 2
            while (
                common < min(place, _MAX_MATCH)
                and tokens[place - common - 1] == tokens[-common - 1]
            ):
                common += 1
            if common > longest:
                best, longest = place, common
            if longest == _MAX_MATCH:
                break
        if best < 0:
            return tokens[:0]
        found = tokens[best : best + most]
        if len(found) < most:  # it has come to the end: what repeats, repeats on
            period = found
            while len(found) < most:
                found = found + period
        return found[:most]

    def _index(self, tokens: array[int]) -> None:
        """Chain the places that come next, at most _MAX_INDEXED of them."""
        newest, before = self._newest, self._before
        for place in range(len(before), min(len(tokens), len(before) + _MAX_INDEXED)):
            pair = tokens[place - 2] << 32 | tokens[place - 1]
            before.append(newest.get(pair, -1))
            newest[pair] = place

    def _places(self, tokens: array[int]) -> Iterator[int]:
        """Yield the places where the last two tokens stood before, the newest first."""
        indexed, size = len(self._before), tokens.itemsize
        pair, behind = tokens[-2:].tobytes(), tokens[indexed - 2 : -1].tobytes()
        at = behind.rfind(pair)
        while at >= 0:
            if at % size == 0:  # else the end of one token and the start of another
                yield indexed + at // size
            at = behind.rfind(pair, 0, at + len(pair) - 1)
        place = self._newest.get(tokens[-2] << 32 | tokens[-1], -1)
        while place >= 0:
            yield place
            place = self._before[place]
