"""Rows of the pool that other processes hold, beside Mooncake's store doing the same.

``server.put`` and ``server.get`` move blocks between this process and a kvpool-server of this host;
``server.tcp`` does so over TCP alone, ``server.process`` within one process. ``server.exists`` and
``server.lookup`` ask who holds what. Both sides compare what comes back outside of the time. Who calls
it: ``kvpool bench server``.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from kvpool.base import BlockPool
from kvpool.block import BlockLayout
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_reference import rotate_bytes
from kvpool.cli.bench_server_peer import Mooncake
from kvpool.cli.bench_server_ring import Prompts, Servers, new_chain, wait_matched
from kvpool.cli.bench_tiers import aligned_room
from kvpool.cli.bench_ucx import sampled
from kvpool.config import PoolConfig, TransferConfig
from kvpool.errors import InternalError
from kvpool.memory import BlockView
from kvpool.pool import Pool

_OPERATION_BYTES: Final = 32 << 20
# 16 tokens of 8 KV heads of 128 bfloat16 numbers: 64 KiB a layer.
_LAYERS: Final = {"256KiB": 4, "1MiB": 16, "2MiB": 32}
# Row -> size of a block, and blocks of one call.
_JOBS: Final = {
    "256KiB": ("256KiB", 128),
    "2MiB": ("2MiB", 16),
    "1x1MiB": ("1MiB", 1),
}
# What a pool has room for, in samples.
_ROOM: Final = 4
_TIMEOUT_S: Final = 60.0
# A busy moment must not turn a look-up into a miss.
_PATIENCE_S: Final = 10.0
# Blocks that are asked for: of 4 KiB.
_SMALL: Final = BlockLayout(num_layers=1, kv_heads=1, block_tokens=16, k_dim=64, v_dim=64)
_EXISTS: Final = 10_000
_LOOKUP_TOKENS: Final = 131_072
_ASKED_QUICK: Final = 4
_ASKED: Final = 100
# How often a sample goes round: once is 0.1 s, and one turn of another process a tenth of that.
_ROUNDS: Final = 4

_Open = Callable[[ExitStack, BlockLayout, int], BlockPool]


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    scale = (64 << 20, 1) if quick else (rotate_bytes(), _ROUNDS)
    both = ("put", "get")
    rows = [
        _moves(f"server.{way}.{name}", way, *job, "Mooncake's store, as it comes", _default, scale)
        for name, job in _JOBS.items()
        for way in both
    ]
    rows += [
        _moves(f"server.tcp.{way}.{name}", way, *job, "Mooncake's store, tcp", _over_tcp, scale)
        for name, job in _JOBS.items()
        for way in both
    ]
    rows += [
        _moves(
            f"server.process.{way}.{name}", way, *job, "Mooncake's store, same process", None, scale
        )
        for name, job in _JOBS.items()
        for way in both
    ]
    asked = _ASKED_QUICK if quick else _ASKED
    blocks = _LOOKUP_TOKENS // _SMALL.block_tokens
    return [
        *rows,
        _asks(f"server.exists.{_EXISTS}", 1, _EXISTS, asked),
        _asks(f"server.lookup.{_LOOKUP_TOKENS}", 5, blocks, asked),
    ]


# ---- bytes ---------------------------------------------------------------------------------------


def _moves(
    name: str,
    way: str,
    block: str,
    count: int,
    reference: str,
    pool: _Open | None,
    scale: tuple[int, int],
) -> Case:
    return Case(
        name=name,
        unit="GB/s",
        reference=reference,
        open=partial(_open_moves, way, _LAYERS[block], count, pool, scale),
        one_process=False,
    )


def _default(stack: ExitStack, layout: BlockLayout, memory_bytes: int) -> BlockPool:
    return Servers(stack, 1, memory_bytes).connect(stack, layout, TransferConfig())


def _over_tcp(stack: ExitStack, layout: BlockLayout, memory_bytes: int) -> BlockPool:
    return Servers(stack, 1, memory_bytes).connect(stack, layout, TransferConfig(ways=("ucx",)))


def _in_process(stack: ExitStack, layout: BlockLayout, memory_bytes: int) -> BlockPool:
    return stack.enter_context(Pool.open(layout, PoolConfig(dram_bytes=memory_bytes)))


@contextmanager
def _open_moves(
    way: str,
    layers: int,
    count: int,
    pool: _Open | None,
    scale: tuple[int, int],
    timer: Timer,
) -> Generator[Sides, None, None]:
    size, rounds = scale
    layout = BlockLayout(
        num_layers=layers, kv_heads=8, block_tokens=16, k_dim=128, v_dim=128, dtype="bfloat16"
    )
    memory_bytes = _ROOM * size
    with ExitStack() as stack:
        ours = Prompts((pool or _in_process)(stack, layout, memory_bytes), size, count, timer)
        theirs = Mooncake(
            stack, size, memory_bytes, apart=pool is not None, pooled=pool is _over_tcp
        )
        yield _Moves(way, ours, theirs, (size, rounds), (layout.block_bytes, count))


class _Moves:
    ceiling: float | None = None

    def __init__(
        self,
        way: str,
        ours: Prompts,
        theirs: Mooncake,
        scale: tuple[int, int],
        call: tuple[int, int],
    ) -> None:
        self._way = way
        self._ours = ours
        self._theirs = theirs
        self._size, self._rounds = scale
        self._call = call
        if way == "get":
            ours.put()
            theirs.seconds("put", *call)

    def value(self) -> float:
        return sampled(self._own_rate, self._rounds)

    def reference(self) -> float:
        return sampled(self._their_rate, self._rounds)

    def _own_rate(self) -> float:
        return self._size / (self._ours.put() if self._way == "put" else self._ours.get()) / 1e9

    def _their_rate(self) -> float:
        return self._size / self._theirs.seconds(self._way, *self._call) / 1e9


# ---- questions -----------------------------------------------------------------------------------


def _asks(name: str, servers: int, blocks: int, asked: int) -> Case:
    nodes = "one server" if servers == 1 else f"{servers} servers"
    return Case(
        name=name,
        unit="ms",
        reference=f"Mooncake's batch_is_exist of {blocks} keys; kvpool: {nodes}",
        open=partial(_open_asks, servers, blocks, asked),
        lower_is_better=True,
        one_process=False,
    )


@contextmanager
def _open_asks(servers: int, blocks: int, asked: int, timer: Timer) -> Generator[Sides, None, None]:
    size = blocks * _SMALL.block_bytes
    with ExitStack() as stack:
        config = TransferConfig(match_timeout_s=_PATIENCE_S, replicas=1)
        pool = Servers(stack, servers, 2 * size).connect(stack, _SMALL, config)
        chain = new_chain(pool, 1, blocks)
        source = BlockView.of_buffer(_SMALL, aligned_room(size))
        stored = pool.store(chain, source, deadline_s=_TIMEOUT_S).wait(_TIMEOUT_S)
        if stored.stored != blocks:
            raise InternalError(f"stored {stored.stored} of {blocks} blocks: {stored.refused}")
        wait_matched(pool, chain)
        theirs = Mooncake(stack, _OPERATION_BYTES, _ROOM * size, apart=True, pooled=False)
        theirs.seconds("keep", blocks)

        def ours() -> float:
            began = timer()
            found = pool.match(chain).blocks
            took_s = timer() - began
            if found != blocks:
                raise InternalError(f"{found} of {blocks} blocks were found")
            return took_s

        yield _Asks(ours, partial(theirs.seconds, "exist", blocks), asked)


class _Asks:
    ceiling: float | None = None

    def __init__(self, ours: Callable[[], float], theirs: Callable[[], float], asked: int) -> None:
        self._ours = ours
        self._theirs = theirs
        self._asked = asked

    def value(self) -> float:
        return sum(self._ours() for _ in range(self._asked)) / self._asked * 1e3

    def reference(self) -> float:
        return sum(self._theirs() for _ in range(self._asked)) / self._asked * 1e3
