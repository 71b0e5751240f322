"""The log-probabilities of prompt tokens, from the logits before each of them.

Decides: that float32 copies of logits are made for a few rows at a time, so that the memory is
bounded whatever the vocabulary; the scheduler bounds the rows of a step.

Does not know: how chunks are planned, what the numbers are used for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.control.request import Request, SampledToken
from model.control.step import Chunk
from model.sample.request_sampler import log_probabilities, to_host

_ROWS = 32


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt tokens that follow those of a step.

    Attributes:
        chunks: those that have any.
        values: float32 [num_scored, 1 + the most alternatives]: of the token, and of the most
            likely ones.
        ids: int64 [num_scored, the most alternatives].
    """

    chunks: tuple[Chunk, ...]
    values: Tensor
    ids: Tensor

    def tokens(self) -> Iterator[tuple[Request, int, list[SampledToken]]]:
        """Yield requests, the position of the first of their tokens, and the tokens. O(values)."""
        values, ids, row = self.values.tolist(), self.ids.tolist(), 0
        for chunk in self.chunks:
            count, first = chunk.request.params.prompt_logprobs or 0, chunk.start + 1
            told = [
                SampledToken(token, own[0], tuple(zip(tops[:count], own[1:], strict=False)))
                for token, own, tops in zip(
                    _following(chunk), values[row:], ids[row:], strict=False
                )
            ]
            row += chunk.num_scored
            yield chunk.request, first, told


def score_prompts(chunks: Sequence[Chunk], logits: Tensor) -> PromptScores:
    """Return the log-probabilities of the tokens after these chunks' scored ones.

    O(rows * vocab_size).

    Args:
        chunks: of a step.
        logits: [num_scored, vocab_size], in the order of the chunks.
    """
    scored = tuple([chunk for chunk in chunks if chunk.num_scored])
    most = max([chunk.request.params.prompt_logprobs or 0 for chunk in scored])
    following = [token for chunk in scored for token in _following(chunk)]
    tokens = torch.tensor(following, device=logits.device)
    pieces = [
        log_probabilities(rows, own, most)
        for rows, own in zip(torch.split(logits, _ROWS), torch.split(tokens, _ROWS), strict=True)
    ]
    values, ids = (torch.cat(column) for column in zip(*pieces, strict=True))
    if logits.device.type == "cuda":
        values, ids = to_host(values), to_host(ids)
    return PromptScores(scored, values, ids)


def _following(chunk: Chunk) -> list[int]:
    """Return the prompt tokens after the scored ones."""
    first = chunk.start + 1
    return chunk.request.tokens[first : first + chunk.num_scored].tolist()
