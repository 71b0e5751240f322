"""A small scheduler with loads over kvcore, and what may go wrong in one."""

import kvcore
from kvcore.testing import Chunk, Load, Plan


class Scheduler:
    """First come, first served; a request that finds no room waits at the end of the queue."""

    def start(self, num_blocks, block_size):
        self.kv = kvcore.KVCacheManager(num_blocks, block_size)
        self.waiting, self.open, self.loads = [], {}, {}
        return self.kv.num_usable_blocks

    def add(self, request, tokens, num_new_tokens, num_stored):
        self.open[request] = [None, list(tokens), len(tokens) + num_new_tokens, num_stored]
        self.waiting.append(request)

    def abort(self, request):
        sequence = self.open.pop(request)[0]
        if sequence is not None:
            self.kv.close(sequence)
        if request in self.waiting:
            self.waiting.remove(request)

    def schedule(self):
        chunks, loads = [], []
        for request in [*self.waiting]:
            self.waiting.remove(request)
            sequence = self.kv.open(self.open[request][1])
            self.open[request][0] = sequence
            stored = self.open[request][3]
            try:
                if stored > sequence.num_computed_tokens:
                    loads.append(self.load(request, sequence, stored))
            except kvcore.OutOfBlocksError:
                self.wait_again(request)
        for request, (sequence, *_) in self.open.items():
            if sequence is None or request in self.loads:
                continue
            start = sequence.num_computed_tokens
            count = sequence.num_tokens - start
            if not count:
                continue
            try:
                self.kv.reserve(sequence, count)
            except kvcore.OutOfBlocksError:
                self.wait_again(request)
                continue
            chunks.append(Chunk(request, start, count, list(sequence.block_table)))
            self.kv.commit(sequence, count)
        return Plan(chunks, loads)

    def load(self, request, sequence, stored):
        self.loads[request] = lease = self.kv.begin_load(sequence, stored)
        start = lease.load.first_blocks[0] * self.kv.block_size
        return Load(request, start, list(lease.load.block_ids[0]))

    def wait_again(self, request):
        self.kv.close(self.open[request][0])
        self.open[request][0] = None
        self.waiting.append(request)

    def update(self, tokens, loaded, failed):
        for request in loaded:
            self.arrived(request, self.loads.pop(request), is_good=request not in failed)
        ended = []
        for request, token in tokens.items():
            sequence, text, stop, _ = self.open[request]
            text.append(token)
            self.kv.append(sequence, token)
            if len(text) == stop:
                self.abort(request)
                ended.append(request)
        return ended

    def arrived(self, request, lease, *, is_good):
        if is_good:
            self.kv.commit_load(lease)
        else:
            self.kv.fail_transfer(lease)
            if request in self.open:
                self.open[request][3] = 0

    def num_free_blocks(self):
        return self.kv.num_free_blocks


class FreesAtTheAbort(Scheduler):
    """The blocks of a load are handed out while it may still write them."""

    def abort(self, request):
        if request in self.loads:
            self.loads[request].end()
        super().abort(request)


class CommitsTheFailed(Scheduler):
    """A load counts whatever it has brought."""

    def arrived(self, request, lease, *, is_good):
        super().arrived(request, lease, is_good=True)


class ForgetsTheLate(Scheduler):
    """The load of an aborted request is never given back."""

    def arrived(self, request, lease, *, is_good):
        if request in self.open:
            super().arrived(request, lease, is_good=is_good)


class WaitsForTheFailed(Scheduler):
    """A request whose load has failed is not computed."""

    def arrived(self, request, lease, *, is_good):
        super().arrived(request, lease, is_good=is_good)
        if not is_good:
            self.loads[request] = lease


class TellsTheEndTooEarly(Scheduler):
    """A request ends one token short."""

    def add(self, request, tokens, num_new_tokens, num_stored):
        super().add(request, tokens, max(1, num_new_tokens - 1), num_stored)


class Ahead(Scheduler):
    """The next step is planned before the tokens of the last are read."""

    num_steps_ahead = 1

    def start(self, num_blocks, block_size):
        self.steps = []
        return super().start(num_blocks, block_size)

    def schedule(self):
        plan = super().schedule()
        self.steps.append([self.lease(self.open[chunk.request][0]) for chunk in plan.chunks])
        for chunk in plan.chunks:
            sequence, _, stop, _ = self.open[chunk.request]
            if sequence.num_tokens < stop - 1:
                self.kv.expect(sequence, 1)
        return plan

    def lease(self, sequence):
        return self.kv.lease(sequence)

    def update(self, tokens, loaded, failed):
        for lease in self.steps.pop(0):
            lease.end()
        for request in loaded:
            self.arrived(request, self.loads.pop(request), is_good=request not in failed)
        ended = []
        for request in [request for request in tokens if request in self.open]:
            sequence, text, stop, _ = self.open[request]
            text.append(tokens[request])
            if sequence is not None and sequence.num_unknown_tokens:
                self.kv.resolve(sequence, [tokens[request]])
            if len(text) == stop:
                self.abort(request)
                ended.append(request)
        return ended


class FreesUnderTheStep(Ahead):
    """vllm#45357: a load is given blocks that a step under way may write."""

    def lease(self, sequence):
        return self.kv.leases.begin([], "step", "", None)
