"""How a request begins: its line and its headers, which may not be endless.

Decides: how long they may be; the parser of httptools has no limit of its own.

Does not know: what a header means.
"""

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536


class BoundedProtocol(HttpToolsProtocol):
    """HTTP of uvicorn and httptools; a head that is too long is answered by 400."""

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
        """End the head."""
        self._is_in_head = False
        super().on_headers_complete()
