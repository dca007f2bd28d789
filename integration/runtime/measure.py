"""Measures a local model on this machine: prefill, decode steps, and loads from a pool's server.

Owns what is run and timed; what the times are fitted to is `conductor/profile.py`. Each is run the
way a worker runs it: the paged cache, prefill in chunks, blocks pulled from another process. Who
calls it: ``kvpool profile``.
"""

import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.block import BlockLayout
from kvpool.client.connect import connect
from kvpool.errors import InternalError, UnavailableError, UsageError
from kvpool.integration.conductor.profile import (
    DecodeSample,
    PrefillSample,
    Profile,
    Samples,
    TransferSample,
    fitted,
)
from kvpool.integration.runtime.model import LoadedModel, ModelSpec, load_model
from kvpool.integration.runtime.runner import ModelRunner, Row
from kvpool.memory import BlockView, Span
from kvpool.tiers.gpu import GpuTier

# Shares of a prompt that are cached already, in whole blocks.
CACHED_SHARES: Final = (0.0, 0.5, 0.9)
# Sizes of the loads that are timed.
TRANSFER_BYTES: Final = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
# A token that every supported model knows: what is computed does not change how long it takes.
_TOKEN: Final = 1
_TOKENS_MIN: Final = 64
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        tokens_max: Longest prompt.
        running_max: Most requests in a decode step.
        chunk_tokens: Tokens of one forward of a prefill.
        block_tokens: Tokens of a block.
        repeats: Times that each is measured at most; the median counts.
        seconds_max: No further round of any of the three kinds begins once a third of it has gone
            by; each has one.
    """

    tokens_max: int = 1024
    running_max: int = 8
    chunk_tokens: int = 512
    block_tokens: int = 16
    repeats: int = 3
    seconds_max: float = 180.0


def measure(
    folder: Path, *, dtype: str, threads: int, effort: Effort, tell: Callable[[str], None]
) -> Profile:
    """Measure a model and fit a profile.

    Args:
        folder: Folder of the model.
        dtype: Of weights and KV.
        threads: That compute.
        effort: How much is measured.
        tell: Takes what is measured now, for a person.

    Raises:
        UsageError: The model is not supported, or ``tokens_max`` or ``running_max`` is out of range.
        UnavailableError: The pool's server did not start.

    Blocks for all of it.
    """
    import torch

    torch.set_num_threads(threads)
    tell("loading the model")
    loaded = load_model(folder, dtype=dtype)
    _check(effort, loaded.spec)
    layout = loaded.spec.layout(effort.block_tokens)
    prefill, decode = _compute_samples(loaded, layout, effort, tell)
    # Slots are whole multiples of an alignment: twice as much holds blocks of any size.
    with _server(2 * (max(TRANSFER_BYTES) + layout.block_bytes)) as run_dir:
        transfer = _transfer_samples(loaded.spec, layout, run_dir, effort, tell)
    return fitted(
        model=f"{loaded.spec.name}, {dtype}",
        machine=f"{platform.machine()}, {os.cpu_count()} processors, {threads} threads",
        kv_bytes_per_token=layout.block_bytes / effort.block_tokens,
        samples=Samples(prefill=prefill, decode=decode, transfer=transfer),
    )


def _check(effort: Effort, spec: ModelSpec) -> None:
    most = spec.context_tokens - 1
    if not _TOKENS_MIN <= effort.tokens_max <= most:
        raise UsageError(
            f"tokens-max is {effort.tokens_max}: this model takes {_TOKENS_MIN} to {most}"
        )
    if effort.running_max < 1 or effort.repeats < 1:
        raise UsageError("running-max and repeats must be at least 1")
    if not effort.seconds_max > 0:
        raise UsageError(f"seconds-max is {effort.seconds_max}: it must be above 0")


def doubling(first: int, last: int) -> list[int]:
    """Return first, 2 * first, 4 * first, ..., and last at the end."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last]


