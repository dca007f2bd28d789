"""What tells one other node of the ring the names that it has to know.

Owns the connection to that node and one task: an announcement at a time, news or not, so that the
other hears that this node is there. Everything here runs in the server's event loop. Who calls it: the
node.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvpool.block import NodeId
from kvpool.client import protocol
from kvpool.client.access import ClientAccess
from kvpool.client.rpc import AsyncCaller
from kvpool.errors import (
    KVPoolError,
    PeerUnreachableError,
    StaleIncarnationError,
    TransferTimeoutError,
)
from kvpool.index.directory import Kind
from kvpool.server.naming import Naming

logger = logging.getLogger(__name__)

# Longest wait of one announcement.
_ANNOUNCE_TIMEOUT_S: Final = 2.0
# Tries that reach nobody before an operator is told.
TRIES_MAX: Final = 10
_NOTHING: Final[tuple[Kind, bytes]] = ("stored", b"")


class Teller:
    """Tells one other node what it has to know, one announcement at a time.

    Args:
        naming: What is owed to whom.
        announce: Makes an announcement: kind, names, and whether this node leaves.
        node: Who is told.
        address: Where it answers.
        access: How this node shows who it is.
        interval_s: How often the other hears from this node, news or not.
    """

    def __init__(
        self,
        naming: Naming,
        announce: Callable[[Kind, bytes, bool], protocol.AnnounceRequest],
        node: NodeId,
        address: str,
        *,
        access: ClientAccess,
        interval_s: float,
    ) -> None:
        self._naming = naming
        self._announce = announce
        self.node = node
        self.address = address
        self._interval_s = interval_s
        self._caller = AsyncCaller(address, access)
        self._awake = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._incarnation = b""
        self._fails = False
        self._tries = 0  # that reached nobody, in a row
        self._telling = _NOTHING  # under way: it may not arrive
        self._task = asyncio.get_running_loop().create_task(self._tell())

    def wake(self) -> None:
        """Say that there is news."""
        self._awake.set()

    def news(self) -> bool:
        """Say whether it is to be told something and is known to listen."""
        return not self._fails and self.node in self._naming.waiting()

    async def told(self) -> None:
        """Wait until it was told all there is to tell now, or does not listen."""
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(told)
        self.wake()
        await told

    async def say_farewell(self, timeout_s: float) -> None:
        """Say that this node leaves, and nothing any more behind that."""
        await self._stop()
        farewell = self._announce("stored", b"", True)
        await self._caller.call(protocol.ANNOUNCE, farewell, timeout_s)

    async def close(self) -> None:
        """End its task and connection."""
        await self._stop()
        self._naming.lose(self.node, self._telling)  # it may not have heard it
        self._release()
        await self._caller.close()

    async def _stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for told in waiting:
            if not told.done():
                told.set_result(None)

    async def _tell(self) -> None:
        kind, names = _NOTHING
        while True:
            self._telling = kind, names
            try:
                reply = await self._caller.call(
                    protocol.ANNOUNCE,
                    self._announce(kind, names, False),
                    _ANNOUNCE_TIMEOUT_S,
                )
            except StaleIncarnationError as error:
                logger.error("node %s: %s", self.node, error)
                self._failed()
            except (PeerUnreachableError, TransferTimeoutError) as error:
                self._unreached(error)
                self._failed()
            except KVPoolError as error:
                logger.warning("node %s took no announcement: %s", self.node, error)
                self._failed()
            except asyncio.CancelledError:
                raise
            except Exception:
                logger.exception("node %s could not be told", self.node)
                self._failed()
            else:
                self._fails, self._telling, self._tries = False, _NOTHING, 0
                if self._incarnation not in (b"", reply.incarnation):
                    self._naming.lose(self.node)  # another run of it: it has forgotten
                self._incarnation = reply.incarnation
            names = b""
            if not self._fails:
                kind, names = await self._take()
                if names:
                    continue
            self._release()
            self._awake.clear()
            with suppress(TimeoutError):
                wait_s = self._interval_s
                if self._fails:
                    await asyncio.sleep(wait_s)
                else:
                    await asyncio.wait_for(self._awake.wait(), wait_s)
                    kind, names = await self._take()

    def _unreached(self, error: KVPoolError) -> None:
        """Say to an operator once that nobody answers where this node is said to be."""
        self._tries += 1
        said = logging.WARNING if self._tries == TRIES_MAX else logging.DEBUG
        logger.log(
            said,
            "node %s has not been reached at %s for %d tries: is it up, and is that its address for "
            "others (listen.advertise)? %s",
            *(self.node, self.address, self._tries, error),
        )

    async def _take(self) -> tuple[Kind, bytes]:
        try:
            await self._naming.renew(self.node)
            return self._naming.take(self.node)
        except Exception:  # the others must hear from this node all the same
            logger.exception("what node %s is to be told is not known", self.node)
            self._naming.lose(self.node)
            return _NOTHING

    def _failed(self) -> None:
        self._fails = True
        self._naming.lose(self.node, self._telling)
        self._telling = _NOTHING
