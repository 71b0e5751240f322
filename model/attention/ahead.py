"""Attention of image tokens that see each other, as a batch of single tokens.

Where a query also sees the tokens of its image behind it, it becomes a sequence that ends
where the image does: a kernel that knows causal attention alone then shows it the whole image. A
window reaches back from the query, so it is longer by what is behind the query; queries with the
same number of tokens behind them share a call.

Decides: which rows of a step are computed in this way, and in which calls. Invariants: all keys of
the image are stored before, because one step computes all of its tokens.

Does not know: images, networks, requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

import backends


class AheadRun(NamedTuple):
    """Consecutive tokens of a step that see each other.

    Attributes:
        sequence: the number of their sequence in the step.
        first: the first of them in the step.
        start: its position in the sequence.
        stop: one past the position of the last of them; the last of the step's.
    """

    sequence: int
    first: int
    start: int
    stop: int


class _Call(NamedTuple):
    rows: Tensor  # int64 [num_rows] of the step
    batch: backends.PagedBatch
    behind: int  # tokens behind each query that it sees; 0: a window needs no change


@dataclass(frozen=True, slots=True)
class Ahead:
    """The runs of a step, for layers in which tokens see those behind them.

    Attributes:
        layers: the numbers of these layers in the network.
        calls: by window, None where there is none: for each KV cache group the calls.
    """

    layers: frozenset[int]
    calls: Mapping[int | None, Sequence[Sequence[_Call]]]

    @classmethod
    def of(
        cls,
        runs: Sequence[AheadRun],
        batches: Sequence[backends.PagedBatch],
        windows: Sequence[int | None],
        layers: frozenset[int],
        device: torch.device,
    ) -> "Ahead":
        """Return the calls of a step. O(rows * blocks of a sequence).

        Args:
            runs: of the step.
            batches: of the step, one for each group, on the host.
            windows: of each group.
            layers: as above.
            device: of the network.
        """
        pairs = [(run, place) for run in runs for place in range(run.start, run.stop)]
        calls = {}
        for window in {*windows}:
            far: dict[int, list[tuple[AheadRun, int]]] = {}
            for run, place in pairs:
                is_far = window is not None and run.stop > window
                far.setdefault(run.stop - 1 - place if is_far else 0, []).append((run, place))
            calls[window] = [
                [_call(rows, batch, behind, device) for behind, rows in far.items()]
                for batch in batches
            ]
        return cls(layers, calls)

    def attend(
        self,
        out: Tensor,
        backend: backends.Backend,
        query: Tensor,
        cache: backends.KVCache,
        group: int,
        terms: backends.AttentionTerms,
    ) -> None:
        """Overwrite the rows of these tokens in the result of a layer. One call of the backend.

        One for each distance from the end of an image that a window does not reach over.

        Args:
            out: [num_tokens, num_q_heads, value_dim].
            backend: computes it.
            query: [num_tokens, num_q_heads, head_dim].
            cache: of the layer; all keys of the step are stored.
            group: of the layer.
            terms: of the layer.
        """
        for rows, batch, behind in self.calls[terms.window][group]:
            wider = terms
            if terms.window is not None and behind:
                wider = replace(terms, window=terms.window + behind)
            out[rows] = backend.paged_attention(query[rows], cache, batch, wider)


def _call(
    pairs: Sequence[tuple[AheadRun, int]],
    batch: backends.PagedBatch,
    behind: int,
    device: torch.device,
) -> _Call:
    rows = torch.tensor([run.first + place - run.start for run, place in pairs])
    owners = torch.tensor([run.sequence for run, _ in pairs])
    stops = torch.tensor([run.stop for run, _ in pairs], dtype=torch.int32)
    single = backends.PagedBatch(
        query_start_loc=torch.arange(len(pairs) + 1, dtype=torch.int32).to(device),
        seq_lens=stops.to(device),
        block_table=batch.block_table[owners].to(device),
        slot_mapping=batch.slot_mapping[rows].to(device),
        max_query_len=1,
        max_seq_len=int(stops.max()),
        kept={},
    )
    return _Call(rows.to(device), single, behind)
