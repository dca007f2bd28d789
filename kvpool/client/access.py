"""How a client shows a server who it is, and to whom it does not.

Owns the rule that a secret never leaves this host in the clear unless its owner says so. Reads no
file. Who calls it: whatever opens a gRPC channel, and who is asked for a token.
"""

import ipaddress
from dataclasses import dataclass
from typing import Final

from kvpool.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAccess:
    """How a caller shows who it is, and knows whom it speaks to. PEM texts, read from files before.

    Attributes:
        token: Sent with every call as a bearer token; empty: none.
        ca: Certificates of those who sign servers' certificates; empty: no TLS.
        certificate, key: Of the caller, where servers ask for one.
        insecure: Send the token without TLS to other hosts, too, where whoever listens may take it.
    """

    token: str = ""
    ca: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    insecure: bool = False

    def __repr__(self) -> str:
        """Say what is set, and no secret."""
        return f"ClientAccess(token={bool(self.token)}, tls={bool(self.ca)})"

    def require_safe(self, address: str) -> None:
        """Raise UsageError if calls to an address would show others what is secret, or do not fit.

        Args:
            address: As gRPC takes it: ``HOST:PORT`` or ``unix:PATH``.
        """
        if bool(self.certificate) != bool(self.key) or (self.certificate and not self.ca):
            raise UsageError(
                "a certificate is shown with its key and over TLS: set certificate, key and ca"
            )
        if self.token and not self.ca and not self.insecure and not is_this_host(address):
            raise UsageError(
                f"the token would go to {address} in the clear: set ca, the authority of the "
                "server's certificate (--ca-file, access.server_ca_file), or say insecure=True "
                "(--insecure, access.insecure) where nobody else can listen"
            )

    def metadata(self) -> tuple[tuple[str, str], ...] | None:
        """Return what every call carries."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else None


OPEN: Final = ClientAccess()


def is_this_host(address: str) -> bool:
    """Say whether an address, as gRPC takes it, is certain to stay on this host."""
    if address.startswith("unix:"):
        return True
    host, colon, _ = address.rpartition(":")
    return bool(colon) and is_loopback(host.removeprefix("[").removesuffix("]"))


def is_loopback(host: str) -> bool:
    """Say whether a host's name or address reaches this host alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
