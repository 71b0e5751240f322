"""Rows of batch-invariant mode in Triton's interpreter; a program of its own, which it needs."""

import os
import sys
import tempfile

import torch

import backends
from model.compile import traced_network
from model.compile.piecewise import compile_piecewise
from model.compile.stored_graphs import digest
from model.compile.traced_network import Mixing, trace_network
from model.errors import UnsupportedModelError
from model.forward import batch_invariant
from model.forward import invariant_kernels as kernels
from model.forward.batch_invariant import BatchInvariantNetwork, RowByRow, _fusible, check_rows
from model.forward.invariant_kernels import add_up, multiply
from tests.model.networks import build

CASES = ((70, 90, True), (64, 65, False), (1100, 3, False), (40, 4100, False))
"""Widths and counts; 4100 columns have wider tiles."""


def check_kernels(multiply, add_up):
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


def check_network():
    """A traced network, and its pieces, call these products; rows have the bits of a row alone."""
    model, device = build("qwen3", 25), torch.device("cpu")
    BatchInvariantNetwork(model, backends.get_backend("numba"), 9)  # it has our attention now
    network = model.network
    plain = digest(network)
    with RowByRow(in_tiles=True):
        assert digest(network) != plain
        for how in ("traced", "read from disk"):
            traced = trace_network(network, device, is_stored=True)
            called = [str(node.target) for node in traced.module.graph.nodes]
            assert called.count("kvcore_rows.multiply.default") == 15, how
            assert called.count("kvcore_rows.add_up.default") == 9, how
            assert not {"aten.linear.default", "aten.mean.dim"} & {*called}, how
    check_rows(traced, device, 320)
    pieces = compile_piecewise(_fusible(traced), "eager", is_alone=True)
    given = torch.arange(40)[None], torch.arange(40)[None], torch.arange(9), Mixing()
    with torch.inference_mode():
        assert torch.allclose(pieces.logits(*given), traced.logits(*given), atol=1e-5)
    codes = [piece._module.code for piece in pieces.pieces]
    assert sum(code.count("kvcore_rows.multiply") for code in codes) == 9, codes  # some joined
    assert not any("add_up" in code for code in codes)
    kernels.multiply = by_number(multiply)
    try:
        check_rows(traced, device, 320)
    except UnsupportedModelError:
        sys.stdout.write("found what was planted\n")


def main():
    torch.manual_seed(3)
    check_kernels(multiply, add_up)
    try:
        check_kernels(by_number(multiply), add_up)
    except AssertionError:
        sys.stdout.write("found what was planted\n")
    wide = torch.randn(90, 140)[:, :70]  # a weight whose rows have gaps
    x = torch.randn(3, 70)
    assert torch.equal(multiply(x, wide), multiply(x, wide.contiguous()))
    bias = torch.randn(180)[::2]
    assert torch.equal(multiply(x, wide, bias), multiply(x, wide, bias.contiguous()))
    batch_invariant._TRIED, traced_network._TRIALS = (2, 70), ((13, 6), (1, 1))  # it is slow
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KVCORE_CACHE_DIR"] = folder
        check_network()
    sys.stdout.write("a row is the same among any others\n")


if __name__ == "__main__":
    main()
