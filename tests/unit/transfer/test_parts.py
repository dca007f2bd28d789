"""Parts: workers with other block sizes, heads and layers than each other's, and streams between them."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.block import BlockLayout
from kvpool.errors import LayoutMismatchError, UsageError
from kvpool.events import NullSink
from kvpool.memory import BlockView, Span
from kvpool.testing.pair import WAIT_S, Collected
from kvpool.transfer.base import Endpoint, Transport
from kvpool.transfer.layerwise import Outbox, StreamHub
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport
from kvpool.transfer.parts import Part, common_part, part_view
from kvpool.transfer.stream_wire import slice_layout
from kvpool.transfer.ucx import UcxTransport

LAYERS, HEADS, TOKENS, DIM = 4, 4, 192, 8
Numbers = NDArray[np.float32]
Memory = Callable[["Worker"], BlockView]


def part(tokens: int, heads: range = range(HEADS), layers: range = range(LAYERS)) -> Part:
    layout = BlockLayout(
        num_layers=len(layers), kv_heads=len(heads), block_tokens=tokens, k_dim=DIM, v_dim=DIM
    )
    return Part(replace(layout, dtype="float32"), layers.start, heads.start)


class Worker:
    """A worker's memory, in one of the orders that engines have; ``numbers`` is [l, h, kv, t, d]."""

    def __init__(self, has: Part, order: str) -> None:
        self.has = has
        layout = has.layout
        size, layers, heads = layout.block_tokens, layout.num_layers, layout.kv_heads
        blocks = TOKENS // size
        self.ids = np.random.default_rng(blocks).permutation(blocks + 3)[:blocks]
        if order == "canonical":  # as in slots: [block, layer, head, kv, token, dim]
            self._data = np.zeros((blocks + 3, layers, heads, 2, size, DIM), dtype=np.float32)
            axes = self._data.transpose(1, 2, 3, 0, 4, 5)
        elif order == "paged":  # [layer, kv, block, token, head, dim]
            self._data = np.zeros((layers, 2, blocks + 3, size, heads, DIM), dtype=np.float32)
            axes = self._data.transpose(0, 4, 1, 2, 3, 5)
        else:  # contiguous layers, no paging: [layer, kv, head, token, dim]
            self.ids = np.arange(blocks)
            self._data = np.zeros((layers, 2, heads, TOKENS, DIM), dtype=np.float32)
            split = self._data.reshape(layers, 2, heads, blocks, size, DIM)
            axes = split.transpose(0, 2, 1, 3, 4, 5)
        self._axes = axes  # [layer, head, kv, block, token, dim]
        layer, head, kv, block, token, _ = axes.strides
        self.view = BlockView(
            layout=layout,
            base=Span.of(self._data).address,
            block_stride=block,
            layer_stride=layer,
            head_stride=head,
            kv_stride=kv,
            k_token_stride=token,
            v_token_stride=token,
            block_ids=self.ids.astype(np.uint64),
            owner=self._data,
        )

    @property
    def numbers(self) -> Numbers:
        shape = (self.has.layout.num_layers, self.has.layout.kv_heads, 2, TOKENS, DIM)
        return self._axes[:, :, :, self.ids].reshape(shape)

    def fill(self, numbers: Numbers) -> None:
        blocks = len(self.ids)
        split = self.of(numbers).reshape(*self._axes.shape[:3], blocks, -1, DIM)
        self._axes[:, :, :, self.ids] = split

    def of(self, numbers: Numbers) -> Numbers:
        """Return what of the model's numbers this worker has."""
        layers, heads = self.has.layers, self.has.heads
        return numbers[layers.start : layers.stop, heads.start : heads.stop]


