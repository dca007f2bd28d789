"""How long things take: prefill, one decode step, a transfer.

Owns the contract of a cost model, and the one made of a profile. Who calls it: the planner, to
predict; the simulator, to let time pass.
"""

from typing import Any, Protocol, overload

import numpy as np

from kvpool.integration.conductor.profile import Profile
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

        Loading what is cached is hidden behind it, layer by layer. ``cached_tokens <= tokens``.
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


class ProfiledCost:
    """The cost model of one profile. Implements `CostModel`.

    Args:
        profile: From `read_profile`, or `papers_profile`.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._kv_bytes_per_token = profile.kv_bytes_per_token
        prefill, decode = profile.prefill, profile.decode
        self._prefill = (prefill.base_s, prefill.token_s, prefill.attention_s)
        self._decode = (decode.base_s, decode.request_s, decode.token_s)
        self._transfer_base_s = profile.transfer.base_s

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV that one token has."""
        return self._kv_bytes_per_token

    @overload
    def prefill_s(self, tokens: float, cached_tokens: float) -> float: ...
    @overload
    def prefill_s(self, tokens: float, cached_tokens: Ints | Floats) -> Floats: ...
    def prefill_s(self, tokens: float, cached_tokens: Any) -> Any:
        """See `CostModel`."""
        base_s, token_s, attention_s = self._prefill
        # n * n - c * c, in one product less for an array
        new = tokens - cached_tokens
        return base_s + new * (token_s + attention_s * (tokens + cached_tokens))

    @overload
    def decode_step_s(self, running: float, context_tokens: float) -> float: ...
    @overload
    def decode_step_s(self, running: Ints | Floats, context_tokens: Ints | Floats) -> Floats: ...
    def decode_step_s(self, running: Any, context_tokens: Any) -> Any:
        """See `CostModel`."""
        base_s, request_s, token_s = self._decode
        return base_s + request_s * running + token_s * context_tokens

    @overload
    def transfer_s(self, tokens: float, link_bytes_per_s: float) -> float: ...
    @overload
    def transfer_s(self, tokens: Ints | Floats, link_bytes_per_s: Floats) -> Floats: ...
    def transfer_s(self, tokens: Any, link_bytes_per_s: Any) -> Any:
        """See `CostModel`."""
        moving_s = self._transfer_base_s + tokens * self._kv_bytes_per_token / link_bytes_per_s
        if isinstance(tokens, np.ndarray):
            return np.where(tokens > 0, moving_s, 0.0)
        return moving_s if tokens else 0.0
