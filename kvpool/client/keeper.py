"""Keeps the link of a client to its server up: a lost one is made anew, a slow one is bettered.

Owns the thread that does both, and the pauses that a silent or dead server is given. Knows nothing of
blocks. Who calls it: the remote pool.
"""

import logging
import threading
from typing import Final

from kvpool.block import BlockLayout
from kvpool.client import protocol
from kvpool.client.breaker import Breaker
from kvpool.client.life import wait_alive
from kvpool.client.link import Link, Place, open_link
from kvpool.client.rpc import Method, Reply, Request
from kvpool.client.ways import Ways
from kvpool.clock import Clock
from kvpool.completion import Deadline
from kvpool.errors import (
    ClosedError,
    KVPoolError,
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)

logger = logging.getLogger(__name__)

# Longest pause between two tries for a better way than the link has.
_BETTER_MAX_S: Final = 60.0
# Links that a better one took the place of, and whose leases may be in use. Beyond them the oldest
# ends: a server that stays has at most one for each worse way.
_REPLACED_MAX: Final = 2


class LinkKeeper:
    """Holds the link, and one thread that makes a new one after a loss. Safe from any thread.

    A link whose bytes go a slower way than the server offers, because the better one did not answer
    when it was made, is replaced by a better one as soon as there is one: what begins from then on
    goes there. The replaced one stays open for what was leased on it.

    A server that did not answer somebody in time is not asked by anybody, until it has answered this
    keeper's thread: silence costs the one who meets it first, and nobody behind.

    One condition guards the links, their counts, ``_silent`` and ``_closed``. Nothing is called under
    it.

    Args:
        place, layout, ways: As for ``open_link``.
        clock: Of the pauses between tries.
        attempt_s: Longest time of one try.
        backoff_min_s, backoff_max_s: The pauses.

    Attributes:
        losses: Links that were lost.
        bettered: Links that were replaced by a better one.
    """

    def __init__(
        self,
        place: Place,
        layout: BlockLayout,
        ways: Ways,
        clock: Clock,
        *,
        attempt_s: float,
        backoff_min_s: float,
        backoff_max_s: float,
    ) -> None:
        self.place = place
        self._layout = layout
        self._ways = ways
        self._attempt_s = attempt_s
        self._retry = Breaker(clock, min_s=backoff_min_s, max_s=backoff_max_s)  # of a dead server
        self._changed = threading.Condition()
        self._silent = False  # and asked by the thread alone, until it answers
        self._link: Link | None = None
        self._replaced: list[Link] = []
        self._dead: list[Link] = []  # lost, to be closed by the thread
        self._welcome: protocol.Welcome | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._keep, name="kvpool-link", daemon=True)
        self._better_min_s = backoff_min_s
        self.losses = 0
        self.bettered = 0

    def open(self, timeout_s: float) -> None:
        """Make the first link, and start to keep it. Raises as ``open_link``."""
        self._adopt(open_link(self.place, self._layout, self._ways, timeout_s))
        self._thread.start()

    def welcome(self) -> protocol.Welcome:
        """Return what the server said last of itself. Raises PeerUnreachableError before it did."""
        with self._changed:
            if self._welcome is None:
                raise PeerUnreachableError(f"no server at {self.place} yet: recompute, or wait")
            return self._welcome

    def start(self) -> None:
        """Look for the first link in the background."""
        self._thread.start()

    def link(self) -> Link:
        """Return the link. Never waits.

        Raises:
            PeerUnreachableError: There is none now; a new one is being tried for.
            ClosedError: The keeper is closed.
        """
        with self._changed:
            if self._closed:
                raise ClosedError("the pool is closed: connect again")
            if self._link is None:
                raise PeerUnreachableError(
                    f"no server at {self.place}: recompute; a new one is looked for"
                )
            return self._link

    def ask(
        self,
        method: Method[Request, Reply],
        request: Request,
        timeout_s: float,
        link: Link | None = None,
        *,
        silent_s: float | None = None,
    ) -> Reply:
        """Make one short request on ``link``, or on the link there is.

        Args:
            method: What to ask.
            request: With what.
            timeout_s: Longest wait for the answer.
            link: On which connection; None: the one there is.
            silent_s: Longest wait for any sign of life: a server that does not even answer an empty
                match by then is given up. None: ``timeout_s``.

        Raises:
            TransferTimeoutError: No answer in time. The server counts as silent.
            PeerUnreachableError: It is silent, or there is none, or it was lost.
            ClosedError: The keeper is closed.
            KVPoolError: What the server answered.
        """
        link = link or self.link()
        if self.silent():
            raise PeerUnreachableError("the server is silent: recompute; it is listened for")
        try:
            if silent_s is None:
                asked = link.caller.ask(method, request, timeout_s)
            else:
                give_up = Deadline(silent_s)
                asked = link.caller.ask(method, request, timeout_s, silent_s / 2)
                wait_alive(link.caller, asked, give_up.remaining_s())
            reply = asked.reply()
        except TransferTimeoutError:
            self.note_silence()
            raise
        except (PeerUnreachableError, ClosedError) as error:
            self._lost(link)  # to be closed by the thread: that may take its time
            if self._closed:
                raise ClosedError("the pool was closed: connect again") from error
            raise PeerUnreachableError(f"the server was lost, recompute: {error}") from error
        return reply

    def way(self) -> str:
        """Return what bytes take now: ``host``, ``ucx`` or ``streams``; nothing without a link."""
        with self._changed:
            return self._link.way if self._link is not None else ""

    def usable(self) -> bool:
        """Say whether there is a server, as far as is known, and it answered lately."""
        with self._changed:
            return self._link is not None and not self._silent

    def silent(self) -> bool:
        """Say whether the server did not answer somebody in time, and has not answered since."""
        return self._silent

    def note_silence(self) -> None:
        """Take note that the server did not answer somebody in time: it is listened for from now on."""
        with self._changed:
            if self._link is not None:
                self._silent = True
                self._changed.notify_all()

    def lose(self, link: Link) -> None:
        """Give a link up: its path is closed first, a new one is made second. Idempotent."""
        with self._changed:
            self._forget(link)
        link.close()

    def wait_linked(self, timeout_s: float) -> None:
        """Wait for a link. Raises TransferTimeoutError after ``timeout_s``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._link is not None, timeout_s):
                raise TransferTimeoutError(f"no server at {self.place} within {timeout_s} s")

    def close(self, timeout_s: float) -> None:
        """Close the link and end the thread. Idempotent, bounded."""
        with self._changed:
            self._closed = True
            links = [*self._dead, *self._replaced, *([self._link] if self._link else [])]
            self._link, self._dead, self._replaced = None, [], []
            self._changed.notify_all()
        for link in links:
            link.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _adopt(self, link: Link) -> None:
        with self._changed:
            closed = self._closed
            if not closed:
                if self._link is not None:
                    self.bettered += 1
                    self._replaced.append(self._link)
                    self._dead += self._replaced[:-_REPLACED_MAX]
                    del self._replaced[:-_REPLACED_MAX]
                self._link, self._silent = link, False
                self._welcome = link.welcome
                self._changed.notify_all()
        if closed:
            link.close()
            return
        if link.late:
            logger.warning(
                "bytes of the server at %s go by %s, which is slower: %s did not answer in time; it "
                "is tried again in the background. If it cannot work from here, leave it out of "
                "transfer.ways",
                *(self.place, link.way, " and ".join(link.late)),
            )
        # At once if it is lost already. From a thread of the way: closing may not be done there.
        link.on_lost(lambda: self._lost(link))

    def _lost(self, link: Link) -> None:
        with self._changed:
            if self._forget(link):
                self._dead.append(link)

    def _forget(self, link: Link) -> bool:
        """Have a link no longer, if it is known still. Under the condition."""
        if link in self._replaced:
            self._replaced.remove(link)
        elif self._link is link:
            self._link, self._silent = None, False
            self.losses += 1
        else:
            return False
        self._changed.notify_all()
        return True

    def _keep(self) -> None:
        better_s = self._better_min_s
        while True:
            with self._changed:
                link = self._link
                hopes = link is not None and bool(link.late)
                woken = self._changed.wait_for(
                    lambda: self._closed or self._link is None or self._silent or bool(self._dead),
                    better_s if hopes else None,
                )
                if self._closed:
                    return
                dead, self._dead = self._dead, []
                link, silent = self._link, self._silent
            for each in dead:
                each.close()
            if link is None:
                better_s = self._better_min_s
                if not self._make():
                    return
            elif silent:
                self._listen(link)
            elif not woken:
                better_s = min(2 * better_s, _BETTER_MAX_S)
                self._make_better(link)

    def _listen(self, link: Link) -> None:
        """Ask a silent server for a sign of life, for the longest time of a try."""
        try:
            link.caller.call(protocol.MATCH, protocol.MatchRequest(), self._attempt_s)
        except TransferTimeoutError:
            return
        except (PeerUnreachableError, ClosedError):
            self._lost(link)
            return
        except KVPoolError as error:
            logger.debug("the server at %s answers: %s", self.place, error)
        with self._changed:
            if self._link is link:
                self._silent = False

    def _make(self) -> bool:
        """Try for a link, and wait a while if there is none. False: there will be none any more."""
        try:
            link = open_link(self.place, self._layout, self._ways, self._attempt_s)
        except ClosedError:
            return False  # the transport was closed: nobody can connect any more
        except UsageError as error:
            logger.warning("the server at %s cannot be used: %s", self.place, error)
        except KVPoolError as error:
            logger.debug("no server at %s yet: %s", self.place, error)
        except Exception:  # whatever went wrong: who looks for the server goes on
            logger.exception("no server at %s yet", self.place)
        else:
            logger.info("connected to the server at %s again", self.place)
            self._retry.succeeded()
            self._adopt(link)
            return True
        pause_s = self._retry.failed()
        with self._changed:
            return not self._changed.wait_for(lambda: self._closed, pause_s)

    def _make_better(self, link: Link) -> None:
        """Try for a link by a better way than this one's, and have it take its place."""
        try:
            better = open_link(self.place, self._layout, self._ways, self._attempt_s, link.late)
        except KVPoolError as error:
            logger.debug("no better way to %s yet: %s", self.place, error)
        except Exception:
            logger.exception("no better way to %s yet", self.place)
        else:
            logger.info("bytes of the server at %s go by %s now", self.place, better.way)
            self._adopt(better)
