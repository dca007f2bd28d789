"""Every metric name in one place, and the sink that counts events into them.

Owns a registry of its own (never Prometheus's process-wide one). Names are
``kvpool_<wing>_<noun>_<unit>[_total]``; labels come from closed sets, never a hash or a request.
Does not open ports. Who calls it: the server, which hands the registry to an exporter, and the
Conductor; ``docs/metrics.md`` must equal ``render_table()``.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpool.errors import UsageError
from kvpool.events import (
    BlocksEvicted,
    DiskUsed,
    Event,
    ForwardRan,
    LayerComputed,
    LayerRead,
    PeerLost,
    RequestResumed,
    SliceAnnounced,
    SliceArrived,
)

Kind = Literal["counter", "gauge", "histogram"]

TIERS: Final = ("gpu", "dram", "ssd", "other")
SLOT_STATES: Final = ("free", "reserved", "ready", "quarantined")
MISS_REASONS: Final = ("absent", "mismatch", "corrupt", "failed", "late")
METHODS: Final = (
    *("hello", "configure", "match", "lease", "report", "release", "store", "stats"),
    *("tiers", "evict", "verify", "write", "members", "lookup", "announce"),
)
ROLES: Final = ("prefill", "decode", "other")
OUTCOMES: Final = ("ok", "refused", "failed", "cancelled")
ROUTES: Final = ("chat", "completions")
STATUSES: Final = ("200", "400", "404", "408", "413", "499", "500", "503", "504", "other")
# The one label without a list: the workers that ``/health`` names, as many as were started.
WORKERS: Final = ()

# Seconds, 100 us to 60 s: a control message costs about half a millisecond, a cold prompt seconds.
_SECONDS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2)
_BUCKETS: Final = (*_SECONDS, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: its whole name, kind, labels with every value they may have, and meaning.

    A label without a list of values takes the names of the deployment's own workers.
    """

    name: str
    kind: Kind
    meaning: str
    labels: Mapping[str, tuple[str, ...]]

    @property
    def wing(self) -> str:
        """Whose metric it is: the second word of its name."""
        return self.name.split("_")[1]


def _metric(kind: Kind, name: str, meaning: str, /, **labels: tuple[str, ...]) -> Metric:
    return Metric(name=name, kind=kind, meaning=meaning, labels=labels)


