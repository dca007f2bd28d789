"""A forked child of a process with transports: a typed error from every call, at once."""

import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import numpy as np

from kvpool.arena import Arena
from kvpool.errors import ClosedError
from kvpool.testing.blocks import SMALL_LAYOUT, payload, view_of
from kvpool.testing.pair import WAIT_S, Collected, empty, named, publish
from kvpool.transfer.host import HostTransport
from kvpool.transfer.ucx import UcxTransport
from kvpool.transfer.ucx_endpoint import UcxEndpoint


def in_a_child(work: Callable[[], None]) -> None:
    """Run something in a forked child and require that it ended well."""
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads, which is the case that is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  # the child ends here, whatever it is
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_of_a_host_transport_gets_typed_errors_and_harms_nobody(tmp_path: Path) -> None:
    with HostTransport() as owner, HostTransport() as reader:
        arena = Arena(SMALL_LAYOUT, 4, owner.incarnation)
        owner.register(arena)
        blocks = payload(SMALL_LAYOUT, 2, seed=1)
        source = named(0, publish(arena, blocks))
        address = owner.listen(str(tmp_path / "owner.sock"), Collected())
        endpoint = reader.connect(address, WAIT_S)

        def read(out: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> int:
            return endpoint.read_blocks(
                view_of(SMALL_LAYOUT, out),
                source,
                source_layout=SMALL_LAYOUT,
                dest_layer=None,
                deadline_s=WAIT_S,
            ).wait(WAIT_S)

        def child() -> None:
            spare = Arena(SMALL_LAYOUT, 1, reader.incarnation)
            calls: list[Callable[[], object]] = [
                lambda: read(empty(SMALL_LAYOUT, 2)),
                lambda: endpoint.notify(b"from the child"),
                lambda: endpoint.wait_region(5, WAIT_S),
                lambda: reader.connect(address, WAIT_S),
                lambda: reader.register(spare),
                lambda: owner.listen(str(tmp_path / "other.sock"), Collected()),
            ]
            for call in calls:
                try:
                    call()
                except ClosedError:
                    continue
                raise AssertionError("a call of the child was let through")
            assert not endpoint.alive()
            endpoint.close()
            reader.close()
            with HostTransport() as own:  # and a transport of its own works
                assert own.connect(address, WAIT_S).alive()

        in_a_child(child)
        out = empty(SMALL_LAYOUT, 2)
        assert read(out) == 2
        np.testing.assert_array_equal(out, blocks)
        assert endpoint.alive()
        arena.close()


def test_a_child_of_a_ucx_transport_closes_it_at_once_whoever_held_its_locks() -> None:
    with UcxTransport() as owner, UcxTransport() as reader:
        endpoint = reader.connect(owner.listen("ucx://127.0.0.1:0", Collected()), WAIT_S)
        assert isinstance(endpoint, UcxEndpoint)

        def child() -> None:
            for call in (lambda: endpoint.notify(b"x"), lambda: endpoint.wait_region(0, WAIT_S)):
                try:
                    call()
                except ClosedError:
                    continue
                raise AssertionError("a call of the child was let through")
            endpoint.wait_drained(0.0)
            endpoint.close()
            reader.close()
            owner.close()
            assert not endpoint.alive()

        # As a thread of the parent that is inside them: it is not there in the child to let go.
        locks: list[AbstractContextManager[object]] = [
            *(reader._lock, endpoint._send_lock, endpoint._changed, endpoint._reads._changed),
            *(reader._engine._lock, reader._engine._calls._lock),
        ]
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            in_a_child(child)
        assert endpoint.alive()
        assert endpoint.notify(b"from the parent")
