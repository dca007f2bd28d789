"""Events: every change of state that someone may want to log, count or replay.

Owns the event classes and the sinks. An EventSink must not block. Times are monotonic nanoseconds,
comparable between processes of one host. Who calls it: every wing and the runtime.
"""

import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import msgspec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    at_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerComputed(Event):
    """A forward pass ended one layer of one chunk. ``began_ns`` is when the layer began."""

    request: str
    chunk: int
    layer: int
    began_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceAnnounced(Event):
    """Layer slices were handed to the transport: on their way from here on."""

    request: str
    chunk: int
    layer: int
    blocks: int
    staged_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceArrived(Event):
    """The arrival of layer slices was signalled to the receiver."""

    request: str
    layer: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReadBegun(Event):
    """The receiver began to read (pull) layer slices of one layer; its time is before the first byte."""

    request: str
    layer: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRead(Event):
    """The receiver read (pulled) layer slices of one layer."""

    request: str
    layer: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRan(Event):
    """One forward pass of a worker: how many requests and tokens were in it."""

    role: str
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksEvicted(Event):
    """Blocks left a tier together: to make room (``capacity``), corrupt, or invalidated.

    One event whatever their number: a store of 128 blocks pushes out as many, and an event of each
    took a twentieth of it. ``size_bytes`` is of all of them.
    """

    tier: str
    reason: str
    blocks: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsed(Event):
    """One call at the disk has ended, well or not: a read, or a durable write, of some blocks."""

    operation: str
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost(Event):
    """A peer process is gone; what it held was released or quarantined."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResumed(Event):
    """A request whose worker was lost goes on elsewhere, after ``tokens`` tokens of output."""

    tokens: int
    reason: str


class EventSink(Protocol):
    """Where events go. ``emit`` must neither block nor raise."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


class NullSink:
    """Drops everything."""

    def emit(self, event: Event) -> None:
        """Do nothing."""


class ListSink:
    """Keeps events in memory, for tests."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append the event."""
        self.events.append(event)


class LogSink:
    """Writes each event to the log at DEBUG."""

    def emit(self, event: Event) -> None:
        """Log the event."""
        logger.debug("%s", event)


class TraceSink:
    """Writes events to a file, one JSON object a line with its class as ``event``.

    Written through on every event, so that a killed process leaves a whole trace. One lock: safe
    from any thread. Meant for tests and diagnosis, not for production traffic.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Append one line."""
        line = msgspec.json.encode({"event": type(event).__name__, **msgspec.to_builtins(event)})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + b"\n")

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._file.close()