METRICS: Final = (
    _metric("gauge", "kvpool_tiers_slot_count", "Slots by state.", tier=TIERS, state=SLOT_STATES),
    _metric("gauge", "kvpool_tiers_used_bytes", "Payload of slots that are not free.", tier=TIERS),
    _metric(
        "counter",
        "kvpool_tiers_lookup_blocks_total",
        "Blocks asked for with the intent to read, by whether they were there.",
        tier=TIERS,
        outcome=("hit", "miss"),
    ),
    _metric(
        "counter",
        "kvpool_tiers_missed_blocks_total",
        "Blocks asked for and not given, by why: not there, there with other tokens, damaged (also "
        "those found damaged by a check), not given by the disk, or not by the deadline.",
        tier=TIERS,
        reason=MISS_REASONS,
    ),
    _metric(
        "counter",
        "kvpool_tiers_evicted_blocks_total",
        "Blocks that left a tier: to make room, because a checksum differed, or because they are no "
        "longer valid.",
        tier=TIERS,
        reason=("capacity", "corrupt", "invalid", "other"),
    ),
    _metric("counter", "kvpool_tiers_evicted_bytes_total", "Their bytes.", tier=TIERS),
    _metric("gauge", "kvpool_tiers_backlog_bytes", "Blocks that wait to be written to the SSD."),
    _metric(
        "counter",
        "kvpool_tiers_flush_blocks_total",
        "Blocks that were to be written to the SSD: written, evicted before, let go because too many "
        "waited, or not taken by the disk (they are tried again).",
        outcome=("flushed", "lost", "skipped", "failed"),
    ),
    _metric(
        "counter",
        "kvpool_tiers_promotion_blocks_total",
        "Blocks that were asked for and on the SSD alone: brought up, left because they would have "
        "come too late, or not given by the deadline.",
        outcome=("promoted", "refused", "failed"),
    ),
    _metric(
        "counter",
        "kvpool_tiers_failed_write_blocks_total",
        "Blocks that the SSD did not take, or not by the deadline.",
        reason=("failed", "late"),
    ),
    _metric(
        "gauge",
        "kvpool_tiers_late_call_count",
        "Calls at the SSD that the kernel still holds after their deadline; their memory is out of use.",
    ),
    _metric(
        "gauge",
        "kvpool_tiers_recovered_block_count",
        "Blocks that the SSD's folder held when it was opened: whole ones, and those lost because "
        "their write was cut off, or their header is damaged.",
        state=("whole", "torn", "damaged"),
    ),
    _metric(
        "histogram",
        "kvpool_tiers_disk_seconds",
        "Time of one call at the SSD: a read of some blocks, or a durable write of some.",
        operation=("read", "write", "other"),
    ),
    _metric(
        "histogram",
        "kvpool_tiers_promotion_seconds",
        "Time that a lease took to bring blocks up from the SSD, if it had to.",
    ),
    _metric(
        "counter",
        "kvpool_transfer_slice_blocks_total",
        "Layer slices, one per block and layer: announced by the sender, arrived, and read.",
        direction=("announced", "arrived", "read"),
    ),
    _metric("counter", "kvpool_transfer_staged_bytes_total", "Bytes copied to be pulled."),
    _metric(
        "counter",
        "kvpool_transfer_lost_peers_total",
        "Connections that ended, by who was at the other end.",
        peer=("client", "server", "worker", "other"),
    ),
    _metric("gauge", "kvpool_server_client_count", "Connected clients."),
    _metric("gauge", "kvpool_server_lease_count", "Leases that are out."),
    _metric("gauge", "kvpool_server_node_count", "Nodes of the ring, as this server knows them."),
    _metric("gauge", "kvpool_server_directory_name_count", "Names in this shard of the directory."),
    _metric(
        "counter",
        "kvpool_server_announced_names_total",
        "Names that other nodes were told this one holds, or holds no more.",
    ),
    _metric(
        "counter",
        "kvpool_server_moved_names_total",
        "Names that had to be told to new owners because the ring changed.",
    ),
    _metric(
        "counter",
        "kvpool_server_refused_names_total",
        "Names that this shard had no room for: their blocks are not found.",
    ),
    _metric(
        "counter",
        "kvpool_server_aborted_stores_total",
        "Stores given up because their client was lost or cancelled.",
    ),
    _metric(
        "counter",
        "kvpool_server_refused_calls_total",
        "Calls of tenants that were refused: nobody who may call, another tenant's blocks, what only "
        "an operator may do, a quota of stored or of leased bytes, a share of clients, stores or calls "
        "at once.",
        reason=(
            *("unknown", "tenant", "operator", "store_bytes", "lease_bytes"),
            *("clients", "stores", "calls"),
        ),
    ),
    _metric(
        "counter",
        "kvpool_server_failed_upkeep_passes_total",
        "Turns of what a server does now and then that failed, and were tried again: a bug to report.",
        task=("leases", "clients", "tenants", "gauges", "directory", "names"),
    ),
    _metric(
        "histogram",
        "kvpool_server_request_seconds",
        "Time to answer a client's request.",
        method=METHODS,
        outcome=OUTCOMES,
    ),
    _metric(
        "counter",
        "kvpool_runtime_forward_passes_total",
        "Forward passes of a worker.",
        role=ROLES,
    ),
    _metric(
        "counter",
        "kvpool_runtime_forward_tokens_total",
        "Tokens computed by them.",
        role=ROLES,
    ),
    _metric("histogram", "kvpool_runtime_layer_seconds", "Time to compute one layer of a chunk."),
    _metric(
        "counter",
        "kvpool_conductor_requests_total",
        "Requests that ended, by HTTP status; 499 is a client that went away.",
        route=ROUTES,
        outcome=STATUSES,
    ),
    _metric(
        "counter",
        "kvpool_conductor_tokens_total",
        "Tokens of prompts, of them those found in the pool, and tokens of outputs.",
        kind=("prompt", "cached", "output"),
    ),
    _metric(
        "counter",
        "kvpool_conductor_resumed_requests_total",
        "Times that a request went on elsewhere because a worker was lost.",
    ),
    _metric(
        "histogram",
        "kvpool_conductor_first_token_seconds",
        "From a request's arrival to its first token.",
    ),
    _metric("gauge", "kvpool_conductor_worker_up_count", "1 if it answers.", worker=WORKERS),
    _metric(
        "gauge",
        "kvpool_conductor_worker_request_count",
        "Requests of a worker: those that run, of them those parked in DRAM, and those that wait.",
        worker=WORKERS,
        state=("running", "parked", "waiting"),
    ),
    _metric(
        "gauge",
        "kvpool_conductor_worker_block_count",
        "Blocks of a worker's gpu tier.",
        worker=WORKERS,
        state=("all", "free"),
    ),
    _metric(
        "gauge",
        "kvpool_conductor_worker_forward_count",
        "Forward passes since the worker started.",
        worker=WORKERS,
    ),
    _metric(
        "gauge",
        "kvpool_conductor_worker_park_count",
        "Requests parked since the worker started.",
        worker=WORKERS,
    ),
)


