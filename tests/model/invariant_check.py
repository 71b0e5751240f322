"""Rows of `invariant_kernels` in Triton's interpreter; a program of its own, which it needs."""

import sys

import torch

from model.forward.invariant_kernels import multiply, sum_rows


def main():
    torch.manual_seed(3)
    for width, count, has_bias in ((70, 90, True), (64, 65, False), (1100, 3, False)):
        x, weight = torch.randn(2, 37, width), torch.randn(count, width)
        bias = torch.randn(count) if has_bias else None
        whole, sums = multiply(x, weight, bias), sum_rows(x)
        wanted = torch.nn.functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        assert (whole - wanted).abs().max() < 1e-3
        assert (sums - x.double().sum(-1)).abs().max() < 1e-3
        for first, last in ((0, 1), (5, 9), (36, 37)):
            assert torch.equal(multiply(x[1, first:last], weight, bias), whole[1, first:last])
            assert torch.equal(sum_rows(x[1, first:last]), sums[1, first:last])
    wide = torch.randn(90, 140)[:, :70]  # a weight whose rows have gaps
    assert torch.equal(multiply(x[..., :70], wide), multiply(x[..., :70], wide.contiguous()))
    sys.stdout.write("a row is the same among any others\n")


if __name__ == "__main__":
    main()
