"""What is published of the pool's blocks, in the form of vLLM's KV events.

Owns how a claim is written as one. Who calls it: the connector.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in an environment of its own: make env-vllm.

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvpool.integration.vllm.publishing import Claim, Ended, StoredPart

# Whose tier it is, in events.
OWNER: Final = "kvpool"


@dataclass
class StoredParts(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM has no types here
    """What workers tell the scheduler: the parts that the pool took."""

    parts: tuple[StoredPart, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StoredParts":
        """Add what another worker says."""
        return StoredParts(self.parts + other.parts)


def published(vllm_config: Any) -> bool:
    """Say whether this engine publishes KV events."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def extra_of(request: Any, begin: int, end: int) -> tuple[Any, ...] | None:
    """Return what a block's hash is made of beside its tokens: salt, multimodal hashes."""
    extra, _ = generate_block_hash_extra_keys(request, begin, end, 0)
    (shown,) = to_event_extra_keys([extra])
    return shown  # type: ignore[no-any-return]


class EventWriter:
    """Writes claims as events.

    Args:
        kv_cache_config: vLLM's, for the kinds of its groups.
        block_tokens: Tokens of a block.
        locality: ``LOCAL`` if the pool is on this host, else ``REMOTE``.
    """

    def __init__(self, kv_cache_config: Any, block_tokens: int, locality: str) -> None:
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._kinds = [get_kv_cache_spec_kind(spec).value for spec in specs]
        self._windows = [get_kv_cache_spec_sliding_window(spec) for spec in specs]
        self._block_tokens = block_tokens
        self._locality = locality

    def write(self, news: Iterable[Claim | Ended]) -> Iterator[KVCacheEvent]:
        """Yield an event for each change, in order."""
        for new in news:
            yield self._stored(new) if isinstance(new, Claim) else self._removed(new)

    def _stored(self, claim: Claim) -> KVCacheEvent:
        parent = None if claim.parent is None else maybe_convert_block_hash(claim.parent)
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(claim.block)],
            parent_block_hash=parent,
            token_ids=list(claim.tokens),
            block_size=self._block_tokens,
            lora_id=None,
            medium=MEDIUM_CPU,
            lora_name=None,
            extra_keys=[claim.extra],
            group_idx=claim.group,
            kv_cache_spec_kind=self._kinds[claim.group],
            kv_cache_spec_sliding_window=self._windows[claim.group],
            locality=self._locality,
            ownership=OWNER,
            session_id=claim.session,
        )

    def _removed(self, ended: Ended) -> KVCacheEvent:
        return BlockRemoved(
            block_hashes=[maybe_convert_block_hash(ended.block)],
            medium=MEDIUM_CPU,
            group_idx=ended.group,
            locality=self._locality,
            ownership=OWNER,
        )
