"""Whether a server that keeps somebody waiting is alive: an empty match, which any server answers.

Owns how long silence is borne. Knows nothing of what is waited for. Who calls it: links, and stores.
"""

from kvpool.client import protocol
from kvpool.client.rpc import Asked, Caller, Reply
from kvpool.errors import ClosedError, KVPoolError, PeerUnreachableError, TransferTimeoutError


def wait_alive(caller: Caller, asked: Asked[Reply], silent_s: float) -> None:
    """Return once a call has ended, however long it takes, as long as its server lives.

    Args:
        caller: To the server that was asked.
        asked: The call under way; it has a deadline of its own.
        silent_s: Longest wait without any sign of life: half of it for the call itself, half for an
            empty match. What takes longer costs one such match every half.

    Raises:
        TransferTimeoutError: The server is silent. The call was given up.
        PeerUnreachableError, ClosedError: Its connection has ended, and the call, if it went another
            way, was given up.
    """
    while not asked.wait(silent_s / 2):
        try:
            caller.call(protocol.MATCH, protocol.MatchRequest(), silent_s / 2)
        except (TransferTimeoutError, PeerUnreachableError, ClosedError):
            if asked.wait(0):
                return  # it says itself what came of it
            asked.cancel()
            raise
        except KVPoolError:
            continue  # an answer too


def reply_of_store(
    caller: Caller, asked: Asked[protocol.StoreReply], silent_s: float
) -> protocol.StoreReply:
    """Return what a server says of a store, for as long as it lives; ``silent_s`` as in ``wait_alive``.

    Raises:
        PeerUnreachableError: It is silent or gone.
        KVPoolError: What it answered.
    """
    try:
        wait_alive(caller, asked, silent_s)
    except TransferTimeoutError as error:
        raise PeerUnreachableError(f"the server is silent for {silent_s} s: {error}") from error
    return asked.reply()
