"""Rows of batch-invariant mode in Triton's interpreter; a program of its own, which it needs."""

import os
import sys
import tempfile

import torch

import backends
from model.compile.stored_graphs import digest
from model.compile.traced_network import trace_network
from model.forward.batch_invariant import BatchInvariantNetwork, RowByRow
from model.forward.invariant_kernels import add_up, multiply
from tests.model.networks import build

CASES = ((70, 90, True), (64, 65, False), (1100, 3, False), (40, 4100, False))
"""Widths and counts; 4100 columns have wider tiles."""


def check_rows(multiply, add_up):
    """A row comes out the same among any others, and right."""
    for width, count, has_bias in CASES:
        x, weight = torch.randn(2, 37, width), torch.randn(count, width)
        bias = torch.randn(count) if has_bias else None
        whole, sums, means = multiply(x, weight, bias), add_up(x, False), add_up(x, True)
        wanted = torch.nn.functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        assert (whole - wanted).abs().max() < 1e-3
        assert (sums - x.double().sum(-1)).abs().max() < 1e-3
        assert (means - x.double().mean(-1)).abs().max() < 1e-5
        for first, last in ((0, 1), (5, 9), (36, 37)):
            assert torch.equal(multiply(x[1, first:last], weight, bias), whole[1, first:last])
            assert torch.equal(add_up(x[1, first:last], False), sums[1, first:last])


def by_number(multiply):
    """Planted: few rows are added up in another order."""

    def product(x, weight, bias=None):
        if x.numel() // x.shape[-1] < 8:
            x, weight = x.flip(-1), weight.flip(-1)
        return multiply(x, weight, bias)

    return product


class Alone:
    """A pass in which each token attends to itself."""

    def attend(self, layer, query, key, value, terms, chosen=None):
        """Rows of the arguments, mixed."""
        group = query.shape[1] // key.shape[1]
        return query * terms.scale + key.repeat_interleave(group, 1) + layer


def check_trace():
    """A traced network calls these products, and gives a row the bits that it has alone."""
    model, device = build("qwen3", 25), torch.device("cpu")
    BatchInvariantNetwork(model, backends.get_backend("numba"))  # it has our attention now
    network = model.network
    plain = digest(network)
    with RowByRow(in_tiles=True):
        assert digest(network) != plain
        for how in ("traced", "read from disk"):
            traced = trace_network(network, device, is_stored=True)
            called = [str(node.target) for node in traced.module.graph.nodes]
            assert called.count("kvcore_rows.multiply.default") >= 15, how
            assert called.count("kvcore_rows.add_up.default") >= 9, how
            assert not any(" linear" in one or " mean" in one for one in called), how
    ids = torch.arange(1, 71)[None]
    with torch.inference_mode():
        whole = traced.logits(ids, ids % 7, ids[0] - 1, Alone())
        for row in (0, 3, 69):
            one = ids[:, row : row + 1]
            assert torch.equal(traced.logits(one, one % 7, one[0] * 0, Alone())[0], whole[row])


def main():
    torch.manual_seed(3)
    check_rows(multiply, add_up)
    try:
        check_rows(by_number(multiply), add_up)
    except AssertionError:
        sys.stdout.write("found what was planted\n")
    wide = torch.randn(90, 140)[:, :70]  # a weight whose rows have gaps
    x = torch.randn(3, 70)
    assert torch.equal(multiply(x, wide), multiply(x, wide.contiguous()))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVCORE_CACHE_DIR"] = folder
        check_trace()
    sys.stdout.write("a row is the same among any others\n")


if __name__ == "__main__":
    main()
