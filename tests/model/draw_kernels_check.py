"""The kernels of a draw beside PyTorch's operators, in Triton's interpreter or on a GPU.

A program of its own, because TRITON_INTERPRET has to be set before triton is first imported.
"""

import sys

import torch

from model.sample import draw_kernels
from model.sample.passes import PLAIN


class TakesAChunkLess(draw_kernels.GpuPasses):
    """Looks for the largest in one chunk less than there may be."""

    def top_values(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        """As above."""
        found = super().top_values(logits, max(1, count - 1))
        return torch.nn.functional.pad(found, (0, count - found.shape[1]), value=-torch.inf)


def check(device: str, rounds: int, passes: draw_kernels.GpuPasses) -> int:
    """Compare all passes on logits of several sizes and kinds; how many were drawn.

    Raises:
        AssertionError: they differ.
    """
    drawn = 0
    for dtype in (torch.float32, torch.bfloat16):
        passes.warm_up(9000, dtype, torch.device(device))
    for number in range(rounds):
        torch.manual_seed(number)
        rows, vocab_size = (1, 3, 7)[number % 3], (40, 128, 300, 9000)[number % 4]
        logits = torch.randn(rows, vocab_size) * (1, 5)[number % 2]
        if number % 5 == 1:
            logits = logits.round()  # ties
        if number % 5 == 2:
            logits[:, torch.randperm(vocab_size)[: vocab_size // 2]] = -torch.inf
        logits = logits.to((torch.float32, torch.bfloat16, torch.float16)[number % 3])
        if number % 2:  # rows of something wider
            logits = torch.cat([logits, logits + 1], dim=1)[:, :vocab_size]
        here = logits.to(device)
        best, tokens = (part.cpu() for part in passes.most_likely(here))
        assert torch.equal(best, logits.amax(dim=-1)), "largest"
        assert torch.equal(tokens, (logits == best[:, None]).int().argmax(dim=-1)), "first"
        for count in (1, 2, 20, min(64, vocab_size), vocab_size):
            found = passes.top_values(here, count).cpu()
            assert torch.equal(found, PLAIN.top_values(logits, count)), f"top {count}"
        columns = (
            best[:, None].float(),
            torch.rand(rows, 1) * 3,
            torch.tensor([[torch.inf], [0.0], [4.0]]).repeat(3, 1)[:rows],
            torch.rand(rows, 1, dtype=torch.float64),
        )
        top_p = torch.rand(rows, 1, dtype=torch.float64)
        given = (columns[0], columns[1], top_p)
        far = passes.nuclear_reach(here, *[part.to(device) for part in given]).cpu()
        assert torch.equal(far, PLAIN.nuclear_reach(logits, *given)), f"mass {number}"
        wide = [torch.cat([part, part], dim=1).to(device)[:, :1] for part in columns]
        got = passes.invert(here, *wide).cpu()
        assert torch.equal(got, PLAIN.invert(logits, *columns)), f"token {number}"
        drawn += len(got)
    broken = torch.zeros(2, 300)
    broken[0, 5] = torch.nan
    best, _ = passes.most_likely(broken.to(device))
    assert best.isfinite().tolist() == [False, True], "what is no number"
    return drawn


if __name__ == "__main__":
    rounds = int(sys.argv[2])
    sys.stdout.write(f"{check(sys.argv[1], rounds, draw_kernels.GpuPasses())} draws")
    if "planted" in sys.argv:
        check(sys.argv[1], rounds, TakesAChunkLess())
