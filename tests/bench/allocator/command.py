"""`python -m tests.bench allocator [--workload W3 ...] [--peer vllm ...]`."""

from collections import defaultdict
from statistics import median

from tests.bench.allocator.ours import our_subjects
from tests.bench.allocator.peers import load_peer
from tests.bench.allocator.pools import w1, w2, w6, w11
from tests.bench.allocator.requests import w3, w4, w5, w7, w8, w9, w13
from tests.bench.allocator.steps import w10, w12
from tests.bench.allocator.verbs import w14, w15
from tests.bench.measure import Row, measure
from tests.bench.report import shown

HEADINGS = {
    "W1": "One block is taken out of a pool and given back.",
    "W2": "Many blocks are taken and given back at once.",
    "W3": "The life of a request: look up, hold what is cached, take blocks, publish, free.",
    "W4": "Decoding: each running request gets one token; each fills a block in 16 steps.",
    "W5": "A trace of conversations over a pool that evicts, net of its driver.",
    "W6": "A new pool, and the memory of its blocks.",
    "W7": "W3 and W4 for hybrid models: sliding-window layers beside full attention.",
    "W8": "W3 with KV events for a router, whose blocks are named by a hash.",
    "W9": "W4 and W5 by calls for each request, in place of one for a step.",
    "W10": "Single calls at their slowest: what a median hides and a user meets.",
    "W11": "Larger blocks.",
    "W12": "A busy step: requests decode, begin and end.",
    "W13": "An asynchronous decode step: it is scheduled before the tokens of the last are known.",
    "W14": "Calls that only kvcore has.",
    "W15": "What windows add to a step of kvcore: in time, and in bytecodes (Python build).",
}
_CASES = dict(
    zip(HEADINGS, (w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15), strict=True)
)


def add_flags(parser):
    parser.add_argument("--workload", nargs="+", choices=HEADINGS, default=[*HEADINGS], metavar="W")
    parser.add_argument(
        "--peer", action="append", default=[], help="vllm, or MODULE:FACTORY; repeatable"
    )


def rows(options):
    subjects = our_subjects() + [load_peer(where) for where in options.peer]
    for workload in dict.fromkeys(options.workload):
        for case in _CASES[workload](subjects, quick=options.quick):
            yield from [case] if isinstance(case, Row) else measure(case)


def summary(rows, *, quick):
    """A few lines: what a call costs here, and what is faster and slower than beside each peer."""
    yield "In short:"
    ours = [row for row in rows if row.subject == "kvcore"]
    for group, what, least, most in (
        ("W1", "take and free a block", 0, 1),
        ("W3", "a request's life, a block, nothing cached", 0, 0),
        ("W3", "the same, all blocks cached", 0.75, 1),
        ("W4", "decode, a request and step", 0, 1),
        ("W13", "decode asynchronously, a request and step", 0, 1),
        ("W12", "a busy step, a request", 0, 1),
    ):
        found = [row for row in ours if row.group == group and least <= (row.hit_rate or 0) <= most]
        each = [row.cost.median / row.per[0] for row in found]
        if each:
            low, high = shown(min(each), "ns"), shown(max(each), "ns")
            yield f"  {what}: {low if low == high else f'{low} to {high}'}"
    for row in [row for row in ours if row.unit == "bytes"]:
        others = [f"{one.median:.2f}x in {peer}" for peer, one in row.ratios.items()]
        yield "  " + ", ".join([f"{row.case[:-1]}: {shown(row.cost.median, 'bytes')}", *others])
    yield from _beside(ours)
    if quick:
        yield "  --quick: small cases and few rounds show that all works, and only roughly how fast"


def _beside(ours):
    """What is faster and slower than beside each peer."""
    beside = defaultdict(list)
    for row in [row for row in ours if row.unit == "ns"]:
        for peer, one in row.ratios.items():
            beside[peer].append((one.median, row))
    for peer, each in beside.items():
        each.sort(key=lambda one: one[0])
        slower = [one for one in each if one[0] < 1]
        yield (
            f"  beside {peer}: faster in {len(each) - len(slower)} of {len(each)} cases, "
            f"{median([one[0] for one in each]):.1f}x in the median"
        )
        for text, some in (("most", each[-2:][::-1]), ("least", each[:3])):
            yield from (f"    {text} {ratio:.2f}x: {row.group} {row.case}" for ratio, row in some)
    if not beside:
        yield "  no other allocator was measured: `--peer vllm` puts vLLM's beside it, if installed"
