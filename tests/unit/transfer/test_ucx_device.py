"""Device memory over UCX: puts out of it and into it. On a card where there is one, else on the CPU.

The contract's reads end in host memory, because the verified copy out of the inbox is the CPU's; from
there ``tiers/gpu_mover.py`` takes blocks to a card. What passes device memory through is the engine's put.
"""

import threading

import pytest
import torch

from kvpool.memory import Span
from kvpool.transfer.ucx_connection import UcxConnection
from kvpool.transfer.ucx_engine import UcxEngine

pytestmark = pytest.mark.ucx

PART = 1 << 20
WAIT_S = 20.0
# The device, and the transports that can carry its memory.
CARD = pytest.param(
    "cuda",
    "tcp,cuda_copy",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)


def span_of(tensor: torch.Tensor) -> Span:
    return Span(tensor.data_ptr(), tensor.numel(), tensor)


def aligned(size: int, device: str) -> torch.Tensor:
    """Return bytes of a device that begin at a page."""
    raw = torch.zeros(size + 4096, dtype=torch.uint8, device=device)
    return raw[-raw.data_ptr() % 4096 :][:size]


@pytest.mark.parametrize(("device", "tls"), [("cpu", "tcp"), CARD])
def test_bytes_of_a_device_go_into_those_of_another(device: str, tls: str) -> None:
    inbox = aligned(PART, device)
    source = torch.arange(PART // 2, device=device).to(torch.uint8)
    accepted: list[UcxConnection] = []
    arrived = threading.Event()

    def meet(connection: UcxConnection) -> None:
        accepted.append(connection)
        connection.on_notification(lambda note: arrived.set())

    with (
        UcxEngine(inbox=span_of(inbox), endpoint_max=1, tls=tls) as server,
        UcxEngine(endpoint_max=1, tls=tls) as client,
    ):
        connection = client.connect("127.0.0.1", server.listen(meet), WAIT_S)
        batch = [(span_of(source).part(at, 4096), 2 * at) for at in range(0, PART // 4, 4096)]
        connection.put(batch, WAIT_S, b"there", owner=source).wait(WAIT_S)
        assert arrived.wait(WAIT_S)
        expected = torch.zeros_like(inbox)
        for at in range(0, PART // 4, 4096):
            expected[2 * at : 2 * at + 4096] = source[at : at + 4096]
        assert torch.equal(inbox, expected)
