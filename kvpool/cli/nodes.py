"""``kvpool nodes``, ``stat``, ``match`` and ``top``: a look at a running pool, all of its servers.

Owns their arguments, tables and JSON. Changes nothing anywhere. Who calls it: ``kvpool``.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvpool.block import HASH_BYTES, Namespace
from kvpool.cli import asking
from kvpool.cli.asking import TIMEOUT_S, Asking, Node
from kvpool.client import protocol
from kvpool.errors import KVPoolError, PeerUnreachableError, UsageError
from kvpool.index.hashing import hash_chain

NODES: Final = "List the servers of a pool: who they are, whether they answer, how full they are."
STAT: Final = "Show every count of every server of a pool, or of one."
MATCH: Final = "Say how many leading blocks of a prompt each server has."
TOP: Final = "Watch the servers of a pool: how full they are, and what happens each second."
_MATCH_EPILOG: Final = """\
what to look for, one of:
  --hash HEX           a block hash (64 digits); several, in order, are a chain
  --tokens FILE        token ids, as JSON or apart from each other by blanks; needs --namespace
  --namespace FILE     JSON with model, weights, compute_dtype, kv_dtype, block_tokens, and what else
                       the engine sets; a tenant's salt belongs into its "salt"

"""
# What `top` shows of one second: a column's title and the count that it is the growth of.
_RATES: Final = {"hits/s": "hits", "misses/s": "misses", "evicted/s": "evictions"}


def add_commands(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the four subcommands, each with `add_parser` of a parser's subcommands."""
    for name, run, summary, epilog in (
        ("nodes", _nodes, NODES, ""),
        ("stat", _stat, STAT, ""),
        ("match", _match, MATCH, _MATCH_EPILOG),
        ("top", _top, TOP, ""),
    ):
        made = add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=summary,
            epilog=epilog + asking.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        asking.add_arguments(made)
        made.set_defaults(run=run)
        if name == "stat":
            made.add_argument("--node", metavar="NAME", help="this one alone")
        elif name == "match":
            made.add_argument("--hash", action="append", default=[], metavar="HEX")
            made.add_argument("--tokens", type=Path, metavar="FILE")
            made.add_argument("--namespace", type=Path, metavar="FILE")
        elif name == "top":
            made.add_argument("--interval", type=float, default=1.0, help="seconds (default: 1)")
            made.add_argument("--times", type=int, default=0, help="end after so many; 0: never")


def _nodes(arguments: argparse.Namespace) -> int:
    with contextlib.closing(Asking(arguments)) as servers:
        nodes = servers.nodes()
        counts = servers.stats(nodes)
    rows = [_row(node, found) for node, found in zip(nodes, counts, strict=True)]
    _print(rows, arguments.json)
    return 0


def _stat(arguments: argparse.Namespace) -> int:
    with contextlib.closing(Asking(arguments)) as servers:
        nodes = _chosen(servers.nodes(), arguments.node)
        counts = servers.stats(nodes)
        if len(nodes) == 1 and isinstance(counts[0], str):
            if nodes[0].name:
                node, address, why = nodes[0].name, nodes[0].address, counts[0]
                raise PeerUnreachableError(f"node {node} at {address} does not answer: {why}")
            with servers.explained():
                servers.caller(nodes[0].asked_at).call(protocol.STATS, protocol.Done(), TIMEOUT_S)
    shown = {
        node.name or "server": found if isinstance(found, dict) else {"trouble": found}
        for node, found in zip(nodes, counts, strict=True)
    }
    if arguments.json:
        print(msgspec.json.encode(shown).decode())
        return 0
    for name, found in shown.items():
        print(name)
        for count, value in found.items():
            print(f"  {count:<20} {value:>16,}" if isinstance(value, int) else f"  {value}")
    return 0


