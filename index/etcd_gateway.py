"""etcd's JSON gateway: the few calls that membership needs, with typed errors and deadlines.

Owns one HTTP client and which of the endpoints is asked. Says the same as etcd's gRPC interface, with
no stubs to generate and TLS that works. Keeps no state of the pool. Who calls it: ``index/etcd.py``.

What the gateway is like (etcd 3.4 and 3.5): bytes are base64, numbers are strings, false and empty
fields are absent; a lease that is over is answered with status 200 and no TTL.
"""

import base64
import binascii
import math
import socket
import ssl
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import httpx
import msgspec

from kvpool.errors import (
    ClosedError,
    ConfigError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)

Reply = TypeVar("Reply", bound=msgspec.Struct)

# The longest line of a watch, and the longest answer: members are a few hundred bytes each.
ANSWER_BYTES_MAX: Final = 4 << 20


class _Header(msgspec.Struct, frozen=True):
    cluster_id: str = ""
    revision: str = "0"


class _Pair(msgspec.Struct, frozen=True):
    key: str = ""
    value: str = ""
    mod_revision: str = "0"


class _Put(msgspec.Struct, frozen=True):
    header: _Header = _Header()


class _Nothing(msgspec.Struct, frozen=True):
    pass


class _Range(msgspec.Struct, frozen=True):
    header: _Header = _Header()
    kvs: list[_Pair] = []


class _Granted(msgspec.Struct, frozen=True):
    ID: str = ""
    error: str = ""


class _Alive(msgspec.Struct, frozen=True):
    TTL: str = "0"


class _AliveLine(msgspec.Struct, frozen=True):
    result: _Alive = _Alive()


class _Event(msgspec.Struct, frozen=True):
    kv: _Pair = _Pair()
    type: str = "PUT"


class _Watched(msgspec.Struct, frozen=True):
    created: bool = False
    canceled: bool = False
    compact_revision: str = "0"
    events: list[_Event] = []


class _WatchLine(msgspec.Struct, frozen=True):
    result: _Watched = _Watched()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All pairs below a prefix at one revision of one etcd cluster."""

    cluster: str
    revision: int
    pairs: list["Pair"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A key, its value (None: it was removed), and the revision that made it so."""

    key: bytes
    value: bytes | None
    revision: int


