"""Ranks of one engine as threads, and the messages between them.

What is left out is `torch.distributed` and its watchdog; `tests/model/ranks` runs them.
"""

import contextlib
import pickle


class SimulatedGroup:
    """What `TwinCore` asks of the ranks it shares a network with.

    Args:
        hosts: one for each rank.
        rank: the number of this one.
        queues: by receiver, and by sender: what is on its way.
    """

    def __init__(self, host, rank, queues):
        self.rank, self.leads, self.size = rank, rank == 0, len(queues)
        self._host, self._queues = host, queues

    def broadcast(self, message=None):
        """Rank 0 gives all others its message; each gets a copy of its own."""
        return pickle.loads(self._exchange(self.leads and pickle.dumps(message)))  # noqa: S301  # ours

    def all_gather(self, content):
        """What each has given: rank 0 collects and tells all."""
        if self.leads:
            found = [content, *(self._queues[0][rank].get() for rank in self._others())]
            self._exchange(found)
            return found
        self._queues[0][self.rank].put(content)
        return self._exchange(None)

    def disarm(self):
        """There is no watchdog."""

    def when_lost(self, tell):
        """Likewise."""

    @contextlib.contextmanager
    def detecting_loss(self, *, or_fail=False):
        """No rank is ever lost here."""
        del or_fail
        yield

    def _exchange(self, message):
        if not self.leads:
            return self._queues[self.rank][0].get()
        for rank in self._others():
            self._queues[rank][0].put(message)
        return message

    def _others(self):
        return range(1, len(self._queues))


def make_groups(host, size):
    """The ranks' ends of one group."""
    queues = [[host.queue() for _ in range(size)] for _ in range(size)]
    return [SimulatedGroup(host, rank, queues) for rank in range(size)]