WINGS: Final = frozenset(metric.wing for metric in METRICS)
_WING_OF: Final[Mapping[type[Event], str]] = {
    ForwardRan: "runtime",
    LayerComputed: "runtime",
    SliceAnnounced: "transfer",
    SliceArrived: "transfer",
    LayerRead: "transfer",
    PeerLost: "transfer",
    BlocksEvicted: "tiers",
    DiskUsed: "tiers",
    RequestResumed: "conductor",
}


def render_table() -> str:
    """Return the table of ``docs/metrics.md``, one line a metric, in Markdown."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = "; ".join(
            f"`{name}`: {', '.join(values) or 'its name'}" for name, values in metric.labels.items()
        )
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.meaning} |")
    return "\n".join(lines) + "\n"


class Metrics:
    """The metrics of one process. Safe from any thread; never blocks.

    Also an EventSink: ``emit`` counts the events that a metric exists for and ignores others. It
    never raises: a label that an event gives a new value counts as ``other``.

    Args:
        wings: Whose metrics the process has, the second word of their names; None means all but the
            Conductor's. A metric that nobody feeds would say 0, which is not true.
    """

    def __init__(self, wings: Collection[str] | None = None) -> None:
        self.registry = CollectorRegistry()
        self._wings = WINGS - {"conductor"} if wings is None else frozenset(wings)
        metrics = [metric for metric in METRICS if metric.wing in self._wings]
        self._specs = {metric.name: metric for metric in metrics}
        self._counters: dict[str, Counter] = {}
        # With their labels, once they were counted: to find these takes longer than to count.
        self._counted: dict[tuple[str, tuple[tuple[str, str], ...]], Counter] = {}
        self._observed: dict[tuple[str, tuple[tuple[str, str], ...]], Histogram] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in metrics:
            names = tuple(metric.labels)
            if metric.kind == "counter":
                made = Counter(metric.name, metric.meaning, names, registry=self.registry)
                self._counters[metric.name] = made
            elif metric.kind == "gauge":
                gauge = Gauge(metric.name, metric.meaning, names, registry=self.registry)
                self._gauges[metric.name] = gauge
            else:
                self._histograms[metric.name] = Histogram(
                    metric.name, metric.meaning, names, registry=self.registry, buckets=_BUCKETS
                )

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter. Raises UsageError for an unknown name or label value."""
        key = name, tuple(labels.items())
        if (counter := self._counted.get(key)) is None:
            values = self._values(name, "counter", labels)
            counter = self._counters[name]
            counter = self._counted[key] = counter.labels(*values) if values else counter
        counter.inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Raises UsageError for an unknown name or label value."""
        values = self._values(name, "gauge", labels)
        gauge = self._gauges[name]
        (gauge.labels(*values) if values else gauge).set(value)

    def clear(self, name: str) -> None:
        """Forget all values of a gauge with labels. Raises UsageError for an unknown name."""
        if name not in self._gauges:
            raise UsageError(f"{name!r} is no gauge of this process")
        self._gauges[name].clear()

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Put one value into a histogram. Raises UsageError for an unknown name or label value."""
        key = name, tuple(labels.items())
        if (histogram := self._observed.get(key)) is None:
            values = self._values(name, "histogram", labels)
            histogram = self._histograms[name]
            histogram = self._observed[key] = histogram.labels(*values) if values else histogram
        histogram.observe(seconds)

    def emit(self, event: Event) -> None:
        """Count one event, if it is of a wing whose metrics are here."""
        if _WING_OF.get(type(event)) not in self._wings:
            return
        if isinstance(event, ForwardRan):
            name = "kvpool_runtime_forward_passes_total"
            role = self._known(name, "role", event.role)
            self.count(name, role=role)
            self.count("kvpool_runtime_forward_tokens_total", event.tokens, role=role)
        elif isinstance(event, LayerComputed):
            self.observe("kvpool_runtime_layer_seconds", (event.at_ns - event.began_ns) / 1e9)
        elif isinstance(event, SliceAnnounced):
            self._slices("announced", event.blocks)
            self.count("kvpool_transfer_staged_bytes_total", event.staged_bytes)
        elif isinstance(event, SliceArrived):
            self._slices("arrived", event.blocks)
        elif isinstance(event, LayerRead):
            self._slices("read", event.blocks)
        elif isinstance(event, BlocksEvicted):
            name = "kvpool_tiers_evicted_blocks_total"
            tier = self._known(name, "tier", event.tier)
            reason = self._known(name, "reason", event.reason)
            self.count(name, event.blocks, tier=tier, reason=reason)
            self.count("kvpool_tiers_evicted_bytes_total", event.size_bytes, tier=tier)
        elif isinstance(event, DiskUsed):
            name = "kvpool_tiers_disk_seconds"
            operation = self._known(name, "operation", event.operation)
            self.observe(name, event.seconds, operation=operation)
        elif isinstance(event, RequestResumed):
            self.count("kvpool_conductor_resumed_requests_total")
        elif isinstance(event, PeerLost):
            name = "kvpool_transfer_lost_peers_total"
            self.count(name, peer=self._known(name, "peer", event.peer))

    def expose(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)

    def _slices(self, direction: str, blocks: int) -> None:
        self.count("kvpool_transfer_slice_blocks_total", blocks, direction=direction)

    def _known(self, name: str, label: str, value: str) -> str:
        return value if value in self._specs[name].labels[label] else "other"

    def _values(self, name: str, kind: Kind, labels: dict[str, str]) -> tuple[str, ...]:
        spec = self._specs.get(name)
        if spec is None or spec.kind != kind:
            raise UsageError(f"{name!r} is no {kind} of kvpool/metrics.py: add it there")
        if set(labels) != set(spec.labels):
            raise UsageError(f"{name} has labels {list(spec.labels)}, not {list(labels)}")
        for label, allowed in spec.labels.items():
            if allowed and labels[label] not in allowed:
                raise UsageError(f"{name}: {label} is {labels[label]!r}, not one of {allowed}")
        return tuple(labels[label] for label in spec.labels)