def _compute_samples(
    loaded: LoadedModel, layout: BlockLayout, effort: Effort, tell: Callable[[str], None]
) -> tuple[tuple[PrefillSample, ...], tuple[DecodeSample, ...]]:
    size = layout.block_tokens
    lengths = doubling(_TOKENS_MIN, effort.tokens_max)
    batches = doubling(1, effort.running_max)
    table_blocks = -(-(effort.tokens_max + 1) // size)
    with GpuTier(layout, table_blocks * effort.running_max) as tier:
        runner = ModelRunner(loaded.model, loaded.spec, tier)
        slots = sorted(tier.reserve().index for _ in range(tier.slot_count))
        tables = [slots[at * table_blocks :][:table_blocks] for at in range(effort.running_max)]
        prefills = {
            (tokens, int(tokens * share) // size * size)
            for tokens in lengths
            for share in CACHED_SHARES
        }
        decodes = {(batch, length) for batch in batches for length in lengths}
        _prefill(runner, tables[0], lengths[0], 0, effort.chunk_tokens)  # what runs first is slow
        prefill_s = _medians(
            sorted(prefills),
            effort,
            lambda one: _prefill(runner, tables[0], one[0], one[1], effort.chunk_tokens),
            lambda one: tell(f"prefill of {one[0]} tokens, {one[1]} of them cached"),
        )
        decode_s = _medians(
            sorted(decodes),
            effort,
            lambda one: runner.forward(
                [Row([_TOKEN], one[1], table) for table in tables[: one[0]]]
            ),
            lambda one: tell(f"decode step of {one[0]} requests with {one[1]} tokens each"),
        )
    return (
        tuple(PrefillSample(*one, seconds) for one, seconds in prefill_s.items()),
        tuple(
            DecodeSample(batch, batch * length, seconds)
            for (batch, length), seconds in decode_s.items()
        ),
    )


def _prefill(
    runner: ModelRunner, table: Sequence[int], tokens: int, cached: int, chunk_tokens: int
) -> None:
    for begin in range(cached, tokens, chunk_tokens):
        new = min(chunk_tokens, tokens - begin)
        runner.forward([Row([_TOKEN] * new, begin, table)])


def _medians(
    cases: Sequence[tuple[int, int]],
    effort: Effort,
    run: Callable[[tuple[int, int]], object],
    tell: Callable[[tuple[int, int]], None],
) -> dict[tuple[int, int], float]:
    """Time each case some times, all of them in turn, and return the medians in seconds."""
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    enough_at = time.perf_counter() + effort.seconds_max / 3
    for round_number in range(effort.repeats):
        if round_number and time.perf_counter() > enough_at:
            break
        for case in cases:
            tell(case)
            began = time.perf_counter()
            run(case)
            times[case].append(time.perf_counter() - began)
    return {case: statistics.median(several) for case, several in times.items()}


def _transfer_samples(
    spec: ModelSpec,
    layout: BlockLayout,
    run_dir: Path,
    effort: Effort,
    tell: Callable[[str], None],
) -> tuple[TransferSample, ...]:
    """Time leases and loads of blocks that another process keeps in DRAM."""
    counts = sorted({max(1, size // layout.block_bytes) for size in TRANSFER_BYTES})
    kept = BlockView.of_buffer(layout, Span.of(bytearray(counts[-1] * layout.block_bytes)))
    with connect(run_dir, layout) as pool:
        chain = pool.chain(
            spec.namespace(layout.block_tokens), [_TOKEN] * counts[-1] * layout.block_tokens
        )
        pool.store(chain, kept, deadline_s=_TIMEOUT_S).wait(2 * _TIMEOUT_S)
        match = pool.match(chain)
        if match.blocks != counts[-1]:
            raise InternalError(f"the server kept {match.blocks} of {counts[-1]} blocks")

        def load(case: tuple[int, int]) -> None:
            with pool.lease(match, seconds=_TIMEOUT_S) as lease:
                dest = kept.take(0, case[0])
                done = pool.load(lease, dest, deadline_s=_TIMEOUT_S).wait(2 * _TIMEOUT_S)
            if done != case[0]:
                raise InternalError(f"{done} of {case[0]} blocks were loaded")

        load((1, 0))
        medians = _medians(
            [(count, 0) for count in counts],
            effort,
            load,
            lambda one: tell(f"load of {one[0]} blocks"),
        )
    return tuple(
        TransferSample(count * layout.block_bytes, seconds)
        for (count, _), seconds in medians.items()
    )


@contextmanager
def _server(dram_bytes: int) -> Generator[Path, None, None]:
    """Run a pool's server for as long as the context lasts; yield its run directory."""
    with tempfile.TemporaryDirectory(prefix="kvpool-") as folder:
        command = [sys.executable, "-m", "kvpool.server.main", "--die-with", str(os.getpid())]
        command += ["--run-dir", f"{folder}/run", "--dram", str(dram_bytes)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], _TIMEOUT_S)
            if not ready or "ready" not in process.stdout.readline():
                raise UnavailableError("kvpool-server did not start: its message is above")
            yield Path(folder) / "run"
        finally:
            process.terminate()
            try:
                process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_TIMEOUT_S)
            if process.stdout is not None:
                process.stdout.close()
