"""What the workers count, in the form that vLLM logs and hands to Prometheus.

Who calls it: the connector.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in an environment of its own: make env-vllm.

from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# Count -> what Prometheus says of it. Its name there is ``vllm:kvpool_<count>_total``.
COUNTS: Final = {
    "loaded_blocks": "Blocks loaded from kvpool.",
    "failed_loads": "Loads from kvpool that did not deliver all; the request was computed.",
    "stored_blocks": "Blocks that kvpool took or had already.",
    "skipped_blocks": "Blocks not stored: no slot was free, or the pool took none.",
}


@dataclass
class KvpoolStats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """Counts of one interval, added up over workers."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Set every count to 0."""
        self.data = dict.fromkeys(COUNTS, 0)

    def aggregate(self, other: KVConnectorStats) -> "KvpoolStats":
        """Add another's counts to these."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for a log line."""
        return {f"kvpool_{name}": count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Say whether nothing was counted."""
        return not any(self.data.values())


class KvpoolPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM has no types here
    """Counters ``vllm:kvpool_*_total`` of every engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTS.items():
            metric = counter(name=f"vllm:kvpool_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one interval."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
