"""KvpoolConnector: what vLLM loads as ``kv_connector``, with this module as its module path.

Owns the pool's life in this process, and hands vLLM's calls to the side that it was made for. Keeps
vLLM's rules: nothing waits on the scheduler's path; a request whose load ended is named once;
blocks are the engine's again when a step is over, so nothing delays their being freed. Who calls
it: vLLM's scheduler and model runner.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in an environment of its own: make env-vllm.

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool.clock import SystemClock
from kvpool.errors import ConfigError
from kvpool.integration.vllm.engine import (
    read_namespace,
    read_shape,
    require_one_process,
    require_supported,
)
from kvpool.integration.vllm.kv_events import EventWriter, StoredParts, extra_of, published
from kvpool.integration.vllm.lookup import Lookups
from kvpool.integration.vllm.options import read_options
from kvpool.integration.vllm.plan import StepPlan
from kvpool.integration.vllm.pools import POOLS, attach_pool, named_by
from kvpool.integration.vllm.publishing import Ledger
from kvpool.integration.vllm.scheduler import SchedulerSide
from kvpool.integration.vllm.stats import KvpoolPromMetrics, KvpoolStats
from kvpool.integration.vllm.worker import WorkerSide


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """The plan of one step, as vLLM carries it from the scheduler to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # no types here
    """See the module; ``docs/vllm.md`` for its settings.

    Raises:
        ConfigError: A setting is wrong, or this engine is not supported.
        PeerUnreachableError, TransferTimeoutError: There is no kvpool-server at ``server``.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        require_supported(vllm_config)
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        if not self._options.server:
            require_one_process(vllm_config)
        self._shape = read_shape(vllm_config, kv_cache_config)
        self._engine = str(self._kv_transfer_config.engine_id)
        self._pool = attach_pool(self._engine, self._options, self._shape.layout)
        self._lookups: Lookups | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._plan: StepPlan | None = None
        self._clock = SystemClock()
        self._publishes = published(vllm_config)
        self._events: EventWriter | None = None
        # With a disk or a server below it is not known which tier a block came from.
        sure = self._options.dram_bytes and self._options.ssd is None
        self._cache_hit_source = (
            CacheHitSource.HOST if sure else CacheHitSource.EXTERNAL_UNSPECIFIED
        )
        self._refused: set[str] = set()
        self._registered = False
        try:
            if role is KVConnectorRole.SCHEDULER:
                self._scheduler = self._make_scheduler(vllm_config, kv_cache_config)
        except BaseException:
            self.shutdown()
            raise

    def _make_scheduler(self, vllm_config: Any, kv_cache_config: Any) -> SchedulerSide:
        options, shape = self._options, self._shape
        namespace = read_namespace(vllm_config, kv_cache_config, shape, options.salt)
        if self._pool is not None:
            namespace = named_by(self._pool, namespace)
            patience_s = options.lookup_timeout_s
            self._lookups = Lookups(self._pool, shape, self._clock, patience_s)
        ledger = None
        if self._publishes:
            ledger = Ledger(shape, extra_of)
            locality = "LOCAL" if options.near else "REMOTE"
            self._events = EventWriter(kv_cache_config, shape.block_tokens, locality)
        return SchedulerSide(shape, namespace, self._lookups, ledger)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a store that did not happen is an error: no, it is a later miss."""
        return False

    def shutdown(self) -> None:
        """End the threads of this side, and close the pool if the other side has. Idempotent."""
        lookups, self._lookups = self._lookups, None
        worker, self._worker = self._worker, None
        pool, self._pool = self._pool, None
        if lookups is not None:
            lookups.close()
        if worker is not None:
            worker.close()
        if pool is not None:
            POOLS.detach(self._engine)

    # ---- scheduler -------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Start to look for a request's prefix."""
        assert self._scheduler is not None
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return tokens that can be loaded, None while the pool has not answered."""
        assert self._scheduler is not None
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load of a request that was given blocks."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Write the orders of this step."""
        assert self._scheduler is not None
        return StepMetadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which loads failed, and what workers have stored."""
        assert self._scheduler is not None
        self._scheduler.failed(sorted(connector_output.failed_recving or ()))
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, StoredParts):
            self._scheduler.stored(told.parts)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what has changed of the pool's blocks, if KV events are switched on."""
        if self._scheduler is None or self._events is None:
            return ()
        return list(self._events.write(self._scheduler.news(self._clock.now())))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks can be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[list[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. Its blocks can be freed at once."""
        assert self._scheduler is not None
        self._scheduler.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        """Find nothing that was stored before."""
        assert self._scheduler is not None
        self._scheduler.reset()
        return True

    # ---- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's tensors. Raises ConfigError if they are a second engine's."""
        if self._registered:
            raise ConfigError(
                "this process has an engine with this connector, and vLLM keeps one connector a "
                "process: shut that engine down first, or run each in a process of its own"
            )
        self._registered = True
        if self._pool is not None:
            rank = get_tensor_model_parallel_rank()
            self._worker = WorkerSide(
                self._pool, self._shape, rank, self._options, kv_caches, self._publishes
            )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the orders of a step."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._plan = connector_metadata.plan
        if self._worker is not None:
            self._worker.begin_step(self._plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads of a step."""
        if self._plan is None:
            return
        if (
            self._worker is None
        ):  # this worker's server keeps another layout, the scheduler's did not
            self._refused.update(order.request for order in self._plan.loads)
        else:
            self._worker.start_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled when all of its load is over."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Start to copy a layer out."""
        if self._worker is not None:
            self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """Wait until this step's blocks are copied out; they are stored in the background."""
        if self._worker is not None:
            self._worker.finish_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended, and which of them failed."""
        ended, self._refused = self._refused, set()
        failed = set(ended)
        if self._worker is not None:
            ended, failed = self._worker.take_ended()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> StoredParts | None:
        """Tell the scheduler what the pool took, if it publishes that."""
        if self._worker is None or not self._publishes:
            return None
        parts = tuple(self._worker.take_stored())
        return StoredParts(parts) if parts else None

    # ---- counts ----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvpoolStats | None:
        """Return and clear what this worker counted."""
        if self._worker is None:
            return None
        stats = KvpoolStats(data=dict(self._worker.counts()))
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvpoolStats:
        """Make counts out of what came from a worker."""
        return KvpoolStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvpoolPromMetrics:
        """Make the counters that Prometheus reads."""
        return KvpoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
