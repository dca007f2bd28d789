"""Look a prompt up in the directory: at most two rounds of questions, whatever its length.

Pure: says whom to ask what, takes the answers, and knows how much of the prompt is where. Owns no
connection. Who calls it: the client of a pool, for each prompt.

Round 1 asks for all full runs of the prompt at once; round 2 for the blocks of the first run that
was not found, or of the rest behind the last full run. A prompt shorter than a run needs one round.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from kvpool.block import HASH_BYTES, NodeId
from kvpool.errors import UsageError
from kvpool.index.announce import OWNERS, RUN_BLOCKS, run_names
from kvpool.index.directory import Stores
from kvpool.index.ring import BoundedLoad, Ring

_NOWHERE: Final[Stores] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks ``begin`` to ``end`` of a prompt and the stores that each hold all of them."""

    begin: int
    end: int
    stores: Stores


@dataclass(frozen=True, slots=True)
class Question:
    """What one node is asked: the stores of some names, 32 bytes each, in the prompt's order."""

    node: NodeId
    names: bytes


class Lookup:
    """One prompt's look-up. ``ask``, then ``answer``, until ``ask`` returns nothing.

    Args:
        hashes: Of the prompt's blocks, 32 bytes each, concatenated.
        ring: Of the directory; not empty.
        load: Chooses among the owners of a name; shared by all look-ups of a reader.
        owners: How many nodes know of each name.
        avoid: Nodes that did not answer lately: asked only if no other owner is left.

    Attributes:
        rounds: Rounds asked so far, 2 at most.
    """

    def __init__(
        self,
        hashes: bytes,
        ring: Ring,
        load: BoundedLoad,
        *,
        owners: int = OWNERS,
        avoid: AbstractSet[NodeId] = frozenset(),
    ) -> None:
        if not len(ring):
            raise UsageError("an empty ring: there is nobody to ask")
        self._hashes = hashes
        self._ring = ring
        self._load = load
        self._owners = owners
        self._pieces: list[Piece] = []
        self._avoid = set(avoid)
        self._names = b""  # of the round
        self._asked: list[NodeId] = []  # who was asked of each
        self._runs = len(hashes) // HASH_BYTES // RUN_BLOCKS
        self.rounds = 0

    def ask(self) -> list[Question]:
        """Return the next round's questions, one a node; none when all is known."""
        if self.rounds == 0 and self._runs:
            names = run_names(self._hashes)
        elif self.rounds <= (1 if self._runs else 0):
            begin = self._found() * HASH_BYTES
            names = self._hashes[begin : begin + RUN_BLOCKS * HASH_BYTES]
        else:
            names = b""
        if not names:
            return []
        self.rounds += 1
        return self._questions(names)

    def ask_others(self, failed: AbstractSet[NodeId]) -> list[Question]:
        """Ask other owners what nodes of this round did not answer, in the same round.

        Returns:
            Questions in place of the round's earlier ones to the same nodes; none if nobody is left.
        """
        self._avoid |= failed
        owners = self._ring.owners_of(self._names, self._owners)
        again: set[NodeId] = set()
        for index, node in enumerate(self._asked):
            others = [one for one in owners[index] if one not in self._avoid]
            if node in failed and others:
                self._asked[index] = others[0]
                again.add(others[0])
        return [question for question in self._by_node() if question.node in again]

    def answer(self, answers: Mapping[NodeId, Sequence[Stores]]) -> None:
        """Take a round's answers.

        Args:
            answers: Of each node the stores of its leading names, as ``Directory.lookup`` says
                them. A node that did not answer in time is left out: its names count as absent.
        """
        rest = {node: iter(found) for node, found in answers.items()}
        step = RUN_BLOCKS if self.rounds == 1 and self._runs else 1
        at = self._found()
        for node in self._asked:
            stores = next(rest.get(node, iter(())), _NOWHERE)
            if not stores:
                break
            self._pieces.append(Piece(at, at + step, stores))
            at += step

    def pieces(self) -> list[Piece]:
        """Return what was found, in order and without a gap from block 0, alike pieces joined."""
        joined: list[Piece] = []
        for piece in self._pieces:
            if joined and joined[-1].stores == piece.stores:
                joined[-1] = Piece(joined[-1].begin, piece.end, piece.stores)
            else:
                joined.append(piece)
        return joined

    def _found(self) -> int:
        return self._pieces[-1].end if self._pieces else 0

    def _questions(self, names: bytes) -> list[Question]:
        self._names = names
        self._asked = [
            self._load.choose([one for one in owners if one not in self._avoid] or owners)
            for owners in self._ring.owners_of(names, self._owners)
        ]
        return self._by_node()

    def _by_node(self) -> list[Question]:
        by_node: dict[NodeId, list[bytes]] = {}
        for index, node in enumerate(self._asked):
            begin = index * HASH_BYTES
            by_node.setdefault(node, []).append(self._names[begin : begin + HASH_BYTES])
        return [Question(node, b"".join(asked)) for node, asked in by_node.items()]


def leading_blocks(pieces: Iterable[Piece]) -> int:
    """Return how many leading blocks of a prompt were found."""
    return max((piece.end for piece in pieces), default=0)
