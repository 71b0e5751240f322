"""How a request begins: its line and its headers, which may not be endless. And how all end.

Decides: how long they may be (the parser of httptools has no limit of its own); how many requests
may be pipelined; that all requests of a connection end with it (uvicorn tells only the last one),
and that each can ask whether its client has left.

Does not know: what a header means.
"""

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 65_536
MAX_PIPELINED = 16


class BoundedProtocol(HttpToolsProtocol):
    """HTTP of uvicorn and httptools; a head that is too long is answered by 400."""

    _open: tuple[RequestResponseCycle, ...] = ()  # requests that are not answered
    _is_in_head = True
    _num_bytes = 0  # of the head, as they came; what came with its first byte is not counted
    _num_parsed = 0  # of its headers

    def data_received(self, data: bytes) -> None:
        """Read on."""
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head and not self.transport.is_closing():
            self._num_bytes += len(data)
            if self._num_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"headers: wanted at most {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        """Begin a head."""
        self._is_in_head, self._num_bytes, self._num_parsed = True, 0, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._num_parsed += len(name) + len(value) + len(": \r\n")
        if self._num_parsed > MAX_HEAD_BYTES:
            raise HttpParserError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head.

        Raises:
            HttpParserError: too many requests wait on this connection.
        """
        self._is_in_head = False
        if len(self.pipeline) >= MAX_PIPELINED:
            raise HttpParserError("too many pipelined requests")
        super().on_headers_complete()
        self._open = (*(one for one in self._open if not one.response_complete), self.cycle)
        cycle = self.cycle
        cycle.scope["state"]["has_left"] = lambda: cycle.disconnected
        if self.pipeline:
            self.flow.resume_reading()  # else the end of the connection is not seen

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client has gone."""
        super().connection_lost(exc)
        for one in self._open:
            if not one.response_complete:
                one.disconnected = True
                one.message_event.set()