class Wire:
    """Two hubs that are joined."""

    def __init__(self, open_transport: Callable[[], Transport], address: str) -> None:
        self.here, self.there = open_transport(), open_transport()
        self.sending, self.receiving = StreamHub(NullSink()), StreamHub(NullSink())
        connected = Collected()
        where = self.there.listen(address, connected)
        self.endpoint = self.here.connect(where, WAIT_S)
        answering = connected.wait(1)[0]
        assert isinstance(answering, Endpoint)
        self.outboxes: dict[BlockLayout, Outbox] = {}
        self.sending.attach(self.endpoint)
        self.receiving.attach(answering)

    def stream(self, sender: Worker, receiver: Worker, request: str) -> bool:
        """Send what two workers have in common, layer by layer. False if that is nothing."""
        common = common_part(sender.has, receiver.has)
        if common is None:
            return False
        source = part_view(sender.view, sender.has, common)
        dest = part_view(receiver.view, receiver.has, common)
        one_layer = slice_layout(common.layout)
        if one_layer not in self.outboxes:
            self.outboxes[one_layer] = Outbox(self.here, one_layer, 8)
        expected = self.receiving.expect(request, dest, deadline_s=WAIT_S)
        stream = self.sending.open(
            self.endpoint,
            request,
            self.outboxes[one_layer],
            common.layout,
            len(source),
            deadline_s=WAIT_S,
        )
        for layer in range(common.layout.num_layers):
            stream.send(layer, 0, source, chunk=0)
        stream.finish(b"", deadline_s=WAIT_S)
        expected.completion.wait(WAIT_S)
        return True

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()
        self.here.close()
        self.there.close()
        for outbox in self.outboxes.values():
            outbox.close()


@pytest.fixture(scope="module", params=["loopback", pytest.param("ucx", marks=pytest.mark.ucx)])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    network = LoopbackNetwork()
    if request.param == "ucx":
        wire = Wire(UcxTransport, "ucx://127.0.0.1:0")
    else:
        wire = Wire(lambda: LoopbackTransport(network), "there")
    yield wire
    wire.close()


