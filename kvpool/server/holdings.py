"""What the service tells of the blocks that come and go. Who hears it: the node of a ring."""

from typing import Protocol

from kvpool.tiers.base import Tier


class Holdings(Protocol):
    """Hears of blocks. Everything is called in the server's event loop."""

    async def opened(self, tier: Tier) -> None:
        """Hear of the tier, once, before the first client uses it. May wait for a scan of it."""
        ...

    async def stored(self, chain: bytes, first: int, count: int) -> None:
        """Hear that blocks ``first`` to ``first + count`` of a chain are here now.

        May wait a little until whoever asks elsewhere would find them.

        Args:
            chain: Hashes from the root on, to the last of the blocks at least.
            first: The first block that came, or was here already.
            count: How many did.
        """
        ...

    def missed(self, names: bytes) -> None:
        """Hear that a block that somebody asked for is not here: whoever says so is wrong.

        Args:
            names: Its hash, and those behind it in its chain that were asked for, too.
        """
        ...
