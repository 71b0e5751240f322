"""The passes over all logits of a step, which a device may have kernels for.

A draw reads every logit of a row for four purposes: to find the largest one, the `count` largest,
the distance at which a mass of `top_p` is reached, and the token at a given number of the
distribution. `Passes` names them. `PlainPasses` computes them with PyTorch's operators; on a GPU
`draw_kernels.py` does.

Decides: how a token weighs. It lies `distance = (best - logit) * sharpness` below the most likely
one, and weighs floor(exp(-distance) * 2**35). Weights are integers, so sums of them are exact in
float64 in any order, and tokens below 2**-35 of the most likely one are never drawn. Two histograms
of the weights, the second inside one bin of the first, give the threshold of top_p to 2**-17.

Does not know: requests, sampling parameters, in which order rows are cut (`sampler.py`).
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn

_CHUNK = 256
_SCALE = 2.0**35  # 2**18 such weights sum to less than 2**53
FINE = 17  # fractional bits of a threshold
BITS = 11  # of each of its two histograms: a distance of 2**5 weighs 0
_PIECE = 2**19  # logits that a core processes at once: they fit into its caches


class Passes(Protocol):
    """The passes over all logits."""

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row, and a token that has it.

        Args:
            logits: [num_rows, vocab_size]; with NaN in a row, its largest is not finite.

        Returns:
            Logits [num_rows], and tokens int64 [num_rows].
        """
        ...

    def top_values(self, logits: Tensor, count: int) -> Tensor:
        """Return the largest logits of each row, in falling order: [num_rows, count].

        Args:
            logits: [num_rows, vocab_size].
            count: at most vocab_size.
        """
        ...

    def nuclear_reach(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, top_p: Tensor
    ) -> Tensor:
        """Return the distance of the last token that top_p leaves: [num_rows, 1].

        It is at most 2**-17 more.

        Args:
            logits: [num_rows, vocab_size].
            best: float32 [num_rows, 1], the largest of each row.
            sharpness: float32 [num_rows, 1], 1 / temperature.
            top_p: float64 [num_rows, 1].
        """
        ...

    def invert(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, reach: Tensor, numbers: Tensor
    ) -> Tensor:
        """Return the token of each row at its number, in the order of the ids: int64 [num_rows].

        Args:
            logits: [num_rows, vocab_size].
            best: float32 [num_rows, 1], the largest of each row.
            sharpness: float32 [num_rows, 1], 1 / temperature.
            reach: float32 [num_rows, 1]; tokens at a larger distance weigh nothing.
            numbers: float64 [num_rows, 1], in [0, 1).
        """
        ...

    def log_sums(self, logits: Tensor) -> Tensor:
        """Return the logarithm of each row's sum of exp: float32 [num_rows, 1].

        The bits of a row do not depend on the other rows.

        Args:
            logits: [num_rows, vocab_size].
        """
        ...

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compile all kernels; a second per dtype, or nothing.

        Args:
            vocab_size: of the logits.
            dtype: of the logits; rows that are changed first are float32.
            device: of the logits.
        """
        ...


class PlainPasses:
    """The passes by PyTorch's operators. O(num_rows * vocab_size) each."""

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row, and a token that has it."""
        best, tokens = logits.max(dim=-1)
        return best, tokens

    def top_values(self, logits: Tensor, count: int) -> Tensor:
        """Return the largest logits of each row, in falling order."""
        return logits.topk(count).values

    def nuclear_reach(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, top_p: Tensor
    ) -> Tensor:
        """Return the distance of the last token that top_p leaves."""
        return _by_pieces(_nuclear_reach_of, logits, best, sharpness, top_p)

    def invert(
        self, logits: Tensor, best: Tensor, sharpness: Tensor, reach: Tensor, numbers: Tensor
    ) -> Tensor:
        """Return the token of each row at its number: first find its chunk, then the token."""
        vocab_size = logits.shape[-1]
        sums = _by_pieces(_chunk_sums, logits, best, sharpness, reach)
        before = sums.cumsum(dim=-1)
        chunk, target = _first_above(before, (numbers * before[:, -1:]).floor())
        target = target - (before.gather(1, chunk) - sums.gather(1, chunk))
        tokens = chunk * _CHUNK + torch.arange(_CHUNK, device=logits.device)
        inside = logits.gather(1, tokens.clamp(max=vocab_size - 1))
        distances = distances_of(inside, best, sharpness)
        weights = weights_of(distances).masked_fill(
            (distances > reach) | (tokens >= vocab_size), 0.0
        )
        place, _ = _first_above(weights.double().cumsum(dim=-1), target)
        return tokens.gather(1, place).squeeze(-1)

    def log_sums(self, logits: Tensor) -> Tensor:
        """Return the logarithm of each row's sum of exp.

        Row by row, because PyTorch adds up a row alone in another order than among others.
        """
        rows = logits.float().split(1)  # type: ignore[no-untyped-call]
        return torch.cat([row.logsumexp(dim=-1, keepdim=True) for row in rows])

    def warm_up(self, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Do nothing: there is nothing to compile."""