HALVES = [range(HEADS // 2), range(HEADS // 2, HEADS)]
ALL = [range(HEADS)]


@pytest.mark.parametrize("orders", ["canonical paged", "contiguous paged", "paged contiguous"])
@pytest.mark.parametrize("sizes", [(16, 16), (16, 48), (48, 16), (32, 48)])
@pytest.mark.parametrize("heads", [(ALL, HALVES), (HALVES, ALL), (HALVES, HALVES)])
def test_workers_that_are_not_alike(
    wire: Wire, orders: str, sizes: tuple[int, int], heads: tuple[list[range], list[range]]
) -> None:
    numbers = np.random.default_rng(1).random((LAYERS, HEADS, 2, TOKENS, DIM), dtype=np.float32)
    orders_of = orders.split()
    senders, receivers = (
        [Worker(part(size, each), order) for each in some]
        for size, some, order in zip(sizes, heads, orders_of, strict=True)
    )
    for sender in senders:
        sender.fill(numbers)
    streams = sum(
        wire.stream(sender, receiver, f"{at} to {to}")
        for at, sender in enumerate(senders)
        for to, receiver in enumerate(receivers)
    )
    assert streams == max(len(senders), len(receivers))
    for receiver in receivers:
        np.testing.assert_array_equal(receiver.numbers, receiver.of(numbers))


def test_ranges_of_layers(wire: Wire) -> None:
    numbers = np.random.default_rng(2).random((LAYERS, HEADS, 2, TOKENS, DIM), dtype=np.float32)
    senders = [Worker(part(32, layers=each), "paged") for each in (range(1), range(1, LAYERS))]
    receiver = Worker(part(16, range(1, 3)), "canonical")
    for number, sender in enumerate(senders):
        sender.fill(numbers)
        assert wire.stream(sender, receiver, f"{number}")
    np.testing.assert_array_equal(receiver.numbers, receiver.of(numbers))


def test_what_two_have_in_common() -> None:
    common = common_part(part(32, range(1, 4), range(2)), part(48, range(3)))
    assert common == part(16, range(1, 3), range(2))
    assert common_part(part(16, range(2)), part(16, range(2, 4))) is None
    assert common_part(part(16, layers=range(2)), part(16, layers=range(2, 4))) is None
    for other in ({"k_dim": 16}, {"v_dim": 16}, {"dtype": "float16"}):
        layout = replace(part(16).layout, **other)
        with pytest.raises(LayoutMismatchError):
            common_part(part(16), Part(layout))


def test_what_is_no_part_is_refused() -> None:
    worker = Worker(part(32, range(2)), "paged")
    for wanted in (part(32, range(1, 3)), part(64, range(2)), part(48, range(2))):
        with pytest.raises(UsageError):
            part_view(worker.view, worker.has, wanted)
    with pytest.raises(LayoutMismatchError):
        part_view(worker.view, part(16, range(2)), part(16, range(2)))


def test_blocks_that_cannot_be_seen_as_smaller_ones() -> None:
    """Rows of K and V of other widths, in canonical order: one distance cannot fit both."""
    layout = replace(part(32).layout, v_dim=4)
    data = np.zeros((2, layout.block_bytes), dtype=np.uint8)
    view = BlockView.of_buffer(layout, Span.of(data))
    with pytest.raises(LayoutMismatchError, match="cannot be seen"):
        part_view(view, Part(layout), Part(replace(layout, block_tokens=16)))
    assert part_view(view, Part(layout), Part(layout)).block_stride == view.block_stride


@pytest.mark.parametrize(("latent", "rope"), [(64, 8), (72, 0)])
def test_one_latent_head_in_blocks_of_other_sizes(wire: Wire, latent: int, rope: int) -> None:
    """MLA: a row of the cache is a latent and, beside it, a narrower rotary part; or one of both."""
    layout = replace(part(32).layout, kv_heads=1, k_dim=latent, v_dim=rope)
    sent, width = TOKENS // 32, latent + rope
    cache: Numbers = np.random.default_rng(3).random((LAYERS, sent, 32, width), dtype=np.float32)
    layer, block, token, dim = cache.strides
    sender = BlockView(
        layout=layout,
        base=Span.of(cache).address,
        block_stride=block,
        layer_stride=layer,
        head_stride=token,
        kv_stride=latent * dim,
        k_token_stride=token,
        v_token_stride=token,
        block_ids=np.arange(sent, dtype=np.uint64)[::-1].copy(),
        owner=cache,
    )
    smaller = replace(layout, block_tokens=16)
    room = np.zeros((2 * sent, smaller.block_bytes), dtype=np.uint8)
    common = common_part(Part(layout), Part(smaller))
    assert common == Part(smaller)
    source = part_view(sender, Part(layout), common)
    one_layer = slice_layout(smaller)
    wire.outboxes[one_layer] = Outbox(wire.here, one_layer, 8)
    expected = wire.receiving.expect(
        "mla", BlockView.of_buffer(smaller, Span.of(room)), deadline_s=WAIT_S
    )
    stream = wire.sending.open(
        wire.endpoint, "mla", wire.outboxes[one_layer], smaller, len(source), deadline_s=WAIT_S
    )
    for number in range(LAYERS):
        stream.send(number, 0, source, chunk=0)
    stream.finish(b"", deadline_s=WAIT_S)
    expected.completion.wait(WAIT_S)
    # Canonical: all rows of K, then all of V. The sender's blocks went last first.
    rows = cache[:, ::-1].reshape(LAYERS, 2 * sent, 16, width)
    flat = np.concatenate(
        [
            rows[..., :latent].reshape(LAYERS, 2 * sent, -1),
            rows[..., latent:].reshape(LAYERS, 2 * sent, -1),
        ],
        axis=2,
    )
    np.testing.assert_array_equal(
        room.view(np.float32).reshape(2 * sent, LAYERS, -1), flat.transpose(1, 0, 2)
    )
