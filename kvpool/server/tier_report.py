"""What a server says of its tiers: to the metrics, and to an operator who asks.

Owns how much of each count the metrics were told already. Who calls it: the service, in its loop.
"""

from typing import Final

from kvpool.errors import ClosedError
from kvpool.metrics import MISS_REASONS, SLOT_STATES, Metrics
from kvpool.tiers.base import Tier
from kvpool.tiers.ssd import SsdTier
from kvpool.tiers.stack import StackTier, stats_of

# Which count of a tier says how many blocks were missed for a reason.
_MISSED_AS: Final = {
    "absent": "misses",
    "mismatch": "mismatches",
    "corrupt": "corruptions",
    "failed": "read_errors",
    "late": "read_timeouts",
}


def tier_counts(tier: Tier) -> dict[str, dict[str, int]]:
    """Return the counts of each tier by name, fastest first, and ``stack``: what is between them."""
    counts: dict[str, dict[str, int]] = {}
    for name, stats in stats_of(tier):
        found: dict[str, int] = {each: getattr(stats, each) for each in stats.__slots__}
        found["used_bytes"] = (stats.slots - stats.free) * tier.layout.block_bytes
        counts[name] = found
    if isinstance(tier, StackTier) and isinstance(tier.slow, SsdTier) and "ssd" in counts:
        counts["ssd"] |= _disk_counts(tier.slow)
    if isinstance(tier, StackTier):
        between = tier.counts()
        counts["stack"] = {
            "backlog": between.flush.backlog,
            "backlog_bytes": between.flush.backlog * tier.layout.block_bytes,
            "flushed": between.flush.flushed,
            "lost": between.flush.lost,
            "skipped": between.flush.skipped,
            "failed": between.flush.failed,
            "promoted": between.promoted,
            "promotions_refused": between.promotions_refused,
            "promotions_failed": between.promotions_failed,
        }
    return counts


def _disk_counts(ssd: SsdTier) -> dict[str, int]:
    """Return what only a tier on a disk counts; nothing if it is closed by now."""
    try:
        found = ssd.ssd_stats()
    except ClosedError:
        return {}
    counts: dict[str, int] = {
        each: getattr(found, each) for each in found.__slots__ if each != "recovery"
    }
    counts["recovered"] = found.recovery.blocks
    counts["recovered_torn"] = found.recovery.torn
    counts["recovered_damaged"] = found.recovery.damaged
    return counts


class TierReport:
    """Sets gauges and advances counters by what tiers counted since. One thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[tuple[str, ...], int] = {}

    def tell(self, tier: Tier) -> None:
        """Bring the metrics up to date."""
        for name, counts in tier_counts(tier).items():
            if name == "stack":
                self._tell_stack(counts)
                continue
            for state in SLOT_STATES:
                self._metrics.set("kvpool_tiers_slot_count", counts[state], tier=name, state=state)
            self._metrics.set("kvpool_tiers_used_bytes", counts["used_bytes"], tier=name)
            lookups = "kvpool_tiers_lookup_blocks_total"
            self._advance(lookups, counts["hits"], tier=name, outcome="hit")
            self._advance(lookups, counts["misses"], tier=name, outcome="miss")
            for reason in MISS_REASONS:
                missed = counts.get(_MISSED_AS[reason], 0)
                self._advance("kvpool_tiers_missed_blocks_total", missed, tier=name, reason=reason)
            if "late_threads" in counts:
                self._tell_disk(counts)

    def _tell_disk(self, counts: dict[str, int]) -> None:
        failed = "kvpool_tiers_failed_write_blocks_total"
        self._advance(failed, counts["write_errors"], reason="failed")
        self._advance(failed, counts["write_timeouts"], reason="late")
        self._metrics.set("kvpool_tiers_late_call_count", counts["late_threads"])
        found = "kvpool_tiers_recovered_block_count"
        self._metrics.set(found, counts["recovered"], state="whole")
        self._metrics.set(found, counts["recovered_torn"], state="torn")
        self._metrics.set(found, counts["recovered_damaged"], state="damaged")

    def _tell_stack(self, counts: dict[str, int]) -> None:
        self._metrics.set("kvpool_tiers_backlog_bytes", counts["backlog_bytes"])
        for outcome in ("flushed", "lost", "skipped", "failed"):
            self._advance("kvpool_tiers_flush_blocks_total", counts[outcome], outcome=outcome)
        name = "kvpool_tiers_promotion_blocks_total"
        self._advance(name, counts["promoted"], outcome="promoted")
        self._advance(name, counts["promotions_refused"], outcome="refused")
        self._advance(name, counts["promotions_failed"], outcome="failed")

    def _advance(self, name: str, count: int, **labels: str) -> None:
        place = (name, *labels.values())
        self._metrics.count(name, count - self._told.get(place, 0), **labels)
        self._told[place] = count
