"""A client of a pool in a process of its own, for tests that stop or kill it.

``hold`` stores a chain, leases it and waits to be killed; ``hold streams`` without a transport.
``storm`` stores other chains without end, on four threads, and says so on stdout after each of the
first few. ``count N`` stores N chains and ends.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

from kvpool.base import BlockPool, Chain
from kvpool.block import BlockLayout
from kvpool.client.connect import connect
from kvpool.client.remote import RemotePool
from kvpool.config import TransferConfig
from kvpool.testing.blocks import Payload, namespace, payload, view_of

# Blocks of 64 KiB: a chain of 16 is a copy that can be met in the middle.
LAYOUT = BlockLayout(num_layers=8, kv_heads=2, block_tokens=16, k_dim=32, v_dim=32)
CHAIN_BLOCKS = 16
WAIT_S = 30.0
PATIENT = TransferConfig(match_timeout_s=WAIT_S, request_timeout_s=WAIT_S)


def chain_of(pool: BlockPool, number: int, blocks: int = CHAIN_BLOCKS) -> Chain:
    """Return a chain that no other number shares a block with."""
    tokens = list(range(number, number + blocks * LAYOUT.block_tokens))
    return pool.chain(namespace(LAYOUT, f"chain {number}"), tokens)


def blocks_of(number: int, blocks: int = CHAIN_BLOCKS) -> Payload:
    """Return the payload of ``chain_of(number)``."""
    return payload(LAYOUT, blocks, seed=number)


def store(pool: RemotePool, number: int) -> int:
    """Store one chain; return how many of its blocks the pool holds."""
    source = view_of(LAYOUT, blocks_of(number))
    done = pool.store(chain_of(pool, number), source, deadline_s=WAIT_S)
    return done.wait(WAIT_S).stored


def storm(pool: RemotePool) -> None:
    numbers = count(1000)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers)
            store(pool, number)
            with lock:  # a line is written in pieces
                print("stored", number, flush=True)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result()


def main(run_dir: str, job: str, argument: str = "0") -> None:
    ways = () if argument == "streams" else PATIENT.ways
    pool = connect(Path(run_dir), LAYOUT, WAIT_S, config=replace(PATIENT, ways=ways))
    if job == "hold":
        store(pool, 1)
        lease = pool.lease(pool.match(chain_of(pool, 1)), 300)
        print("holds", lease.blocks, flush=True)
        threading.Event().wait()
    elif job == "storm":
        storm(pool)
    elif job == "count":
        for number in range(int(argument)):
            print("stored", store(pool, number), flush=True)
        pool.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
