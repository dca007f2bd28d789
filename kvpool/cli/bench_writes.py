"""Rows of the transport's writes: flat bytes into a peer's reserved slots, which the peer pulls.

The engine's put, which `transfer.tcp.write.*` measures, is what carries them; this is what the contract
costs beside it: parts that are announced, claimed, pulled with a check, and answered. Who calls it:
``bench_transfer``.
"""

import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from kvpool.arena import Arena
from kvpool.block import BlockLayout
from kvpool.cli.bench import Case, Sides, Timer
from kvpool.cli.bench_ucx import Scale, Writer, pair_of_rates, peer
from kvpool.cli.bench_ucx_peer import layout, publish_noise
from kvpool.errors import InternalError
from kvpool.transfer.base import Endpoint, SlotSpan
from kvpool.transfer.ucx import UcxTransport

_TIMEOUT_S: Final = 30.0
_LAYERS: Final = {"64KiB": 1, "1MiB": 16}
_STRIDE: Final = 37


def cases(quick: bool) -> list[Case]:
    """Return the rows."""
    return [
        Case(
            name=f"transfer.tcp.write_spans.{name}",
            unit="GB/s",
            reference="kvpool's own put of as many bytes",
            open=partial(_open, layers, Scale.of(quick)),
            one_process=False,
        )
        for name, layers in _LAYERS.items()
    ]


@contextmanager
def _open(layers: int, scale: Scale, timer: Timer) -> Generator[Sides, None, None]:
    with ExitStack() as stack:
        said = peer(stack, "slots", scale.memory_bytes, layers).ask()
        spans = _SpanWriter(stack, said, layout(layers), scale, timer)
        size = layout(layers).block_bytes
        writer = Writer(stack, size, scale, timer)
        yield pair_of_rates(spans.rate, partial(writer.rate, scale.operation_bytes // size), scale)


class _SpanWriter:
    """Writes blocks of an arena into another process's slots, round and round."""

    def __init__(
        self, stack: ExitStack, said: str, shape: BlockLayout, scale: Scale, timer: Timer
    ) -> None:
        told = json.loads(said)
        transport = stack.enter_context(UcxTransport("bench-writer"))
        count = len(told["slots"])
        arena = Arena(shape, count, transport.incarnation)
        slots = publish_noise(arena)
        region = transport.register(arena).region
        self._endpoint: Endpoint = transport.connect(told["address"], _TIMEOUT_S)
        self._endpoint.wait_region(0, _TIMEOUT_S)
        self._pairs = [
            (
                _whole(region, int(slots.indices[at]), int(slots.generations[at]), shape),
                _whole(0, told["slots"][at], told["generations"][at], shape),
            )
            for at in (turn * _STRIDE % count for turn in range(count))
        ]
        self._size = shape.block_bytes
        self._count = scale.operation_bytes // self._size
        self._at = 0
        self._timer = timer

    def rate(self) -> float:
        """Write one operation's bytes; GB/s."""
        if self._at + self._count > len(self._pairs):
            self._at = 0
        pairs = self._pairs[self._at : self._at + self._count]
        self._at += self._count
        began = self._timer()
        written = self._endpoint.write_spans(pairs, _TIMEOUT_S, b"arrived").wait(_TIMEOUT_S)
        took_s = self._timer() - began
        if written != self._count * self._size:
            raise InternalError(f"{written} bytes of {self._count * self._size} were written")
        return written / took_s / 1e9


def _whole(region: int, slot: int, generation: int, shape: BlockLayout) -> SlotSpan:
    return SlotSpan(region, slot, generation, 0, shape.block_bytes)
