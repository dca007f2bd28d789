"""How long things take: prefill, one decode step, a transfer.

Owns the contract of a cost model. Who calls it: the planner, to predict; the simulator, to let
time pass.
"""

from typing import Protocol, overload

from kvpool.integration.conductor.snapshot import Floats, Ints


class CostModel(Protocol):
    """Predicts times. Pure and quick; each method takes numbers, or columns over workers.

    With plain numbers a method returns a plain float; with at least one array, an array.
    """

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV that one token has."""
        ...

    @overload
    def prefill_s(self, tokens: float, cached_tokens: float) -> float: ...
    @overload
    def prefill_s(self, tokens: float, cached_tokens: Ints | Floats) -> Floats: ...
    def prefill_s(self, tokens: float, cached_tokens: float | Ints | Floats) -> float | Floats:
        """Predict the time to compute a prompt of ``tokens``, of which ``cached_tokens`` are there.

        The store's copy into the accelerator is part of it. ``cached_tokens <= tokens``.
        """
        ...

    @overload
    def decode_step_s(self, running: float, context_tokens: float) -> float: ...
    @overload
    def decode_step_s(self, running: Ints | Floats, context_tokens: Ints | Floats) -> Floats: ...
    def decode_step_s(
        self, running: float | Ints | Floats, context_tokens: float | Ints | Floats
    ) -> float | Floats:
        """Predict one decode step of ``running`` requests that have ``context_tokens`` in all."""
        ...

    @overload
    def transfer_s(self, tokens: float, link_bytes_per_s: float) -> float: ...
    @overload
    def transfer_s(self, tokens: Ints | Floats, link_bytes_per_s: Floats) -> Floats: ...
    def transfer_s(
        self, tokens: float | Ints | Floats, link_bytes_per_s: float | Floats
    ) -> float | Floats:
        """Predict a copy of the KV of ``tokens`` over an idle link; 0 for no tokens.

        Congestion is the planner's: it adds the time until the link is free.
        """
        ...