def _match(arguments: argparse.Namespace) -> int:
    hashes, block_tokens = _wanted(arguments)
    request = protocol.MatchRequest(hashes=hashes)
    with contextlib.closing(Asking(arguments)) as servers:
        nodes = servers.nodes()
        asked = [
            servers.caller(node.asked_at).ask(protocol.MATCH, request, TIMEOUT_S) for node in nodes
        ]
        rows: list[dict[str, int | str]] = []
        for node, call in zip(nodes, asked, strict=True):
            row: dict[str, int | str] = {"node": node.name or "server", "blocks": 0}
            try:
                row["blocks"] = blocks = call.reply().blocks
                if block_tokens:
                    row["tokens"] = blocks * block_tokens
            except KVPoolError as error:
                row["trouble"] = servers.trouble(error)
            rows.append(row)
    total = len(hashes) // HASH_BYTES
    if arguments.json:
        print(msgspec.json.encode({"blocks": total, "nodes": rows}).decode())
        return 0
    print(f"{total} blocks are looked for")
    _print(rows, as_json=False)
    return 0


def _top(arguments: argparse.Namespace) -> int:
    if not arguments.interval > 0:
        raise UsageError(f"--interval {arguments.interval}: more than 0 seconds")
    before: dict[str, dict[str, int]] = {}
    shown, began = 0, time.monotonic()
    with contextlib.closing(Asking(arguments)) as servers, contextlib.suppress(KeyboardInterrupt):
        while True:
            nodes = servers.nodes()
            counts = servers.stats(nodes)
            now = time.monotonic()
            rows: list[dict[str, int | str]] = []
            for node, found in zip(nodes, counts, strict=True):
                row = _row(node, found)
                if isinstance(found, dict):
                    last = before.get(node.name)
                    for title, count in _RATES.items():
                        grown = found.get(count, 0) - last.get(count, 0) if last else 0
                        row[title] = round(max(0, grown) / max(now - began, 1e-9))
                    before[node.name] = found
                rows.append(row)
            began = now
            if not arguments.json and sys.stdout.isatty():
                print("\033[H\033[2J", end="")
            _print(rows, arguments.json)
            sys.stdout.flush()
            shown += 1
            if shown == arguments.times:
                return 0
            time.sleep(arguments.interval)
    return 0


def _row(node: Node, found: dict[str, int] | str) -> dict[str, int | str]:
    row: dict[str, int | str] = {"node": node.name or "server", "address": node.address}
    if isinstance(found, str):
        return {**row, "state": "down", "trouble": found}
    row["state"] = "up" if found.get("slots") else "empty"
    for name in ("slots", "ready", "leases", "clients", "clients_by_streams", "quarantined"):
        row[name] = found.get(name, 0)
    return row


def _chosen(nodes: list[Node], name: str | None) -> list[Node]:
    chosen = [node for node in nodes if name in (None, node.name)]
    if not chosen:
        known = ", ".join(node.name for node in nodes) or "none"
        raise UsageError(f"there is no node {name}: this pool has {known}")
    return chosen


def _wanted(arguments: argparse.Namespace) -> tuple[bytes, int]:
    """Return the hashes to look for, and how many tokens a block has (0: not known)."""
    if bool(arguments.hash) == (arguments.tokens is not None):
        raise UsageError("say what to look for: --hash, or --tokens with --namespace")
    if arguments.hash:
        try:
            hashes = [bytes.fromhex(text) for text in arguments.hash]
        except ValueError as error:
            raise UsageError(f"--hash: {error}: a block hash has 64 hexadecimal digits") from error
        if any(len(one) != HASH_BYTES for one in hashes):
            raise UsageError("--hash: a block hash has 64 hexadecimal digits")
        return b"".join(hashes), 0
    if arguments.namespace is None:
        raise UsageError("--tokens needs --namespace: the same tokens have other names elsewhere")
    try:
        namespace = msgspec.json.decode(arguments.namespace.read_bytes(), type=Namespace)
        text = arguments.tokens.read_text()
        tokens = msgspec.json.decode(text) if "[" in text else [int(word) for word in text.split()]
        tokens = msgspec.convert(tokens, list[int])
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(f"--namespace or --tokens cannot be read: {error}") from error
    return hash_chain(namespace.digest, tokens, namespace.block_tokens), namespace.block_tokens


def _print(rows: Sequence[dict[str, int | str]], as_json: bool) -> None:
    """Print rows as a table of all their columns, or as JSON."""
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    titles = list(dict.fromkeys(title for row in rows for title in row))
    lines = [titles, *([_cell(row.get(title, "")) for title in titles] for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(titles))]
    numeric = [any(isinstance(row.get(title), int) for row in rows) for title in titles]
    for line in lines:
        cells = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _cell(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
