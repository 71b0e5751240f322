"""A network between simulated processes: what `kvcore.wire.Transport` gives, without sockets.

What is published may be lost, late (so it comes behind what was sent later) or repeated, for each
reader by itself. A request and its answer come in order, late, or from some message on not at all.
Connections to an address are made anew when another process is bound to it; a process that was
killed is silent, and its address is free. What is left out is ZeroMQ; `tests/kvcore/wire` runs it.
"""

from collections import deque

from kvcore import wire


class Network:
    """Who is bound where, and what goes wrong on the way.

    Args:
        loop: time, and who goes first.
        faults: which of "lose", "late", "repeat" and "mute" (no request arrives) happen, until
            `calm`.
    """

    def __init__(self, loop, faults=()):
        self.loop, self.faults = loop, frozenset(faults)
        self._bound = {}  # by address
        self._listening = []

    def calm(self):
        """Nothing goes wrong any more."""
        self.faults = frozenset()

    def transport(self, host):
        """What one publisher or subscriber of a process uses."""
        return SimulatedTransport(self, host)

    def bind(self, socket):
        before = self._bound.get(socket.address)
        if before is not None and before.is_open:
            raise wire.EndpointError("endpoint", socket.address, "in use")
        self._bound[socket.address] = socket
        for listener in self._listening:
            if listener.address == socket.address:
                self._connect(listener)

    def listen(self, socket):
        self._listening = [one for one in self._listening if one.is_open] + [socket]
        if self.bound(socket.address) is not None:
            self._connect(socket)

    def bound(self, address):
        socket = self._bound.get(address)
        return socket if socket is not None and socket.is_open else None

    def publish(self, sender, frames):
        for listener in self._listening:
            if listener.is_open and listener.address == sender.address:
                for _ in range(1 + self._happens("repeat")):
                    if listener.num_connected and not self._happens("lose"):
                        self.carry(listener, frames, self.delay_s())

    def carry(self, receiver, frames, delay_s):
        self.loop.at(self.loop.now + delay_s, lambda: receiver.put(list(frames)))

    def delay_s(self):
        draw = self.loop.draw
        return 0.0001 + (draw.random() * 0.05 if self._happens("late") else 0.0)

    def cuts(self, chance):
        """Whether a request or an answer goes no further."""
        return self._happens("lose", chance)

    def _happens(self, fault, chance=0.15):
        return fault in self.faults and self.loop.draw.random() < chance

    def _connect(self, listener):
        self.loop.at(self.loop.now + 0.0002, listener.connect)


class SimulatedSocket:
    """What `kvcore.wire.Socket` is; `kind` says which end of what."""

    def __init__(self, transport, kind, address):
        self.address, self.kind = address, kind
        self.num_connected = 0
        self._transport, self._network = transport, transport.network
        self._is_closed = False
        self._received = deque()
        self._peer = self._comes_at = None  # of a request: who answers; when the last message comes
        self._clients = {}

    @property
    def is_open(self):
        return not (self._is_closed or self._transport.host.is_killed)

    def send(self, frames):
        network = self._network
        if self.kind == "publish":
            network.publish(self, frames)
        elif self.kind == "ask":
            receiver = network.bound(self.address)
            if receiver is not None and not network.cuts(0.1) and "mute" not in network.faults:
                name = b"%d" % len(receiver._clients)
                receiver._clients[name] = self
                network.carry(receiver, (name, *frames), network.delay_s())
        else:
            client = self._clients[frames[0]]
            if client is not None and network.cuts(0.01):
                client = self._clients[frames[0]] = None
            if client is not None:
                now = network.loop.now
                client._comes_at = max(client._comes_at or 0.0, now + network.delay_s()) + 1e-6
                network.carry(client, frames[1:], client._comes_at - now)

    def receive(self):
        return self._received.popleft() if self._received else None

    def put(self, frames):
        if self.is_open:
            self._received.append(frames)
            self._transport.wake()

    def connect(self):
        self.num_connected += 1

    def num_connections(self):
        return self.num_connected

    @property
    def has_message(self):
        return bool(self._received)

    def close(self):
        self._is_closed = True


class SimulatedTransport:
    """What `kvcore.wire.Transport` is."""

    def __init__(self, network, host):
        self.network, self.host, self._loop = network, host, host.loop
        self._sockets, self._waiters, self._joining = [], [], []
        self._is_woken, self.is_running = False, False

    def now_s(self):
        return self._loop.now

    def time_s(self):
        return 1.7e9 + self._loop.now + self.host.offset_s

    def publish(self, endpoint):
        return self._bind("publish", endpoint)

    def answer(self, endpoint):
        return self._bind("answer", endpoint)

    def listen(self, endpoint, topic, max_bytes):
        assert not topic
        del max_bytes
        socket = self._open("listen", endpoint)
        self.network.listen(socket)
        return socket

    def ask(self, endpoint, max_bytes):
        del max_bytes
        return self._open("ask", endpoint)

    def wait(self, sockets, timeout_s):
        until_s = None if timeout_s is None else self._loop.now + timeout_s
        if not self._is_woken and not any(socket.has_message for socket in sockets):
            self._loop.park(self._waiters, until_s)
        self._is_woken = False
        return {socket for socket in sockets if socket.has_message}

    def wake(self):
        self._is_woken = True
        self._loop.wake(self._waiters)

    def start(self, name, run):
        del name
        self.is_running = True

        def run_and_close():
            try:
                run()
            finally:
                self.is_running = False
                self.close()
                self._loop.wake(self._joining)

        self._loop.start_thread(run_and_close, self.host)

    def join(self, timeout_s):
        """Wait for the thread; on the loop, which must not wait, it ends a little later."""
        if self.is_running and self._loop.is_thread():
            self._loop.park(self._joining, self._loop.now + timeout_s)

    def close(self):
        for socket in self._sockets:
            socket.close()

    def _open(self, kind, endpoint):
        socket = SimulatedSocket(self, kind, endpoint)
        self._sockets.append(socket)
        return socket

    def _bind(self, kind, endpoint):
        socket = self._open(kind, endpoint)
        self.network.bind(socket)
        return socket