class Gateway:
    """Calls to one etcd cluster, from any thread. An endpoint that fails gives way to the next.

    Args:
        endpoints: URLs, such as ``http://10.0.0.5:2379``; tried in order.
        timeout_s: Longest wait of one call, connecting included.
        ca_file: Authority that signed etcd's certificate, for https; None: the system's.
        cert_file, key_file: This process's own certificate, if etcd asks for one.

    Raises:
        ConfigError: An endpoint is no URL, or a file cannot be used.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        timeout_s: float,
        ca_file: Path | None = None,
        cert_file: Path | None = None,
        key_file: Path | None = None,
    ) -> None:
        if not endpoints:
            raise ConfigError("no endpoint of etcd: name at least one", key="etcd.endpoints")
        if not 0 < timeout_s < math.inf:
            raise ConfigError(
                f"etcd.timeout_s is {timeout_s}: it must be above 0, and not infinite",
                key="etcd.timeout_s",
            )
        for endpoint in endpoints:
            if not _is_url(endpoint):
                raise ConfigError(
                    f"{endpoint!r} is no endpoint of etcd: write http://HOST:2379 or https://...",
                    key="etcd.endpoints",
                )
        self._endpoints = [endpoint.rstrip("/") for endpoint in endpoints]
        self._at = 0
        self._lock = threading.Lock()
        self._timeout_s = timeout_s
        self._ended = False
        self._watched: socket.socket | None = None  # so that a watch can be woken to end
        # trust_env off: a proxy of the environment must never come between the pool and etcd.
        self._client = httpx.Client(
            verify=_tls(ca_file, cert_file, key_file), timeout=timeout_s, trust_env=False
        )

    def read(self, prefix: bytes) -> Snapshot:
        """Return everything below a prefix, as a majority of etcd has it.

        Raises:
            UnavailableError: No endpoint gave an answer in time.
            UsageError: etcd refused: its message says why.
        """
        fields = {"key": _text(prefix), "range_end": _text(_end(prefix))}
        found = self._call("/v3/kv/range", fields, _Range)
        pairs = [_pair(pair, _bytes(pair.value)) for pair in found.kvs]
        return Snapshot(found.header.cluster_id, _number(found.header.revision), pairs)

    def put(self, key: bytes, value: bytes, lease: str) -> int:
        """Set a key that lives as long as a lease; return the revision. Raises as ``read``."""
        fields = {"key": _text(key), "value": _text(value), "lease": lease}
        return _number(self._call("/v3/kv/put", fields, _Put).header.revision)

    def grant(self, seconds: int) -> str:
        """Return a new lease, which ends ``seconds`` after its last ``keep_alive``."""
        granted = self._call("/v3/lease/grant", {"TTL": str(seconds)}, _Granted)
        if not granted.ID:
            raise UsageError(f"etcd grants no lease of {seconds} s: {granted.error or 'no reason'}")
        return granted.ID

    def keep_alive(self, lease: str) -> bool:
        """Prolong a lease; False: it is over, and its keys are gone."""
        line = self._call("/v3/lease/keepalive", {"ID": lease}, _AliveLine)
        return _number(line.result.TTL) > 0

    def revoke(self, lease: str) -> None:
        """End a lease, and remove its keys at once."""
        self._call("/v3/lease/revoke", {"ID": lease}, _Nothing)

    @contextmanager
    def watch(
        self, prefix: bytes, revision: int, silence_s: float
    ) -> Generator[Generator[list[Pair], None, None], None, None]:
        """Give the changes below a prefix from a revision on, in batches as they come.

        The iterator ends with the stream, when the revision was compacted, or after ``silence_s``
        without an event; whatever its end, ``read`` tells what is true then.

        Raises:
            UnavailableError: The connection failed; also while iterating.
        """
        create = {
            "key": _text(prefix),
            "range_end": _text(_end(prefix)),
            "start_revision": str(revision),
        }
        waits = httpx.Timeout(self._timeout_s, read=silence_s)
        with (
            self._translated(),
            self._client.stream(
                "POST", self._url("/v3/watch"), json={"create_request": create}, timeout=waits
            ) as response,
        ):
            if not response.is_success:
                raise PeerUnreachableError(f"etcd gave status {response.status_code} to a watch")
            stream = response.extensions["network_stream"]
            self._watched = stream.get_extra_info("socket")
            self._require_open()  # only now would ``end`` have found it
            yield _changes(response)

    def end(self) -> None:
        """Refuse new calls, and end a watch; calls under way end by their deadline. Idempotent."""
        self._ended = True
        watched = self._watched
        if watched is not None:
            with suppress(OSError):  # it ended by itself
                watched.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End, and close the connections. Nobody may be in a call any more. Idempotent."""
        self.end()
        self._client.close()

    def _call(self, path: str, fields: dict[str, str], kind: type[Reply]) -> Reply:
        self._require_open()
        with self._translated():
            response = self._client.post(self._url(path), json=fields)
            body = response.content
        if not response.is_success:
            said = body[:300].decode("utf-8", "replace")
            if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                self._next()
                raise PeerUnreachableError(f"etcd gave status {response.status_code}: {said}")
            raise UsageError(f"etcd refused {path} with status {response.status_code}: {said}")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            self._next()
            raise PeerUnreachableError(
                f"what answers at {self._url('')} does not speak etcd's JSON: {error}"
            ) from error

    def _require_open(self) -> None:
        if self._ended:
            raise ClosedError("this way to etcd was closed: open another")

    def _url(self, path: str) -> str:
        with self._lock:
            return self._endpoints[self._at] + path

    def _next(self) -> None:
        with self._lock:
            self._at = (self._at + 1) % len(self._endpoints)

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except httpx.TimeoutException as error:
            self._next()
            raise TransferTimeoutError(f"etcd did not answer within {self._timeout_s} s") from error
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            self._next()
            raise PeerUnreachableError(f"etcd cannot be reached: {error}") from error


def _is_url(endpoint: str) -> bool:
    try:
        url = httpx.URL(endpoint)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def _changes(response: httpx.Response) -> Generator[list[Pair], None, None]:
    kept = b""
    try:
        for piece in response.iter_bytes():
            kept += piece
            *lines, kept = kept.split(b"\n")
            if len(kept) > ANSWER_BYTES_MAX:
                return
            for line in lines:
                if not line.strip():
                    continue
                watched = msgspec.json.decode(line, type=_WatchLine).result
                if watched.canceled or _number(watched.compact_revision):
                    return
                yield [_change(event) for event in watched.events]
    except (httpx.ReadTimeout, msgspec.DecodeError):
        return


def _change(event: _Event) -> Pair:
    return _pair(event.kv, None if event.type == "DELETE" else _bytes(event.kv.value))


def _pair(pair: _Pair, value: bytes | None) -> Pair:
    return Pair(_bytes(pair.key), value, _number(pair.mod_revision))


def _tls(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    if (cert is None) != (key is None):
        raise ConfigError("a certificate and its key go together", key="etcd.cert_file")
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
        if cert is not None and key is not None:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"etcd's TLS files cannot be used: {error}", key="etcd.ca_file"
        ) from error
    return context


def _end(prefix: bytes) -> bytes:
    """Return the first key behind all keys with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise PeerUnreachableError(
            f"what answers is no etcd: {text[:40]!r} is no number"
        ) from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise PeerUnreachableError(f"what answers is no etcd: {error}") from error
