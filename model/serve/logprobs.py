"""How likely tokens were, as OpenAI's clients read it.

Decides: what a token is called: its own text. A token that is a part of a character has no text of
its own, so its bytes are unknown; one that is special has an empty one.

Does not know: how the numbers came about.
"""

from collections.abc import Callable, Sequence

from model.control.request import SampledToken
from model.serve.protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

_Decode = Callable[[Sequence[int]], str]
_BROKEN = "\ufffd"


def chat_logprobs(decode: _Decode, tokens: Sequence[SampledToken]) -> ChatLogprobs:
    """For chats. O(tokens * tops)."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_named(decode, token.token_id, token.logprob or 0.0).model_dump(),
                top_logprobs=[_named(decode, *top) for top in token.top_logprobs],
            )
            for token in tokens
        ]
    )


def completion_logprobs(
    decode: _Decode, tokens: Sequence[SampledToken], offset: int
) -> CompletionLogprobs:
    """For completions. O(tokens * tops).

    Args:
        decode: tokens to text.
        tokens: of one answer, one after the other.
        offset: characters of the answer before them.
    """
    texts = [decode([token.token_id]) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = []
    for token in tokens:
        told: dict[str, float] = {}
        for number, logprob in token.top_logprobs:
            told.setdefault(decode([number]), logprob)  # two may have one text: the likelier
        tops.append(told)
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[token.logprob or 0.0 for token in tokens],
        top_logprobs=tops,
        text_offset=offsets,
    )


def _named(decode: _Decode, token_id: int, logprob: float) -> TopLogprob:
    text = decode([token_id])
    known = None if _BROKEN in text else list(text.encode())
    return TopLogprob(token=text, logprob=logprob, bytes=known)
