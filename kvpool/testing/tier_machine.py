"""A tier against a dictionary: Hypothesis looks for a sequence of calls on which they differ.

The model is one plain class without a tier in it; the machine makes every call on both. Subclass
``TierMachine`` once for each implementation and hand its ``TestCase`` to pytest.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.arena import Slot
from kvpool.errors import CapacityError
from kvpool.memory import copy_blocks
from kvpool.testing.blocks import SMALL_LAYOUT, key, payload, read, view_of
from kvpool.tiers.base import BlockTokens, Tier

SLOTS: Final = 4
KEYS: Final = 6
numbers = st.integers(0, KEYS - 1)
picks = st.integers(0, 63)  # taken modulo the length of a list
tokens = st.integers(0, 1)


@dataclass(eq=False)
class ModelBlock:
    """One copy of a block that lies in a slot."""

    number: int
    parent: int | None
    seed: int
    slot: Slot
    used: int
    tokens: int | None = None
    pins: int = 0
    dropped: bool = False


@dataclass
class TierModel:
    """What a tier of ``SLOTS`` slots should hold."""

    blocks: dict[int, ModelBlock] = field(default_factory=dict)
    dropped: list[ModelBlock] = field(default_factory=list)
    reserved: list[Slot] = field(default_factory=list)
    grants: dict[Slot, int] = field(default_factory=dict)
    quarantined: set[Slot] = field(default_factory=set)
    clock: int = 0
    evictions: int = 0
    corruptions: int = 0

    def tick(self) -> int:
        """Return the time of a use."""
        self.clock += 1
        return self.clock

    def free(self) -> int:
        """Count free slots."""
        used = (self.blocks, self.dropped, self.reserved, self.quarantined)
        return SLOTS - sum(len(group) for group in used)

    def give_up(self, slot: Slot) -> None:
        """Free a slot, or quarantine it."""
        if self.grants.get(slot, 0):
            self.quarantined.add(slot)

    def evict(self) -> bool:
        """Evict the least recently used block without a pin or a child."""
        parents = {block.parent for block in self.blocks.values()}
        may_go = [b for b in self.blocks.values() if not b.pins and b.number not in parents]
        if not may_go:
            return False
        victim = min(may_go, key=lambda block: block.used)
        del self.blocks[victim.number]
        self.give_up(victim.slot)
        self.evictions += 1
        return True

    def make_room(self) -> bool:
        """Evict until a slot is free; False if none can be had."""
        while self.free() == 0:
            if not self.evict():
                return False
        return True


class TierMachine(RuleBasedStateMachine):
    """Calls a tier and the model alike, and compares all that can be seen after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = self.open_tier()
        self.model = TierModel()
        self.pins: list[tuple[ModelBlock, Slot]] = []
        self.seed = 0

    @abstractmethod
    def open_tier(self) -> Tier:
        """Make an empty tier of ``SLOTS`` slots of ``SMALL_LAYOUT``."""

    def teardown(self) -> None:
        """Close the tier."""
        self.tier.close()

    @rule(number=numbers, parent=st.none() | numbers, tokens=st.none() | tokens)
    def store(self, number: int, parent: int | None, tokens: int | None) -> None:
        before = len(self.model.reserved)
        self.reserve()
        if len(self.model.reserved) > before:
            self.commit(before, number, parent, tokens)

    @rule()
    def reserve(self) -> None:
        room = self.model.make_room()
        try:
            slot = self.tier.reserve()
        except CapacityError:
            assert not room
            return
        assert room
        self.model.reserved.append(slot)

    @precondition(lambda self: self.model.reserved)
    @rule(pick=picks, number=numbers, parent=st.none() | numbers, tokens=st.none() | tokens)
    def commit(self, pick: int, number: int, parent: int | None, tokens: int | None) -> None:
        model = self.model
        slot = model.reserved.pop(pick % len(model.reserved))
        parent = None if parent is None or parent >= number else parent
        self.seed += 1
        view = self.tier.view([slot], writable=True)
        crcs = copy_blocks(view, view_of(SMALL_LAYOUT, payload(SMALL_LAYOUT, 1, self.seed)))
        parent_key = None if parent is None else key(parent)
        if tokens is not None:
            self.tier.note_tokens([slot], tokens_of(tokens))
        new = self.tier.commit(slot, key(number), parent_key, crcs[0])
        assert new == (number not in model.blocks)
        if new:
            block = ModelBlock(number, parent, self.seed, slot, model.tick(), tokens)
            model.blocks[number] = block
        else:
            model.blocks[number].used = model.tick()
            model.give_up(slot)

    @precondition(lambda self: self.model.reserved)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        slot = self.model.reserved.pop(pick % len(self.model.reserved))
        self.tier.abort(slot)
        self.model.give_up(slot)

    @rule(pick=picks)
    def grant(self, pick: int) -> None:
        model = self.model
        slots = [*model.reserved, *(block.slot for block in model.blocks.values())]
        if slots:
            slot = slots[pick % len(slots)]
            self.tier.grant(slot)
            model.grants[slot] = model.grants.get(slot, 0) + 1

    @precondition(lambda self: self.model.grants)
    @rule(pick=picks)
    def settle(self, pick: int) -> None:
        model = self.model
        slot = list(model.grants)[pick % len(model.grants)]
        self.tier.settle(slot)
        model.grants[slot] -= 1
        if not model.grants[slot]:
            del model.grants[slot]
            model.quarantined.discard(slot)

    @precondition(lambda self: self.model.blocks)
    @rule(pick=picks, more=st.lists(numbers, max_size=2))
    def pin(self, pick: int, more: list[int]) -> None:
        here = list(self.model.blocks)
        self.pin_run(list(dict.fromkeys([here[pick % len(here)], *more])))

    @rule(run=st.lists(numbers, min_size=1, max_size=3, unique=True))
    def pin_run(self, run: list[int]) -> None:
        slots = self.tier.pin(b"".join(key(number) for number in run))
        expected: list[ModelBlock] = []
        for number in run:
            if number not in self.model.blocks:
                break
            block = self.model.blocks[number]
            block.pins += 1
            block.used = self.model.tick()
            expected.append(block)
        assert slots == [block.slot for block in expected]
        self.pins += zip(expected, slots, strict=True)

    @precondition(lambda self: self.pins)
    @rule(pick=picks, tokens=tokens)
    def compare(self, pick: int, tokens: int) -> None:
        block, slot = self.pins[pick % len(self.pins)]
        same = block.tokens in (None, tokens)
        assert self.tier.same_tokens([slot], tokens_of(tokens)) == same

    @precondition(lambda self: self.pins)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        block, slot = self.pins.pop(pick % len(self.pins))
        self.tier.unpin([slot])
        block.pins -= 1
        if block.dropped and block.pins == 0:
            self.model.dropped.remove(block)
            self.model.give_up(slot)

    @rule(number=numbers, corrupt=st.booleans())
    def drop(self, number: int, corrupt: bool) -> None:
        gone = self.tier.drop(key(number), "corrupt" if corrupt else "invalid")
        block = self.model.blocks.pop(number, None)
        assert gone == (block is not None)
        if block is None:
            return
        self.model.corruptions += corrupt
        if block.pins:
            block.dropped = True
            self.model.dropped.append(block)
        else:
            self.model.give_up(block.slot)

    @rule(count=st.integers(1, SLOTS))
    def evict(self, count: int) -> None:
        expected = 0
        while expected < count and self.model.evict():
            expected += 1
        assert self.tier.evict(count) == expected

    @invariant()
    def holds_the_same_blocks(self) -> None:
        for number in range(KEYS):
            assert self.tier.match(key(number)) == (number in self.model.blocks)

    @invariant()
    def counts_the_same(self) -> None:
        stats, model = self.tier.stats(), self.model
        assert stats.free == model.free()
        assert stats.reserved == len(model.reserved)
        assert stats.ready == len(model.blocks) + len(model.dropped)
        assert stats.quarantined == len(model.quarantined)
        assert stats.pins == len(self.pins)
        assert (stats.evictions, stats.corruptions) == (model.evictions, model.corruptions)

    @invariant()
    def pinned_blocks_keep_their_bytes(self) -> None:
        for block, slot in self.pins:
            want = payload(SMALL_LAYOUT, 1, block.seed)
            np.testing.assert_array_equal(read(self.tier, [slot]), want)


def tokens_of(number: int) -> BlockTokens:
    """Return the tokens of one block, one of two."""
    return np.full((1, SMALL_LAYOUT.block_tokens), number, dtype=np.uint32)
