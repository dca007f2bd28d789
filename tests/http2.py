"""HTTP/2 frames by hand: what a peer may send that no client library would."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

HEADERS: Final = 1
RST_STREAM: Final = 3
SETTINGS: Final = 4
MAX_CONCURRENT_STREAMS: Final = 3
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_END_STREAM: Final = 1
_END_HEADERS: Final = 4
_ACK: Final = 1


@dataclass(frozen=True)
class Frame:
    """One frame that came."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    def ends_stream(self) -> bool:
        return self.kind == RST_STREAM or bool(self.kind == HEADERS and self.flags & _END_STREAM)


class Http2:
    """One connection, in clear text, that begins calls of gRPC and need not go on with them."""

    def __init__(self, port: int, timeout_s: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout_s)
        self._streams = 0
        self._send(SETTINGS, 0, 0, b"", before=_PREFACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def begin(self, method: str, **metadata: str) -> int:
        """Send the headers of a call, and no message; return the stream's number."""
        stream = 2 * self._streams + 1
        self._streams += 1
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
            **metadata,
        }
        block = b"".join(_literal(name) + _literal(value, b"") for name, value in fields.items())
        self._send(HEADERS, _END_HEADERS, stream, block)
        return stream

    def frames(self) -> Iterator[Frame]:
        """Return what comes, until the other side hangs up; TimeoutError if nothing does."""
        with contextlib.suppress(EOFError):
            while True:
                head = self._read(9)
                length = int.from_bytes(head[:3], "big")
                stream = struct.unpack(">I", head[5:])[0] & 0x7FFFFFFF
                frame = Frame(head[3], head[4], stream, self._read(length))
                if frame.kind == SETTINGS and not frame.flags & _ACK:
                    self._send(SETTINGS, _ACK, 0, b"")
                yield frame

    def setting(self, number: int) -> int | None:
        """Return one of the other side's settings, which are the first that it sends."""
        first = next(self.frames())
        assert first.kind == SETTINGS
        pairs = struct.iter_unpack(">HI", first.payload)
        return {int(name): int(value) for name, value in pairs}.get(number)

    def wait_ended(self, streams: set[int]) -> None:
        """Wait until the other side has ended all of these; TimeoutError if it does not."""
        left = set(streams)
        for frame in self.frames():
            if frame.ends_stream():
                left.discard(frame.stream)
            if not left:
                return
        raise AssertionError(f"it hung up before {len(left)} of {len(streams)} had ended")

    def _send(
        self, kind: int, flags: int, stream: int, payload: bytes, before: bytes = b""
    ) -> None:
        head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream)
        self._socket.sendall(before + head + payload)

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            piece = self._socket.recv(count - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found


def _literal(text: str, before: bytes = b"\0") -> bytes:
    """Return a text as HPACK has it without a table or Huffman's code."""
    raw = text.encode()
    assert len(raw) < 127
    return before + bytes([len(raw)]) + raw
