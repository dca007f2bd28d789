"""How the command line reaches servers: one that is named, and through it all of its pool.

Owns the arguments that name a server and show who asks, and what is said when nobody answers. Who
calls it: ``kvpool nodes``, ``stat``, ``match`` and ``top``.
"""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.client import protocol
from kvpool.client.access import ClientAccess
from kvpool.client.rpc import Caller
from kvpool.client.secret_file import read_secret
from kvpool.errors import ConfigError, KVPoolError, PeerUnreachableError, UnavailableError

TIMEOUT_S: Final = 5.0
_TLS_HINT: Final = "no answer (does it speak TLS? --ca-file): "
EPILOG: Final = """\
which server:
  --run-dir DIR        the one of this host whose folder it is (kvpool-server --run-dir, node.run_dir)
  --server HOST:PORT   one of another host (its listen.address). With TLS say --ca-file; with tenants
                       --token-file; where certificates are asked for --certificate-file, --key-file

Any server of a pool will do: it names the others. Exit status: 0, or 2 if it did not answer.
"""


@dataclass(frozen=True, slots=True)
class Node:
    """A server of the pool: its name (``""``: it is alone), its address, and where it is asked."""

    name: str
    address: str
    asked_at: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a server, and ``--json``."""
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of a server of this host"
    )
    place.add_argument("--server", metavar="HOST:PORT", help="address of a server")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="bearer token, mode 0600")
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="signed the server's certificate"
    )
    parser.add_argument(
        "--certificate-file", type=Path, metavar="FILE", help="to show to the server"
    )
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="its private key")
    parser.add_argument(
        "--insecure", action="store_true", help="send the token to another host without TLS"
    )
    parser.add_argument("--json", action="store_true", help="for programs: JSON on one line")


class Asking:
    """Connections to the servers of one pool, one each. Close it at the end."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._access = _access(arguments)
        if arguments.run_dir is not None:
            self.address = f"unix:{arguments.run_dir.absolute() / protocol.CONTROL_SOCKET}"
            self._hint = (
                f"no server answers in {arguments.run_dir}: is kvpool-server running there, as this "
                "user? Start one with kvpool-server --run-dir"
            )
        else:
            self.address = arguments.server
            self._hint = (
                f"no server answers at {arguments.server}: is that its listen.address, and does it "
                "speak TLS (--ca-file)?"
            )
        self._callers: dict[str, Caller] = {}

    def caller(self, address: str = "") -> Caller:
        """Return the connection to an address; without one, to the server that was named."""
        at = address or self.address
        if at not in self._callers:
            self._callers[at] = Caller(at, self._access)
        return self._callers[at]

    def nodes(self) -> list[Node]:
        """Return the pool's nodes as the named server knows them; at least that one."""
        with self.explained():
            reply = self.caller().call(protocol.MEMBERS, protocol.Done(), TIMEOUT_S)
        if not reply.members:
            return [Node("", self.address, self.address)]
        return [
            # The one that was named is asked where that was: it may ask less of its own user there.
            Node(one.node, one.address, self.address if one.node == reply.node else one.address)
            for one in reply.members
        ]

    def stats(self, nodes: list[Node]) -> list[dict[str, int] | str]:
        """Ask all nodes at once; return of each its counts, or why it gave none."""
        asked = [
            self.caller(node.asked_at).ask(protocol.STATS, protocol.Done(), TIMEOUT_S)
            for node in nodes
        ]
        found: list[dict[str, int] | str] = []
        for call in asked:
            try:
                reply = call.reply()
                found.append(dict(sorted({**reply.stats, **reply.extra}.items())))
            except KVPoolError as error:
                found.append(self.trouble(error))
        return found

    def trouble(self, error: KVPoolError) -> str:
        """Say why a server gave no answer, and what may help."""
        hint = "" if self._access.ca or not isinstance(error, UnavailableError) else _TLS_HINT
        return f"{hint}{error}"

    @contextmanager
    def explained(self) -> Generator[None]:
        """Turn an answer that did not come into what to do about it."""
        try:
            yield
        except UnavailableError as error:
            raise PeerUnreachableError(f"{self._hint} ({error})") from error

    def close(self) -> None:
        """Close the connections."""
        for caller in self._callers.values():
            caller.close()


def _access(arguments: argparse.Namespace) -> ClientAccess:
    if (arguments.certificate_file is None) != (arguments.key_file is None):
        raise ConfigError("--certificate-file and --key-file go together", key="--key-file")
    token = ""
    if arguments.token_file is not None:
        token = read_secret(arguments.token_file, "--token-file")
    return ClientAccess(
        token=token,
        ca=_read(arguments.ca_file, "--ca-file"),
        certificate=_read(arguments.certificate_file, "--certificate-file"),
        key=_read(arguments.key_file, "--key-file"),
        insecure=arguments.insecure,
    )


def _read(path: Path | None, key: str) -> bytes:
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}", key=key) from error
