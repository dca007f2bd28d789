"""The Conductor's metrics, in a registry of its own.

Owns the metric names of this process. Labels come from closed sets. Who calls it: the app.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.integration.conductor.dispatch import Dispatcher

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ConductorMetrics(Collector):
    """Counts requests, tokens and latencies; reads the workers' gauges when scraped.

    Args:
        dispatcher: Whose retries and workers are shown.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvpool_conductor_requests",
            "Requests answered",
            ["route", "outcome"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "kvpool_conductor_tokens",
            "Tokens of prompts, of prompts found in the pool, and of outputs",
            ["kind"],
            registry=self.registry,
        )
        self.first_token = Histogram(
            "kvpool_conductor_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._dispatcher = dispatcher
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the workers' gauges. Called by the registry."""
        retries = CounterMetricFamily(
            "kvpool_conductor_retries", "Requests tried again because a worker was lost"
        )
        retries.add_metric([], self._dispatcher.retries)
        yield retries
        up = GaugeMetricFamily("kvpool_worker_up", "1 if the worker answers", labels=["worker"])
        for link in self._dispatcher.links:
            up.add_metric([link.name], 1.0 if link.alive else 0.0)
        yield up
        fields = {
            "running": "Requests running",
            "waiting": "Requests that wait for room",
            "blocks": "Blocks of the gpu tier's arena",
            "blocks_free": "Blocks of it that are free",
            "forwards": "Forward passes since the worker started",
            "parked": "Requests parked in DRAM until there are blocks",
            "parks": "Requests parked since the worker started",
        }
        for name, text in fields.items():
            gauge = GaugeMetricFamily(f"kvpool_worker_{name}", text, labels=["worker"])
            for link in self._dispatcher.links:
                if link.status is not None:
                    gauge.add_metric([link.name], float(getattr(link.status, name)))
            yield gauge

    def render(self) -> bytes:
        """Return everything in the Prometheus text format."""
        return generate_latest(self.registry)
