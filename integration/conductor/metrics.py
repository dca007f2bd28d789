"""What the Conductor counts, and its view of the workers, as metrics.

Owns no name: those are in ``kvpool/metrics.py``. Who calls it: the app.
"""

from collections.abc import Sequence

from kvpool.integration.conductor.links import WorkerLink
from kvpool.metrics import STATUSES, Metrics


class ConductorMetrics:
    """Counts requests, tokens and latencies.

    Args:
        metrics: Where they are counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def ended(self, route: str, status: str) -> None:
        """Count a request that ended with an HTTP status."""
        outcome = status if status in STATUSES else "other"
        self._metrics.count("kvpool_conductor_requests_total", route=route, outcome=outcome)

    def tokens(self, *, prompt: int, cached: int, output: int) -> None:
        """Count the tokens of a request."""
        for kind, count in (("prompt", prompt), ("cached", cached), ("output", output)):
            self._metrics.count("kvpool_conductor_tokens_total", count, kind=kind)

    def first_token(self, seconds: float) -> None:
        """Take the time from a request's arrival to its first token."""
        self._metrics.observe("kvpool_conductor_first_token_seconds", seconds)

    def render(self, links: Sequence[WorkerLink]) -> bytes:
        """Return everything in the Prometheus text format, the workers as they are now."""
        for link in links:
            self._worker(link)
        return self._metrics.expose()

    def _worker(self, link: WorkerLink) -> None:
        up, status = float(link.alive), link.status
        self._metrics.set("kvpool_conductor_worker_up_count", up, worker=link.name)
        if status is None:
            return
        by_state = {
            "kvpool_conductor_worker_request_count": {
                "running": status.running,
                "parked": status.parked,
                "waiting": status.waiting,
            },
            "kvpool_conductor_worker_block_count": {
                "all": status.blocks,
                "free": status.blocks_free,
            },
        }
        for name, states in by_state.items():
            for state, count in states.items():
                self._metrics.set(name, count, worker=link.name, state=state)
        for name, count in (("forward", status.forwards), ("park", status.parks)):
            self._metrics.set(f"kvpool_conductor_worker_{name}_count", count, worker=link.name)