PLAIN = PlainPasses()


def distances_of(logits: Tensor, best: Tensor, sharpness: Tensor) -> Tensor:
    """Return the distance of each token from the most likely one: float32."""
    return (best - logits.float()) * sharpness


def weights_of(distances: Tensor) -> Tensor:
    """Return integer weights as float32; 2**35 for the most likely token."""
    return torch.exp(-distances).mul_(_SCALE).floor_()


def _chunk_sums(logits: Tensor, best: Tensor, sharpness: Tensor, reach: Tensor) -> Tensor:
    """Return the weight of each chunk of `_CHUNK` tokens: float64 [num_rows, chunks]."""
    distances = distances_of(logits, best, sharpness)
    weights = weights_of(distances).masked_fill(distances > reach, 0.0)
    padded = nn.functional.pad(weights, (0, -weights.shape[-1] % _CHUNK))
    return padded.view(weights.shape[0], -1, _CHUNK).sum(dim=-1, dtype=torch.float64)


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's first place with a sum above the target, and the target: [num_rows, 1].

    A target at the very end becomes the last integer below it: a number just below 1 rounds to it.
    """
    target = torch.minimum(target, cumulative[:, -1:] - 1)
    place = torch.searchsorted(cumulative, target, right=True)
    return place.clamp(max=cumulative.shape[-1] - 1), target


def _nuclear_reach_of(logits: Tensor, best: Tensor, sharpness: Tensor, top_p: Tensor) -> Tensor:
    distances = distances_of(logits, best, sharpness)
    weights = weights_of(distances).double()
    fine = distances.mul_(2.0**FINE).nan_to_num_(0.0).clamp_(max=2.0 ** (2 * BITS) - 1).int()
    coarse = (fine >> BITS).long()
    histogram = weights.new_zeros(len(logits), 1 << BITS).scatter_add_(1, coarse, weights)
    place, target = bin_of_mass(histogram, None, top_p)
    weights = weights.masked_fill_(coarse != place, 0.0)
    inside = (fine & ((1 << BITS) - 1)).long()
    histogram.zero_().scatter_add_(1, inside, weights)
    return reach_of_bins(place, bin_of_mass(histogram, target, top_p)[0])


def bin_of_mass(histogram: Tensor, target: Tensor | None, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's first bin at which its mass is reached, and the mass needed in that bin.

    Args:
        histogram: float64 [num_rows, bins].
        target: float64 [num_rows, 1], the mass; None: a share of the whole.
        top_p: float64 [num_rows, 1], that share.

    Returns:
        Each [num_rows, 1]: int64, and float64.
    """
    cumulative = histogram.cumsum(dim=-1)
    if target is None:
        target = top_p * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target).clamp_(max=histogram.shape[1] - 1)
    return place, target - (cumulative.gather(1, place) - histogram.gather(1, place))


def reach_of_bins(coarse: Tensor, fine: Tensor) -> Tensor:
    """Return the distance at the end of a fine bin inside a coarse one: float32 [num_rows, 1]."""
    reach = ((coarse << BITS) + fine + 1).float() * 2.0**-FINE
    return torch.nextafter(reach, torch.zeros_like(reach))  # excludes the start of the next bin


def _by_pieces(compute: Callable[..., Tensor], logits: Tensor, *columns: Tensor) -> Tensor:
    """Compute row by row; each CPU core processes as many rows as fit into its caches.

    Without this, torch would split each small operation among its threads: they would wait for each
    other hundreds of times, and on a busy machine each wait may take a time slice.
    """
    count = max(1, _PIECE // logits.shape[-1])
    if logits.device.type != "cpu" or count >= len(logits):
        return compute(logits, *columns)
    pieces = zip(*(torch.split(tensor, count) for tensor in (logits, *columns)), strict=True)
    workers = _workers(torch.get_num_threads())
    return torch.cat(list(workers.map(lambda piece: compute(*piece), pieces)))


@functools.cache
def _workers(count: int) -> ThreadPoolExecutor:
    """Return a pool of threads in each of which torch uses one thread; made once."""
    workers = ThreadPoolExecutor(count, "sampler", torch.set_num_threads, (1,))
    all_are_there = threading.Barrier(count)
    list(workers.map(lambda _: all_are_there.wait(), range(count)))
    torch.set_num_threads(count)  # the workers have changed it for later threads
    return workers
