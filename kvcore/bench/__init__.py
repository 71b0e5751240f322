"""Speed against another allocator, in one process: `python -m kvcore.bench`.

Twelve workloads, from one block taken and freed to the slowest call of a chat trace on a million
blocks, run on kvcore and on whatever `--peer MODULE:FACTORY` names, in turns. An adapter for
another allocator implements `Peer` and `Cache`; the measuring knows nothing of what is behind them.
Hits are counted beside the time, so that no speed is bought with misses. `docs/how-to/benchmark.md`
describes the workloads.
"""

from kvcore.bench.peer import Cache, Peer, PeerError, Release, Take, Tokens, Workload

__all__ = ["Cache", "Peer", "PeerError", "Release", "Take", "Tokens", "Workload"]
