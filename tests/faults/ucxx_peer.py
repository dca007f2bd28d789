"""An owner over ucxx that a test kills or stops: prints where it is, then waits to be ended."""

import json
import sys

from kvpool.arena import Arena
from kvpool.testing.blocks import SMALL_LAYOUT, payload
from kvpool.testing.pair import publish
from kvpool.transfer.ucxpy import UcxxTransport

if __name__ == "__main__":
    with UcxxTransport(trusted_network=True) as transport:
        arena = Arena(SMALL_LAYOUT, 4, transport.incarnation)
        transport.register(arena)
        slots = publish(arena, payload(SMALL_LAYOUT, 4, seed=1))
        where = transport.listen("ucxx://127.0.0.1:0", lambda endpoint: None)
        lives = [slot.generation for slot in slots]
        print(json.dumps({"address": where, "generations": lives}), flush=True)
        sys.stdin.read()
