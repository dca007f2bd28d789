"""A prefill and a decode worker in one process: real parts, a tiny model, no RPC."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from kvpool.config import PoolConfig, RuntimeConfig
from kvpool.errors import KVPoolError
from kvpool.events import ListSink
from kvpool.integration.runtime.decode import DecodeWorker
from kvpool.integration.runtime.handoff import (
    Prefilled,
    PrefillRequest,
    RunEvent,
    RunRequest,
    Sampling,
    WorkerStatus,
)
from kvpool.integration.runtime.model import LoadedModel, ModelSpec
from kvpool.integration.runtime.prefill import PrefillWorker
from kvpool.integration.runtime.worker import Parts, Role, WorkerConfig, assemble
from kvpool.pool import Pool
from kvpool.transfer.loopback import LoopbackNetwork, LoopbackTransport
from tests.unit.integration.tiny import CONTEXT, EOS, VOCABULARY, tiny_model

SPEC: Final = ModelSpec(
    name="tiny",
    kind="llama",
    num_layers=3,
    kv_heads=2,
    head_dim=8,
    dtype="float32",
    context_tokens=CONTEXT,
    vocabulary=VOCABULARY,
    eos_tokens=EOS,
    weights="0" * 64,
)
GREEDY: Final = Sampling()
SIZE: Final = 16
LAYOUT: Final = SPEC.layout(SIZE)
# Ends a test that hangs; nothing here takes near as long.
WAIT_S: Final = 30.0


@dataclass
class Pair:
    """Both workers, and what they said."""

    prefill: PrefillWorker
    decode: DecodeWorker
    pool: Pool
    parts: dict[Role, Parts]
    sinks: dict[Role, ListSink]
    names: list[str] = field(default_factory=list)

    def run(
        self, tokens: list[int], max_tokens: int = 8, **fields: object
    ) -> AsyncGenerator[RunEvent]:
        """Ask the decode worker. The request's name is the newest of ``names``."""
        self.names.append(f"r{len(self.names)}")
        request = RunRequest(
            request=self.names[-1],
            tokens=tokens,
            max_tokens=max_tokens,
            stop_tokens=list(fields.pop("stop_tokens", [])),  # type: ignore[call-overload]
            sampling=fields.pop("sampling", GREEDY),  # type: ignore[arg-type]
            **fields,  # type: ignore[arg-type]  # a test's own words
        )
        events = self.decode.run(request)
        assert isinstance(events, AsyncGenerator)
        return events

    def ask_prefill(
        self, name: str, tokens: list[int], ready: RunEvent, **fields: object
    ) -> asyncio.Task[Prefilled]:
        """Ask the prefill worker, in a task."""
        request = PrefillRequest(
            request=name,
            tokens=tokens,
            sampling=fields.pop("sampling", GREEDY),  # type: ignore[arg-type]
            decode_address=ready.address,
            decode_incarnation=ready.incarnation,
            **fields,  # type: ignore[arg-type]
        )
        return asyncio.create_task(self.prefill.prefill(request))

    async def generate(
        self, tokens: list[int], max_tokens: int = 8, **fields: object
    ) -> tuple[list[int], Prefilled, str | None]:
        """One request from begin to end, as the Conductor does it."""
        events = self.run(tokens, max_tokens, **fields)
        name = self.names[-1]
        async with contextlib.aclosing(events):
            ready = await anext(events)
            assert ready.ready
            same = {key: fields[key] for key in ("sampling", "drawn") if key in fields}
            prefilled = await self.ask_prefill(name, tokens, ready, **same)
            out, reason = [prefilled.token], None
            async for event in events:
                if event.token is not None:
                    out.append(event.token)
                reason = event.finish_reason
        return out, prefilled, reason

    async def wait_idle(self) -> tuple[WorkerStatus, WorkerStatus]:
        """Wait until nothing is held by any request."""

        def held() -> bool:
            prefill, decode, pool = self.prefill.status(), self.decode.status(), self.pool.stats()
            return not (
                prefill.blocks_free == prefill.blocks
                and prefill.outbox_free == prefill.outbox_slots
                and decode.blocks_free == decode.blocks
                and prefill.running == decode.running == pool.leases == pool.reserved == 0
            )

        async with asyncio.timeout(WAIT_S):
            while held():
                await asyncio.sleep(0.002)
        return self.prefill.status(), self.decode.status()


@contextlib.asynccontextmanager
async def pair(
    *,
    gpu_blocks: int = 64,
    outbox_slots: int = 64,
    chunk_tokens: int = 20,
    running_max: int = 8,
    waiting_max: int = 4,
) -> AsyncIterator[Pair]:
    """Open both workers over one pool."""
    torch.set_num_threads(1)
    network = LoopbackNetwork()
    sinks: dict[Role, ListSink] = {"prefill": ListSink(), "decode": ListSink()}
    runtime = RuntimeConfig(
        block_tokens=SIZE,
        gpu_bytes=gpu_blocks * LAYOUT.block_bytes,
        chunk_tokens=chunk_tokens,
        running_max=running_max,
        waiting_max=waiting_max,
    )
    parts: dict[Role, Parts] = {}
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(Pool.open(LAYOUT, PoolConfig(dram_bytes=256 * 4096 * 4)))
        for role, sink in sinks.items():
            config = WorkerConfig(
                name=role,
                model=Path("tiny"),
                run_dir=Path("run"),
                runtime=runtime,
                outbox_bytes=outbox_slots * LAYOUT.layer_bytes,
            )
            parts[role] = assemble(
                config,
                role,
                LoadedModel(tiny_model(), None, SPEC),
                stack.enter_context(LoopbackTransport(network)),
                pool,
                asyncio.get_running_loop(),
                sink,
            )
        prefill, decode = PrefillWorker(parts["prefill"]), DecodeWorker(parts["decode"])
        try:
            yield Pair(prefill, decode, pool, parts, sinks)
        finally:
            await prefill.close()
            await decode.close()
            for part in parts.values():
                part.hub.close()
                part.threads.shutdown()


def expected(tokens: list[int], count: int) -> list[int]:
    """What the model alone says, greedily, end tokens and all."""
    model, sequence = tiny_model(), list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, -1]
            sequence.append(int(logits.argmax()))
    return sequence[len(tokens) :]


def prompt(count: int, seed: int = 0) -> list[int]:
    """A prompt of ``count`` tokens that depends on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(6, VOCABULARY, (count,), generator=generator).tolist()
    return drawn


async def failure(work: "asyncio.Future[Prefilled] | AsyncGenerator[RunEvent]") -> KVPoolError:
    """Return the typed error that work ends with."""
    try:
        if isinstance(work, asyncio.Future):
            await work
        else:
            async for _ in work:
                pass
    except KVPoolError as error:
        return error
    raise AssertionError("it ended well")
