"""Network links of the simulated cluster, with congestion.

Owns shipments: each node has one port out and one in, shipments share a port evenly, and each runs as fast
as the tighter of its two shares. Never knows what it carries. Who calls it: the cluster.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

import simpy
from simpy.events import Event

from kvpool.errors import UsageError


@dataclass(slots=True, eq=False)
class Shipment:
    """Bytes on their way from one node to another.

    Attributes:
        done: Fires when the last byte arrived.
    """

    source: Hashable
    target: Hashable
    left_bytes: float
    done: Event
    rate: float = 0.0
    settled_s: float = 0.0
    turn: int = 0  # a timer of an earlier turn is void


class Network:
    """A fabric without inner bottleneck: only the nodes' ports limit."""

    def __init__(self, clock: simpy.Environment, port_bytes_per_s: float) -> None:
        if not 0 < port_bytes_per_s < math.inf:
            raise UsageError(
                f"port_bytes_per_s is {port_bytes_per_s}: it must be above 0",
                key="port_bytes_per_s",
            )
        self._clock = clock
        self._port = port_bytes_per_s
        self._out: dict[Hashable, dict[Shipment, None]] = {}
        self._in: dict[Hashable, dict[Shipment, None]] = {}
        self.sent_bytes = 0.0

    def send(self, source: Hashable, target: Hashable, size_bytes: float) -> Shipment:
        """Start a shipment. Nothing to send, or to oneself: done at once."""
        shipment = Shipment(source, target, float(size_bytes), self._clock.event())
        if source == target or size_bytes <= 0:
            shipment.done.succeed()
            return shipment
        self.sent_bytes += size_bytes
        shipment.settled_s = self._clock.now
        self._out.setdefault(source, {})[shipment] = None
        self._in.setdefault(target, {})[shipment] = None
        self._share_anew(source, target)
        return shipment

    def leaving(self, node: Hashable) -> int:
        """Return how many shipments leave a node now."""
        return len(self._out.get(node, ()))

    def under_way(self) -> int:
        """Return how many shipments there are now."""
        return sum(map(len, self._out.values()))

    def _share_anew(self, source: Hashable, target: Hashable) -> None:
        """Give the shipments of two ports their new rates: nobody else's share changed."""
        now = self._clock.now
        touched = dict(self._out.get(source, {}))
        touched.update(self._in.get(target, {}))
        for shipment in touched:
            rate = self._port / max(len(self._out[shipment.source]), len(self._in[shipment.target]))
            if rate == shipment.rate:
                continue
            shipment.left_bytes -= shipment.rate * (now - shipment.settled_s)
            shipment.settled_s = now
            shipment.rate = rate
            shipment.turn += 1
            self._set_timer(shipment)

    def _set_timer(self, shipment: Shipment) -> None:
        turn = shipment.turn
        timer = self._clock.timeout(max(shipment.left_bytes, 0.0) / shipment.rate)
        timer.callbacks.append(lambda _: self._ring(shipment, turn))

    def _ring(self, shipment: Shipment, turn: int) -> None:
        if turn != shipment.turn:
            return
        shipment.left_bytes = 0.0
        shipment.turn += 1
        for ports, node in ((self._out, shipment.source), (self._in, shipment.target)):
            del ports[node][shipment]
            if not ports[node]:
                del ports[node]
        shipment.done.succeed()
        self._share_anew(shipment.source, shipment.target)
