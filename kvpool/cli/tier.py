"""``kvpool tier``: look at the tiers of a running server, check them, make room in them.

Owns arguments and output. Who calls it: ``kvpool``. The folder of an SSD tier whose server is down
is checked by ``kvpool fsck``.
"""

import argparse
from pathlib import Path
from typing import Final

import msgspec

from kvpool.client import protocol
from kvpool.client.rpc import Caller
from kvpool.errors import PeerUnreachableError, UnavailableError, UsageError

_TIMEOUT_S: Final = 5.0
# A GiB a second is little for memory, and for a disk.
_VERIFY_TIMEOUT_S: Final = 3600.0

DESCRIPTION: Final = "Look at the tiers of a running server, check them, make room in them."
EPILOG: Final = """\
actions:
  ls       one line a tier: its room, and how much of it is used
  stat     every count of every tier, and of what goes between them ("stack")
  verify   read every block of every tier and compare its checksums; what is bad is dropped. Blocks
           that the disk did not give are counted as unread, and stay
  evict    evict blocks from DRAM, least recently used first; what is on an SSD stays there

Exit status of verify: 0 if every block was whole, 1 if some were not, or not read. The folder of an
SSD tier is checked by `kvpool fsck DIR` while its server is down.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvpool tier``."""
    parser.add_argument("action", choices=("ls", "stat", "verify", "evict"))
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's folder")
    parser.add_argument("--blocks", type=int, default=1, help="evict: how many (default: 1)")
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask the server and print; return the exit status."""
    caller = Caller(f"unix:{arguments.run_dir.absolute() / protocol.CONTROL_SOCKET}")
    try:
        if arguments.action == "verify":
            found = caller.call(protocol.VERIFY, protocol.Done(), _VERIFY_TIMEOUT_S)
            verified = {"dram": {"checked": found.checked, "bad": found.bad}}
            if found.HasField("ssd"):
                below = found.ssd
                verified["ssd"] = {
                    "checked": below.checked,
                    "bad": below.bad,
                    "unread": below.unread,
                }
            _print(verified, arguments.json)
            return 1 if found.bad or found.ssd.bad or found.ssd.unread else 0
        if arguments.action == "evict":
            if arguments.blocks < 0:
                raise UsageError(f"evict {arguments.blocks} blocks: name 0 or more")
            request = protocol.EvictRequest(blocks=arguments.blocks)
            evicted = caller.call(protocol.EVICT, request, _TIMEOUT_S).blocks
            _print({"dram": {"evicted": evicted}}, arguments.json)
            return 0
        reply = caller.call(protocol.TIERS, protocol.Done(), _TIMEOUT_S)
    except UnavailableError as error:
        raise PeerUnreachableError(
            f"no server answers in {arguments.run_dir}: start one with kvpool-server --run-dir"
        ) from error
    finally:
        caller.close()
    tiers = {tier.name: dict(sorted(tier.counts.items())) for tier in reply.tiers}
    if arguments.action == "ls":
        names = ("slots", "ready", "free", "used_bytes")
        tiers = {
            tier: {name: counts[name] for name in names}
            for tier, counts in tiers.items()
            if tier != "stack"
        }
    _print(tiers, arguments.json)
    return 0


def _print(tiers: dict[str, dict[str, int]], as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(tiers).decode())
        return
    for tier, counts in tiers.items():
        print(tier)
        for name, count in counts.items():
            print(f"  {name:<20} {count:>16,}")
