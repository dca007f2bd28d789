"""The model runner: one forward over the paged cache for whatever rows a worker has.

Owns the call into the model and the counts of what ran. It holds no requests and no slots: both
come with each call. Who calls it: the prefill worker (one row, a chunk of new tokens) and the
decode worker (all running requests, one new token each).
"""

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvpool.errors import UsageError
from kvpool.events import EventSink, ForwardRan, LayerComputed, NullSink
from kvpool.integration.runtime.hf_cache import ATTENTION, CACHE_ARGUMENT, LayerHook, PagedCache
from kvpool.integration.runtime.model import ModelSpec
from kvpool.tiers.gpu import GpuTier


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a forward.

    Attributes:
        tokens: New tokens to compute, at least one.
        start: Position of the first of them: how many tokens are in the slots already.
        slots: Slot numbers of the sequence's blocks in order, enough for ``start + len(tokens)``.
            The block that ``start`` falls into and those after it are reserved by the caller.
    """

    tokens: Sequence[int]
    start: int
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Names a forward of one request, for ``LayerComputed`` events."""

    request: str
    chunk: int


class ModelRunner:
    """Runs one model over one gpu tier. One thread at a time.

    Args:
        model: A causal language model of Transformers, from ``load_model``. Its attention is set to
            kvpool's.
        spec: What the model is.
        tier: Where its blocks lie.
        role: For events: ``"prefill"`` or ``"decode"``.
        sink: Where events go.

    Attributes:
        forwards: Forward passes so far.
        tokens: Tokens computed so far.

    Raises:
        LayoutMismatchError: The tier's blocks are not the model's.
    """

    def __init__(
        self,
        model: Any,
        spec: ModelSpec,
        tier: GpuTier,
        *,
        role: str = "",
        sink: EventSink | None = None,
    ) -> None:
        spec.layout(tier.layout.block_tokens).require_equal(tier.layout)
        self.spec = spec
        self.tier = tier
        self.role = role
        self.forwards = 0
        self.tokens = 0
        self._sink = NullSink() if sink is None else sink
        self._model = model
        model.set_attn_implementation(ATTENTION)
        self._cache = PagedCache(tier)
        # Transformers 5.24 calls the argument `cache`; older ones call it `past_key_values`.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._traced: Chunk | None = None
        self._began_ns = 0
        if not isinstance(self._sink, NullSink):
            for layer in model.base_model.layers:
                layer.register_forward_pre_hook(self._layer_begins)
            for number, layer in enumerate(model.base_model.layers):
                layer.register_forward_hook(self._when_layer_ends(number))

    def forward(
        self,
        rows: Sequence[Row],
        *,
        on_layer: LayerHook | None = None,
        traced: Chunk | None = None,
    ) -> Any:
        """Compute the new tokens of all rows in one pass, and write their K and V into their slots.

        Args:
            rows: At least one; all with the same number of new tokens.
            on_layer: Called with each layer's number when its K and V are in the arena, in order,
                from this thread. What it raises ends the forward.
            traced: If given, a ``LayerComputed`` event is emitted at the end of each layer.

        Returns:
            Logits of the last token of each row, tensor [rows, vocabulary].

        Raises:
            UsageError: A row does not fit its slots, the context or the vocabulary. Nothing ran.

        Blocks for the compute.
        """
        count = self._check(rows)
        ids = torch.tensor([list(row.tokens) for row in rows], device=self.tier.arena.device)
        starts = [row.start for row in rows]
        positions = torch.tensor(starts, device=ids.device)[:, None] + torch.arange(
            count, device=ids.device
        )
        self._traced = traced
        try:
            with torch.inference_mode():
                self._cache.begin(starts, count, [row.slots for row in rows], on_layer)
                logits = self._model(
                    input_ids=ids,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{self._cache_name: self._cache, CACHE_ARGUMENT: self._cache},
                ).logits[:, -1]
        finally:
            self._traced = None
        self.forwards += 1
        self.tokens += len(rows) * count
        self._sink.emit(ForwardRan(role=self.role, requests=len(rows), tokens=len(rows) * count))
        return logits

    def _check(self, rows: Sequence[Row]) -> int:
        """Return the new tokens of each row, or raise UsageError."""
        if not rows or not rows[0].tokens:
            raise UsageError("a forward needs at least one row with at least one token")
        count, size = len(rows[0].tokens), self.tier.layout.block_tokens
        for row in rows:
            end = row.start + len(row.tokens)
            if len(row.tokens) != count:
                raise UsageError("all rows of a forward have the same number of new tokens")
            if row.start < 0 or end > self.spec.context_tokens:
                raise UsageError(f"{end} tokens pass the model's {self.spec.context_tokens}")
            if len(row.slots) * size < end:
                raise UsageError(f"{len(row.slots)} slots of {size} do not hold {end} tokens")
            if not 0 <= min(row.tokens) <= max(row.tokens) < self.spec.vocabulary:
                raise UsageError(f"a token is not within 0..{self.spec.vocabulary - 1}")
            if not 0 <= min(row.slots) <= max(row.slots) < self.tier.slot_count:
                raise UsageError(f"a slot is not within 0..{self.tier.slot_count - 1}")
        return count

    def _layer_begins(self, module: Any, args: Any) -> None:
        self._began_ns = time.monotonic_ns()

    def _when_layer_ends(self, layer: int) -> Any:
        def ended(module: Any, args: Any, output: Any) -> None:
            if (traced := self._traced) is not None:
                self._sink.emit(
                    LayerComputed(
                        request=traced.request,
                        chunk=traced.chunk,
                        layer=layer,
                        began_ns=self._began_ns,
                    )
                )

        return ended
