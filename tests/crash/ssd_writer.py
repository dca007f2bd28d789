"""A process that writes to an SSD tier until it is killed, and says each thing that it was promised.

python -m tests.crash.ssd_writer FOLDER SEED SLOTS [lies]

How many slots an intent names ahead is the seed's choice: no small store is named whole all the time.
A line ``go`` when the tier is open, then ``ack FIRST COUNT`` when blocks FIRST to FIRST + COUNT, a chain
of their own, are durable; the same in the file ``said`` beside the store's, so that the log of powercut.c
has it between the writes. With ``lies`` it says so before it writes: a bug that the tests must find.
"""

import os
import random
import sys
from pathlib import Path

import numpy as np

from kvpool.testing.blocks import SMALL_LAYOUT, Payload, key, payload, view_of
from kvpool.tiers.ssd import SsdTier

ROOMY = 600  # slots: more than a run writes, so whatever was promised must be there
TIGHT = 24  # slots: every write evicts, so the last two chains that were promised must be there
CHAIN_MAX = 5
AHEAD = (0, 3, 9, 30, 2000)  # slots
TIMEOUT_S = 120.0
SAID = "said"


def block(number: int) -> Payload:
    """Return the bytes of a made-up block."""
    return payload(SMALL_LAYOUT, 1, seed=number)


def chain_keys(first: int, count: int) -> bytes:
    """Return the keys of a chain."""
    return b"".join(key(number) for number in range(first, first + count))


def say(also: int, *words: object) -> None:
    """Tell the parent, at once, and a file."""
    line = (" ".join(map(str, words)) + "\n").encode()
    for fd in (also, 1):
        os.write(fd, line)


def main() -> None:
    """Write chains of 1 to ``CHAIN_MAX`` blocks, in one or two calls each; now and then remove some."""
    folder, seed, slots = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    lies = sys.argv[4:] == ["lies"]
    chance = random.Random(seed)
    tier = SsdTier(folder, SMALL_LAYOUT, slots, threads=4, timeout_s=TIMEOUT_S)
    tier._writer._ahead = chance.choice(AHEAD)
    also = os.open(folder / SAID, os.O_WRONLY | os.O_CREAT)
    say(also, "go")
    first = 1
    while True:
        count = chance.randint(1, CHAIN_MAX)
        cut = chance.randint(0, count)
        blocks = np.concatenate([block(number) for number in range(first, first + count)])
        if lies:
            say(also, "ack", first, count)
        for begin, end in ((0, cut), (cut, count)):
            parent = key(first + begin - 1) if begin else None
            source = view_of(SMALL_LAYOUT, blocks[begin:end])
            keys = chain_keys(first + begin, end - begin)
            tier.write(keys, parent, source, deadline_s=TIMEOUT_S)
        if tier.durable(chain_keys(first, count)) == count and not lies:
            say(also, "ack", first, count)
        first += count
        if slots == TIGHT and first > 2 * TIGHT and chance.random() < 0.1:
            tier.evict(chance.randint(1, 3))
        if chance.random() < 0.05:
            tier.flush(TIMEOUT_S)


if __name__ == "__main__":
    main()
