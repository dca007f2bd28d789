"""The HTTP surface in this process: the real app over real workers of the tiny model.

Only the processes are missing: requests go through ASGI, calls to the workers through real RPC.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvpool.client.rpc_service import Service
from kvpool.config import RuntimeConfig
from kvpool.integration.conductor.app import Conductor, create_app
from kvpool.integration.conductor.dispatch import Dispatcher
from kvpool.integration.conductor.edge import HttpLimits
from kvpool.integration.conductor.links import WorkerLink
from kvpool.integration.conductor.model import ModelText
from kvpool.integration.runtime.decode import DecodeWorker
from kvpool.integration.runtime.handoff import STATUS, Empty, WorkerStatus
from kvpool.integration.runtime.prefill import PrefillWorker
from tests.unit.integration.pair import WAIT_S, Pair, pair
from tests.unit.integration.tiny import CONTEXT, EOS, VOCABULARY

T = TypeVar("T")

NAME: Final = "tiny"
# Every visible ASCII character but four, and the space: one token each, so a text is its tokens.
CHARACTERS: Final = [chr(code) for code in range(32, 127) if chr(code) not in "`~^\\|"]
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['content'] == 'refuse me' %}{{ raise_exception('a rude word') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}{% if not loop.last %}; {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}; {{ who | default('assistant') }}:{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of characters, for the tiny model's vocabulary."""
    special = ["<pad>", "<s>", "<unk>", "</s>", "<x>", "<end>"]
    vocabulary = {token: number for number, token in enumerate([*special, *CHARACTERS])}
    assert len(vocabulary) == VOCABULARY
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<pad>", "<x>", "<end>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_text() -> ModelText:
    """The tiny model's text side."""
    return ModelText(
        name=NAME,
        tokenizer=tiny_tokenizer(),
        context_tokens=CONTEXT,
        stop_tokens=EOS,
        vocabulary=VOCABULARY,
        characters_max=CONTEXT * 5,
    )


@dataclass
class Front:
    """The app, a client of it, and the workers behind."""

    conductor: Conductor
    client: httpx.AsyncClient
    workers: Pair
    runner: asyncio.Runner

    async def post(
        self, route: str, body: object, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """POST a JSON body; bytes go as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post(route, content=content, headers=headers)

    async def complete(self, prompt: object, **fields: object) -> dict[str, Any]:
        """One completion, greedy."""
        return await self.good("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    async def chat(self, content: str, **fields: object) -> dict[str, Any]:
        """One chat completion of one message, greedy."""
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "temperature": 0, **fields}
        return await self.good("/v1/chat/completions", body)

    async def good(self, route: str, body: object) -> dict[str, Any]:
        """POST what must be answered with 200."""
        answer = await self.post(route, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def events(self, route: str, body: dict[str, object]) -> list[dict[str, Any]]:
        """The events of a stream, without [DONE]."""
        answer = await self.post(route, {"temperature": 0, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    async def wait_idle(self) -> None:
        """Wait until nothing is held by any request."""
        await self.workers.wait_idle()
        async with asyncio.timeout(WAIT_S):
            while self.conductor.active:
                await asyncio.sleep(0.002)

    def run(self, story: Coroutine[Any, Any, T]) -> T:
        """Let a test's story happen in the front's loop, bounded."""

        async def bounded() -> T:
            async with asyncio.timeout(WAIT_S):
                return await story

        return self.runner.run(bounded())


@contextlib.asynccontextmanager
async def _served(worker: PrefillWorker | DecodeWorker, socket: Path) -> AsyncIterator[WorkerLink]:
    """Serve a worker at a socket, and yield a link to it."""

    async def status(_: Empty) -> WorkerStatus:
        return worker.status()

    service = Service()
    service.add(STATUS, status)
    worker.add_methods(service)
    await service.start(f"unix:{socket}")
    try:
        yield WorkerLink(socket.name, f"unix:{socket}")
    finally:
        await service.stop(0.0)


@contextlib.contextmanager
def front(limits: HttpLimits | None = None, *, gpu_blocks: int = 64) -> Iterator[Front]:
    """Open it all, with a loop of its own that runs while a story does."""
    with (
        tempfile.TemporaryDirectory(prefix="kvpf-") as folder,  # a socket's path must be short
        asyncio.Runner() as runner,
    ):
        opened = _opened(Path(folder), limits, gpu_blocks, runner)
        yield runner.run(anext(opened))
        runner.run(opened.aclose())


async def _opened(
    folder: Path, limits: HttpLimits | None, gpu_blocks: int, runner: asyncio.Runner
) -> AsyncGenerator[Front]:
    async with contextlib.AsyncExitStack() as stack:
        workers = await stack.enter_async_context(
            pair(gpu_blocks=gpu_blocks, waiting_max=RuntimeConfig().waiting_max)
        )
        prefill = await stack.enter_async_context(_served(workers.prefill, folder / "prefill"))
        decode = await stack.enter_async_context(_served(workers.decode, folder / "decode"))
        dispatcher = Dispatcher([prefill], [decode], request_timeout_s=WAIT_S)
        conductor = Conductor(dispatcher, tiny_text(), limits=limits)
        app = create_app(conductor)
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://front", timeout=WAIT_S)
        yield Front(conductor, await stack.enter_async_context(client), workers, runner)
