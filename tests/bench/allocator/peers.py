"""What an allocator must offer to be measured, and how it is named: `--peer MODULE:FACTORY`.

`factory()` returns an object with

- `name`: what tables call it;
- `packed`: whether prompts are `array("I")`, else `list[int]`;
- `can`: the names of the options and calls below that it has;
- `make_pool(num_blocks, block_size)`: the functions `take(count)` and `release(taken)` of a pool
  with caching on ("pool");
- `make_cache(num_blocks, block_size, **options)`: a `Cache`, all its blocks free. Options:
  `windows` (a sliding-window group of each size beside full attention), `events` (record what is
  stored and removed), `hashing` ("sha256" or "xxh3", of events), `caching=False` (nothing is
  published), `how` (see `Cache.decode`).

The calls of a `Cache` are all that is timed, so an adapter should do in them what an engine that
uses the allocator does for the same purpose, and nothing else. `--peer vllm` is the adapter in
`vllm.py`.
"""

import importlib
from typing import Protocol

from tests.bench.measure import BenchError, Subject

SHORT = {"vllm": "tests.bench.allocator.vllm:Peer"}


class Cache(Protocol):
    """A pool of blocks with prefix caching."""

    def start(self, tokens):
        """Begin a request and prefill it whole; return the request.

        Hash or pack the prompt, look it up, hold what hits (never the last token), take blocks for
        the rest, publish every full one. It must raise if the pool is too small.
        """

    def decode(self, requests, tokens):
        """Decode one step: append `tokens[i]` to `requests[i]`, compute it, publish full blocks.

        `how` is "step" (as fast as the allocator can), "requests" (by calls for each request) or
        "ahead" (the step is scheduled before its tokens are known, which come one call later).
        """

    def mixed(self, requests, tokens, prompts):
        """Decode, and begin requests whose prompts are computed in the same step; return those."""

    def finish(self, request):
        """End a request: its blocks are free, and can be hit until they are reused."""

    def num_hit_tokens(self):
        """How many prompt tokens were found cached so far."""

    def take_events(self):
        """What was stored and removed since the last call ("events")."""

    def reset(self):
        """Forget all cached content ("reset")."""


def load_peer(where):
    """Import a module and call its factory; the subject that is measured."""
    module_name, colon, factory_name = SHORT.get(where, where).partition(":")
    if not (module_name and colon and factory_name):
        raise BenchError(f"--peer: wanted {', '.join(SHORT)} or MODULE:FACTORY, got {where!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BenchError(f"--peer {where}: cannot import {module_name}: {error}") from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise BenchError(f"--peer {where}: {module_name} has no factory {factory_name}")
    peer = factory()
    for attribute in ("name", "packed", "can"):
        if not hasattr(peer, attribute):
            raise BenchError(f"--peer {where}: the peer has no attribute {attribute!r}")
    return Subject(peer.name, peer)


def able(subjects, *needs, lists=False):
    """The subjects that have all of what is needed; ours with lists only where that matters."""
    return [
        subject
        for subject in subjects
        if subject.peer.can.issuperset(needs)
        and (lists or subject.peer.packed or not subject.is_ours)
    ]


def needs_of(options):
    """What a peer must have to be given these options."""
    names = {name for name, value in options.items() if value and name != "how"}
    how = options.get("how", "step")
    return names | ({how} if how != "step" else set())
