"""Frames read back: what the page makes of them, in Python, one entry at a time."""


class Replay:
    def __init__(self, head):
        self.head = head
        self.clear()

    def clear(self):
        self.begun, self.labels, self.statuses, self.progress = {}, {}, {}, {}
        self.tables, self.cached, self.hits, self.counts = {}, {}, {}, {}
        self.time_s = None

    def apply(self, document):
        if document.get("whole"):
            self.clear()
        self.time_s = document["t"]
        self.counts = document["counts"]
        self.begun |= {n: about for n, *about in _grouped(document.get("begun", []), 3)}
        self.labels |= dict(_grouped(document.get("labels", []), 2))
        self.statuses |= dict(_grouped(document.get("status", []), 2))
        self.progress |= {n: both for n, *both in _grouped(document.get("progress", []), 3)}
        for number, group, first, runs in document.get("tables", []):
            table = self.tables.get((number, group), [])[:first]
            assert len(table) == first
            for start, count in _grouped(runs, 2):
                table += [0] * count if start == 0 else range(start, start + count)
            self.tables[number, group] = table
        for name in ("cached", "hits"):
            for start, count, value in _grouped(document.get(name, []), 3):
                getattr(self, name).update(dict.fromkeys(range(start, start + count), value))

    def held(self):
        """The tables that are not empty."""
        return {place: table for place, table in self.tables.items() if table}

    def state(self):
        """All that can be seen of it, but for requests that have ended."""
        alive = {n for n, s in self.statuses.items() if s in {"waiting", "running", "preempted"}}
        return (
            {n: (self.begun[n], self.labels.get(n)) for n in alive},
            {n: self.statuses[n] for n in alive},
            {n: self.progress[n] for n in alive},
            self.held(),
            {n for n, value in self.cached.items() if value},
            {n: value for n, value in self.hits.items() if value},
            self.counts,
        )


def _grouped(flat, size):
    assert len(flat) % size == 0
    return [flat[i : i + size] for i in range(0, len(flat), size)]
