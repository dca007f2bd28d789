"""Tenants: whom a caller acts for, and what that one may use.

Owns the contract that a server asks for each call. Knows no tokens and no certificates. Who calls
it: the RPC edge of a server, and the service, which looks at the limits.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whom a call is for.

    Attributes:
        name: ``""`` where nobody is told apart.
        salt: Goes into every namespace of the tenant's clients, before their own salt, so that no
            other tenant can name its blocks; empty for none.
        lease_bytes_max: Bytes that all its clients may hold leased at once; None: the pool's limit of
            each client alone.
        store_bytes_max: Bytes of blocks that it may have in the pool; None: what there is room for.
        clients_max, stores_max, calls_max: How many of these it may have at once; None: what there is
            room for.
        operator: May see and change what belongs to everybody: evict, verify, announce.
    """

    name: str = ""
    salt: bytes = b""
    lease_bytes_max: int | None = None
    store_bytes_max: int | None = None
    clients_max: int | None = None
    stores_max: int | None = None
    calls_max: int | None = None
    operator: bool = True

    def is_anybody(self) -> bool:
        """Say whether nothing of a call depends on whose it is: no names, and no limits, of its own."""
        return not self.name and self.lease_bytes_max is None and self.store_bytes_max is None


class Authenticator(Protocol):
    """Says whom a call is for. Safe from any thread; never waits."""

    def authenticate(self, metadata: Mapping[str, str], peer_names: tuple[str, ...]) -> Tenant:
        """Return the tenant of one call.

        Args:
            metadata: Of the call, names in lower case; a token is in ``authorization``.
            peer_names: What the caller's verified certificate says it is; empty without one.

        Raises:
            UsageError: It is nobody who may call. The message says what is missing, never a secret.
        """
        ...

    def own(self) -> Tenant:
        """Return who a process of the server's own user is, which shows nothing: an operator."""
        ...


class OpenAccess:
    """Everybody is one tenant: for sockets that only this user can reach."""

    def authenticate(self, metadata: Mapping[str, str], peer_names: tuple[str, ...]) -> Tenant:
        """Return the one tenant."""
        return _ANYBODY

    def own(self) -> Tenant:
        """Return the one tenant."""
        return _ANYBODY


_ANYBODY: Final = Tenant()
# Set for the time of one call, by the RPC edge.
calling_tenant: ContextVar[Tenant] = ContextVar("calling_tenant", default=_ANYBODY)
