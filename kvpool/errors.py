"""The tree of errors, cut by what the caller does next.

Owns every exception class of kvpool. A wing translates foreign exceptions into these at its edge
and keeps the original as ``__cause__``. Who calls it: everyone.
"""

from typing import ClassVar


class KVPoolError(Exception):
    """Base of every error that kvpool raises on purpose.

    Args:
        message: What happened and what to do about it, for a person.
        **fields: Typed facts for a program: ``tier``, ``block``, ``node``, ``size_bytes``, ...
            Each becomes an attribute of that name; absent ones read as None.
    """

    field_names: ClassVar[tuple[str, ...]] = ("tier", "block", "node", "size_bytes", "path", "key")

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        unknown = set(fields) - set(self.field_names)
        if unknown:
            raise TypeError(f"unknown error fields {sorted(unknown)}")
        self.tier = fields.get("tier")
        self.block = fields.get("block")
        self.node = fields.get("node")
        self.size_bytes = fields.get("size_bytes")
        self.path = fields.get("path")
        self.key = fields.get("key")


class UsageError(KVPoolError):
    """The call or the file is wrong: fix it. No state changed."""


class ConfigError(UsageError):
    """A setting is unknown, has the wrong unit or contradicts another. ``key`` names it."""


class LayoutMismatchError(UsageError):
    """Two sides describe blocks of different shape, dtype or size. No state changed."""


class UnavailableError(KVPoolError):
    """Not possible now: go elsewhere or recompute. Nothing was lost."""


class CapacityError(UnavailableError):
    """No room, and nothing may be evicted. No state changed. ``size_bytes`` is what was asked."""


class PeerUnreachableError(UnavailableError):
    """The peer is dead, or there is no way to it. Its buffers are quarantined until drained."""


class TransferTimeoutError(UnavailableError):
    """The deadline passed first. What arrived before it may be kept, never what came after."""


class LeaseExpiredError(UnavailableError):
    """The lease ran out or was closed: match and lease again."""


class CancelledTransferError(UnavailableError):
    """The caller cancelled it. Its buffers are free once the completion is done."""


class CorruptionError(KVPoolError):
    """A checksum differed. The block has been dropped; recompute it."""


class FormatVersionError(CorruptionError):
    """Bytes of another format version than this build reads."""


class ClosedError(KVPoolError):
    """The object was closed before or during the call: reopen it."""


class StaleIncarnationError(ClosedError):
    """The peer is another run of the process than the one named. Connect again."""


class InternalError(KVPoolError):
    """A bug in kvpool. Please report it."""
