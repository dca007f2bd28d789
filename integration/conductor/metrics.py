"""What the Conductor counts, and its view of the workers, as metrics.

Owns no name: those are in ``kvpool/metrics.py``. Who calls it: the app.
"""

from collections.abc import Sequence
from typing import Final

from kvpool.integration.conductor.links import WorkerLink
from kvpool.metrics import STATUSES, Metrics

_UP: Final = "kvpool_conductor_worker_up_count"
_REQUESTS: Final = "kvpool_conductor_worker_request_count"
_BLOCKS: Final = "kvpool_conductor_worker_block_count"
_FORWARDS: Final = "kvpool_conductor_worker_forward_count"
_PARKS: Final = "kvpool_conductor_worker_park_count"
_OF_WORKERS: Final = (_UP, _REQUESTS, _BLOCKS, _FORWARDS, _PARKS)


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
        for name in _OF_WORKERS:
            self._metrics.clear(name)
        for link in links:
            self._worker(link)
        return self._metrics.expose()

    def _worker(self, link: WorkerLink) -> None:
        """Set what is known of a worker; of one that does not answer only that."""
        worker, status = link.name, link.status
        self._metrics.set(_UP, float(link.alive), worker=worker)
        if status is None:
            return
        requests = {
            "running": status.running,
            "parked": status.parked,
            "waiting": status.waiting,
        }
        for state, count in requests.items():
            self._metrics.set(_REQUESTS, count, worker=worker, state=state)
        for state, count in {"all": status.blocks, "free": status.blocks_free}.items():
            self._metrics.set(_BLOCKS, count, worker=worker, state=state)
        self._metrics.set(_FORWARDS, status.forwards, worker=worker)
        self._metrics.set(_PARKS, status.parks, worker=worker)
