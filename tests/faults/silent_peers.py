"""Servers of a ring in this process that fall silent as a test says, and note how long each call waits.

They speak the protocol over gRPC streams, hold every block of one payload, and answer everything until
they are told not to. What a caller waits is what it says itself: the deadline of its call.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc
from google.protobuf.message import Message

from kvpool.block import HASH_BYTES
from kvpool.client import protocol
from kvpool.client.rpc import Method
from kvpool.client.streams import cut
from kvpool.memory import BlockView

_THREADS: Final = 16


@dataclass(frozen=True, slots=True)
class Call:
    """One call that came: whose, of what, how long it is waited for, and whether it was answered."""

    node: str
    method: str
    timeout_s: float
    silent: bool


class SilentPeers:
    """The servers, from construction to the end of the ``with``.

    ``_changed`` guards what came, who is silent, and who fails.

    Args:
        count: How many.
        blocks: What each of them holds of any chain.
    """

    def __init__(self, count: int, blocks: BlockView) -> None:
        self._blocks = blocks
        self._changed = threading.Condition()
        self._silent: dict[str, set[str]] = {}
        self._calls: list[Call] = []
        self._kept = Counter[str]()
        self._failing: set[tuple[str, str]] = set()
        self._ended = False
        self.names = [f"peer-{number}" for number in range(count)]
        self.addresses: dict[str, str] = {}
        self._stack = ExitStack()
        for name in self.names:
            self._serve(name)

    def silence(self, *methods: Method[Any, Any], nodes: list[str] | None = None) -> None:
        """Have servers, or all of them, answer these methods no more."""
        with self._changed:
            for node in self.names if nodes is None else nodes:
                self._silent.setdefault(node, set()).update(method.path for method in methods)

    def fail(self, method: Method[Any, Any], node: str) -> None:
        """Have a server end every call of a method at once, as one that dies does."""
        with self._changed:
            self._failing.add((node, method.path))

    def speak(self) -> None:
        """Have everybody answer everything again, what came meanwhile too."""
        with self._changed:
            self._silent.clear()
            self._failing.clear()
            self._changed.notify_all()

    def calls(self, *methods: Method[Any, Any]) -> list[Call]:
        """Return the calls of these methods that came since ``forget``, in their order."""
        paths = {method.path for method in methods}
        with self._changed:
            return [call for call in self._calls if call.method in paths]

    def kept(self, method: Method[Any, Any]) -> int:
        """Return how many calls of a method wait for an answer now."""
        with self._changed:
            return self._kept[method.path]

    def forget(self) -> None:
        """Forget what came."""
        with self._changed:
            self._calls.clear()

    def _serve(self, name: str) -> None:
        threads = self._stack.enter_context(ThreadPoolExecutor(_THREADS))
        server = grpc.server(threads)
        handlers: dict[str, dict[str, Any]] = {}

        def unary(method: Method[Any, Any], reply: Callable[[Any], Message]) -> None:
            def handler(payload: bytes, context: grpc.ServicerContext) -> bytes:
                self._enter(name, method, context)
                return reply(method.request.FromString(payload)).SerializeToString()

            made = grpc.unary_unary_rpc_method_handler(handler)
            handlers.setdefault(f"kvpool.{method.service}", {})[method.name] = made

        def stream(method: Method[Any, Any], replies: Callable[[Any], Iterator[Message]]) -> None:
            def handler(payload: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
                self._enter(name, method, context)
                for reply in replies(method.request.FromString(payload)):
                    yield reply.SerializeToString()

            made = grpc.unary_stream_rpc_method_handler(handler)
            handlers.setdefault(f"kvpool.{method.service}", {})[method.name] = made

        welcome = protocol.Welcome(
            version=protocol.PROTOCOL_VERSION, server=name.encode().ljust(16), node=name
        )
        unary(protocol.CONFIGURE, lambda _: welcome)
        unary(protocol.HELLO, lambda _: protocol.Done())
        unary(protocol.MATCH, lambda _: protocol.MatchReply())
        unary(protocol.RELEASE, lambda _: protocol.Done())
        unary(protocol.MEMBERS, lambda _: self._members(name))
        unary(protocol.LOOKUP, self._holders)
        unary(protocol.LEASE, self._lease)
        stream(protocol.STAY, self._stay)
        stream(protocol.READ, self._read)
        for service, methods in handlers.items():
            generic = grpc.method_handlers_generic_handler(service, methods)
            server.add_generic_rpc_handlers((generic,))
        self.addresses[name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self._stack.callback(lambda: server.stop(None).wait())

    def _enter(self, node: str, method: Method[Any, Any], context: grpc.ServicerContext) -> None:
        """Note a call, and keep it waiting as long as its method is silent and it is waited for."""
        left_s: float | None = context.time_remaining()

        def answered() -> bool:
            return self._ended or method.path not in self._silent.get(node, ())

        with self._changed:
            context.add_callback(self._wake)
            self._calls.append(Call(node, method.path, left_s or 0.0, not answered()))
            self._kept[method.path] += 1
            self._changed.wait_for(lambda: answered() or not context.is_active())
            self._kept[method.path] -= 1
            failing = (node, method.path) in self._failing
        if failing:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _members(self, name: str) -> protocol.MembersReply:
        members = [
            protocol.Member(node=node, address=address, heard=True)
            for node, address in self.addresses.items()
        ]
        return protocol.MembersReply(members=members, ring=b"ring", node=name)

    def _holders(self, request: protocol.LookupRequest) -> protocol.LookupReply:
        count = len(request.names) // HASH_BYTES
        everybody = protocol.NodeSet(nodes=self.names)
        return protocol.LookupReply(holders=[0] * count, sets=[everybody], ring=b"ring")

    def _lease(self, request: protocol.LeaseRequest) -> protocol.LeaseReply:
        count = len(request.hashes) // HASH_BYTES
        return protocol.LeaseReply(lease=1, slots=range(count), generations=range(count))

    def _stay(self, _: protocol.StayRequest) -> Iterator[protocol.Done]:
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        yield protocol.Done()

    def _read(self, request: protocol.ReadRequest) -> Iterator[protocol.Payload]:
        return cut(self._blocks.take(request.first, request.first + request.count))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._stack.close()
