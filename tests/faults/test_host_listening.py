"""Where the host transport listens, and what it makes of others that do."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.errors import (
    PeerUnreachableError,
    TransferTimeoutError,
    UsageError,
)
from kvpool.transfer.descriptor import Refusal, encode
from kvpool.transfer.host import HostTransport
from tests.faults.peer import WAIT_S


@pytest.fixture
def transport() -> Iterator[HostTransport]:
    with HostTransport() as transport:
        yield transport


def test_the_socket_is_ours_alone(transport: HostTransport, tmp_path: Path) -> None:
    path = tmp_path / "us"
    transport.listen(str(path), lambda endpoint: None)
    assert path.stat().st_mode & 0o777 == 0o600
    with HostTransport() as second, pytest.raises(UsageError):
        second.listen(str(path), lambda endpoint: None)
    transport.close()
    assert not path.exists()


def test_a_folder_that_others_can_write_to_is_refused(
    transport: HostTransport, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError):
        transport.listen(str(tmp_path / "us"), lambda endpoint: None)
    with pytest.raises(UsageError):
        transport.listen(str(tmp_path / "missing" / "us"), lambda endpoint: None)
    with pytest.raises(UsageError):
        transport.listen(str(tmp_path / ("x" * 120)), lambda endpoint: None)


def test_a_listener_that_is_no_kvpool_is_unreachable(
    transport: HostTransport, tmp_path: Path
) -> None:
    path = str(tmp_path / "other")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(4)
        with pytest.raises(TransferTimeoutError):
            transport.connect(path, 0.05)
        listener.accept()[0].close()
        replies = [b"", b"garbage", encode(Refusal(reason="no"))]

        def answer() -> None:
            for reply in replies:
                sock, _ = listener.accept()
                sock.recv(20000)
                if reply:
                    sock.send(reply)
                sock.close()

        thread = threading.Thread(target=answer)
        thread.start()
        for _ in replies:
            with pytest.raises(PeerUnreachableError):
                transport.connect(path, WAIT_S)
        thread.join(WAIT_S)
