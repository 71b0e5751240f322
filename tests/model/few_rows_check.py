"""Products of few rows, and rotated heads, beside float64, in Triton's interpreter or on a GPU.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
"""

import itertools
import sys
from functools import partial

import torch
from torch.nn import functional

from model.compile import few_rows_kernels, jobs
from model.compile.few_rows_kernels import Cut, multiply, rotate

SHAPES = (  # width, count, cut
    (48, 64, None),
    (64, 33, None),
    (1024, 24, None),
    (3072, 9, None),
    (5000, 20, None),
    (300, 21, Cut(tile=4, step=64, stages=2, warps=4)),
)


def wanted(x, weight, bias, scale, eps, residual, *, is_gated):
    """What `multiply` gives, from operators."""
    x = x.reshape(1, -1, weight.shape[1])
    if scale is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale
    out = functional.linear(x, weight, bias)
    if is_gated:
        gate, up = out.chunk(2, -1)
        out = functional.silu(gate) * up
    return out if residual is None else out + residual


ALL = tuple(itertools.product((False, True), repeat=4))
"""Gated, normed, with a bias, added."""
IN_LAYERS = (
    (False, True, False, False),
    (False, False, False, True),
    (True, True, False, False),
    (True, True, True, True),
)


def check(device, dtypes, product=multiply, kinds=ALL):
    """Compare kinds of product; how many there were.

    Raises:
        AssertionError: they differ.
    """
    torch.manual_seed(0)
    count = 0
    for dtype, (is_gated, normed, biased, added), (width, rows_out, cut) in itertools.product(
        dtypes, kinds, SHAPES
    ):
        rows = (2, 4)[count % 2]
        halves = rows_out * (1 + is_gated)
        x = (torch.randn(rows, width) * 3).to(dtype)
        weight = (torch.randn(halves, width) / width**0.5).to(dtype)
        bias = torch.randn(halves).to(dtype) if biased else None
        scale = (torch.rand(width) + 0.5).to(dtype) if normed else None
        residual = torch.randn(1, rows, rows_out).to(dtype) if added else None
        given = (x, weight, bias, scale, 0.01, residual)
        exact = wanted(
            *[one.double() if isinstance(one, torch.Tensor) else one for one in given],
            is_gated=is_gated,
        )
        sent = [one.to(device) if isinstance(one, torch.Tensor) else one for one in given]
        got = product(*sent, is_gated=is_gated, cut=cut).cpu().double()
        assert got.shape == exact.shape
        error = (got - exact).norm() / exact.norm()
        assert error < max(1e-6, torch.finfo(dtype).eps), f"{x.shape} {exact.shape} {cut}: {error}"
        count += 1
    return count


def rotated(product, cos, sin, q_scale, k_scale, eps, num_q_heads, num_kv_heads):
    """What `rotate` gives, from operators."""
    dim = cos.shape[-1]
    heads = product[0].view(product.shape[1], -1, dim)
    parts = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    out = []
    for part, scale in zip(parts[:2], (q_scale, k_scale), strict=True):
        h = part
        if scale is not None:
            h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * scale
        low, high = h.chunk(2, -1)
        out.append(h * cos[0, :, None] + torch.cat([-high, low], -1) * sin[0, :, None])
    return *out, parts[2]


def check_heads(device, dtypes):
    """Compare rotated heads; how many kinds there were.

    Raises:
        AssertionError: they differ.
    """
    torch.manual_seed(1)
    count = 0
    for dtype, dim, normed, tokens in itertools.product(
        dtypes, (16, 48, 128), (False, True), (2, 4)
    ):
        product = (torch.randn(1, tokens, (6 + 2 + 2) * dim) * 3).to(dtype)
        angles = torch.rand(1, tokens, dim) * 6
        scales = [(torch.rand(dim) + 0.5).to(dtype) if normed else None for _ in range(2)]
        given = (product, angles.cos().to(dtype), angles.sin().to(dtype), *scales, 0.01, 6, 2)
        exact = rotated(*[one.double() if isinstance(one, torch.Tensor) else one for one in given])
        sent = [one.to(device) if isinstance(one, torch.Tensor) else one for one in given]
        for got, want in zip(rotate(*sent), exact, strict=True):
            assert got.shape == want.shape
            error = (got.cpu().double() - want).norm() / want.norm()
            assert error < max(1e-6, torch.finfo(dtype).eps), f"{dtype} {dim}: {error}"
        count += 1
    return count


def check_noted():
    """Launches that are noted are not made, each kind is there once, and any process can make it.

    Raises:
        AssertionError: so it is not.
    """
    weight, launched = torch.ones(8, 64), []
    kernel = few_rows_kernels._multiply
    few_rows_kernels._multiply = Launched(launched)
    with few_rows_kernels.noting() as noted:
        for rows in (2, 4, 4):
            multiply(torch.ones(rows, 64), weight)
        rotate(
            torch.ones(1, 4, 64), torch.ones(1, 4, 16), torch.ones(1, 4, 16), None, None, 0.1, 2, 1
        )
    assert not launched
    assert len(noted) == 3
    jobs.run(jobs.write(partial(jobs.do_all, [*noted]), torch.device("cpu")))
    few_rows_kernels._multiply = kernel
    made = [[tuple(one.shape) for one in given if torch.is_tensor(one)] for given in launched]
    assert made == [[(n, 64), (8, 64), *[(n, 64)] * 3, (1, n, 8)] for n in (2, 4)]


class Launched(list):
    """Stands for a kernel: notes its arguments."""

    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *given, **_: self.launched.append(given)


def without_the_last(*given, **how):
    """A planted bug: the last number of each row of the weight is not read."""
    x, weight, *rest = given
    weight = weight.clone()
    weight[:, -1] = 0
    return multiply(x, weight, *rest, **how)


def main() -> None:
    """As it is, then with the bug."""
    check_noted()
    count = check("cpu", (torch.float32,)) + check_heads("cpu", (torch.float32,))
    try:
        check("cpu", (torch.float32,), without_the_last)
    except AssertionError:
        sys.stdout.write(f"{count} caught\n")


if __name__ == "__main__":
    main()
