"""All settings: frozen data with plain bytes, seconds and counts inside.

Owns the settings' names, defaults and limits. Components (clock, tiers, transports) are arguments of
constructors, never named here; nothing here reads the environment. Who calls it: the command lines,
which parse sizes such as ``8GiB`` with ``parse_size``, and whoever embeds kvpool.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpool.errors import ConfigError

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.ASCII)
_UNITS: Final = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
# sun_path of a unix socket is 108 bytes; the longest name below a run directory is transport.sock.
RUN_DIR_BYTES_MAX: Final = 90
# What the bundled runtime computes in.
COMPUTE_DTYPES: Final = ("float32", "bfloat16", "float16")


def parse_size(text: str, *, key: str = "size") -> int:
    """Turn ``"8GiB"``, ``"512 MB"`` or ``"4096"`` into bytes.

    Raises:
        ConfigError: It is no size, not whole bytes, or zero. ``key`` names the setting.
    """
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ConfigError(f"{key} is {text!r}: write a size such as 8GiB or 512MiB", key=key)
    size = float(found[1]) * _UNITS[found[2] or "B"]
    if not 1 <= size < math.inf or size != int(size):
        raise ConfigError(f"{key} is {text!r}: it must be one or more whole bytes", key=key)
    return int(size)


def _require(valid: bool, key: str, value: object, rule: str) -> None:
    if not valid:
        raise ConfigError(f"{key} is {value!r}: {rule}", key=key)


def _require_positive(settings: object, section: str, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        rule = "it must be above 0, and not infinite"
        _require(0 < value < math.inf, f"{section}.{name}", value, rule)


def _require_port(port: int, key: str) -> None:
    _require(0 <= port <= 65535, key, port, "a port is 0 to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdConfig:
    """The SSD tier under a pool's DRAM.

    Attributes:
        folder: Of this pool alone, on a local file system; it outlives the pool.
        capacity_bytes: Room that is taken there at once, and never exceeded.
        flush_bytes_s: Bytes a second that are written in the background, on average; 0: no limit.
        flush_timeout_s: Longest time of one write, in the background or to be durable.
        backlog_bytes_max: Blocks in DRAM that wait to be written; the oldest are let go beyond it.
        durable_bytes_max: Blocks that may wait to be durable at once; more are refused.
        promote_timeout_s: Longest time that ``lease`` takes to bring blocks up, unless its caller
            says how long it would take to compute them.
        high_share, low_share: Watermarks of the DRAM tier, as shares of its room: above the first,
            blocks that are on the SSD are evicted from DRAM in the background until the second.
    """

    folder: Path
    capacity_bytes: int
    flush_bytes_s: int = 0
    flush_timeout_s: float = 10.0
    backlog_bytes_max: int = 1 << 30
    durable_bytes_max: int = 1 << 30
    promote_timeout_s: float = 1.0
    high_share: float = 0.98
    low_share: float = 0.95

    def __post_init__(self) -> None:
        _require_positive(self, "pool.ssd", "capacity_bytes", "flush_timeout_s")
        _require_positive(self, "pool.ssd", "backlog_bytes_max", "durable_bytes_max")
        _require_positive(self, "pool.ssd", "promote_timeout_s", "low_share")
        _require(
            self.flush_bytes_s >= 0,
            "pool.ssd.flush_bytes_s",
            self.flush_bytes_s,
            "it must be 0 (no limit) or more",
        )
        _require(
            self.low_share <= self.high_share <= 1,
            "pool.ssd.high_share",
            self.high_share,
            f"it must be at least low_share ({self.low_share}) and at most 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """What a pool keeps, and for how long it promises anything.

    Attributes:
        dram_bytes: Size of the DRAM tier's arena, taken and touched when the layout is known.
        numa_node: Where that memory lies; None means where the thread that opens the pool runs.
        locked: Whether it is kept out of swap; needs the right to lock so much.
        ssd: The SSD tier below it; None means none.
        lease_seconds_max: Longest lease that is granted.
        lease_bytes_max: Bytes that one client may hold leased at once.
    """

    dram_bytes: int = 1 << 30
    numa_node: int | None = None
    locked: bool = False
    ssd: SsdConfig | None = None
    lease_seconds_max: float = 300.0
    lease_bytes_max: int = 8 << 30

    def __post_init__(self) -> None:
        _require_positive(self, "pool", "dram_bytes", "lease_seconds_max", "lease_bytes_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How a client of a server moves bytes and how long it waits.

    Attributes:
        staging_bytes: Shared memory in which a client holds out blocks for the server to pull.
        match_timeout_s: Longest wait of ``match``; a server that is silent for longer is a miss.
        request_timeout_s: Longest wait of ``lease``, ``stats`` and other short requests, and of a store
            for any sign of life.
        backoff_min_s, backoff_max_s: First and longest pause before a dead server is asked again;
            doubled after each failure.
        stores_max: Stores under way or queued at a client; one more is refused.
        completion_threads: Threads of a client that stage blocks and wait for replies.
        ucx_host: Address that UCX binds to. Any other than loopback needs ``trusted_network``.
        trusted_network: Whether everybody who reaches ``ucx_host`` may write to this process's
            memory: UCX over TCP asks nobody who they are.
        advertise: Address that peers are told in place of ``ucx_host``; ``""``: the same.
        ucx_library: Path of the libucp to load; ``""``: chosen, and ``kvpool doctor`` says why.
        ucx_transports: Which transports libucp may use, as ``UCX_TLS`` names them: ``"tcp"``, or such
            as ``"rc,tcp"`` where there is RDMA, over which reads are gets.
        read_timeout_s: Longest that one read of a ring (match, lease and load) waits for servers
            without any sign of life, all of them and all steps together.
        replicas: Copies of each block that a store makes, on nodes of their own.
        ways: Which of a server's transports a client tries, of ``host`` and ``ucx``; with none, or
            where none works, blocks go through gRPC streams.
    """

    staging_bytes: int = 64 << 20
    match_timeout_s: float = 0.25
    request_timeout_s: float = 2.0
    backoff_min_s: float = 0.2
    backoff_max_s: float = 5.0
    stores_max: int = 64
    completion_threads: int = 4
    ucx_host: str = "127.0.0.1"
    trusted_network: bool = False
    advertise: str = ""
    ucx_library: str = ""
    ucx_transports: str = "tcp"
    read_timeout_s: float = 0.25
    replicas: int = 1
    ways: tuple[str, ...] = ("host", "ucx")

    def __post_init__(self) -> None:
        _require_positive(self, "transfer", "staging_bytes", "match_timeout_s", "request_timeout_s")
        _require_positive(self, "transfer", "read_timeout_s", "replicas")
        _require_positive(self, "transfer", "backoff_min_s", "stores_max", "completion_threads")
        _require(
            re.fullmatch(r"\^?[a-z0-9_]+(,[a-z0-9_]+)*", self.ucx_transports) is not None,
            "transfer.ucx_transports",
            self.ucx_transports,
            "name transports as UCX_TLS does, such as tcp or rc,tcp",
        )
        _require(
            self.backoff_max_s >= self.backoff_min_s,
            "transfer.backoff_max_s",
            self.backoff_max_s,
            f"it must be at least backoff_min_s ({self.backoff_min_s})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One kvpool-server process.

    Attributes:
        run_dir: Folder of the sockets, mode 0700, on a local file system.
        pool: What it keeps.
        stop_timeout_s: Longest time from SIGTERM to the end of the process.
        lease_check_s: How often leases that ran out are looked for, and gauges are set.
        clients_max: Connected clients; one more is refused.
        stores_max: Stores running at once over all clients; one more is refused.
        calls_max: Calls under way at once at each of its gRPC addresses; one more is refused.
        node: Name of this node in the ring, the same in every run of it; ``""``: it is alone.
        listen: ``host:port`` of the control plane, besides the socket in ``run_dir``; ``""``: none.
        advertise: ``host:port`` that others are told in place of ``listen``; ``""``: the same.
        transfer: Where its UCX binds.
        directory_names_max: Names that its shard of the directory has room for.
        announce_interval_s: How often other nodes hear from this one, news or not.
    """

    run_dir: Path
    pool: PoolConfig = field(default_factory=PoolConfig)
    stop_timeout_s: float = 3.0
    lease_check_s: float = 1.0
    clients_max: int = 256
    stores_max: int = 256
    calls_max: int = 4096
    node: str = ""
    listen: str = ""
    advertise: str = ""
    transfer: TransferConfig = field(default_factory=TransferConfig)
    directory_names_max: int = 1 << 20
    announce_interval_s: float = 1.0

    def __post_init__(self) -> None:
        size = len(str(self.run_dir.absolute()).encode())
        _require(
            size <= RUN_DIR_BYTES_MAX,
            "server.run_dir",
            str(self.run_dir),
            f"its path is {size} bytes long, a socket's path has room for {RUN_DIR_BYTES_MAX}: "
            "choose a shorter one",
        )
        _require_positive(
            self, "server", "stop_timeout_s", "lease_check_s", "clients_max", "stores_max"
        )
        _require_positive(self, "server", "calls_max", "directory_names_max", "announce_interval_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """One `kvpool-serve`: a Conductor, a prefill and a decode worker, and a pool on one machine.

    Attributes:
        model: Folder of a Hugging Face model; ``""`` means the bundled SmolLM2-135M-Instruct.
        device: ``"cpu"``: the only one in this version.
        dtype: Of weights, compute and KV.
        block_tokens: Tokens of a block, a multiple of 16.
        dram_bytes: DRAM tier of the pool.
        gpu_bytes: Paged KV cache of one worker (the gpu tier's arena, on any device).
        host, port: Where the HTTP API listens; port 0 picks a free one.
        chunk_tokens: Most prompt tokens in one forward pass of prefill.
        running_max: Requests that the decode worker runs in one step.
        waiting_max: Requests that wait for room; one more is refused.
        request_timeout_s: Longest life of one request.
        handoff_timeout_s: How long a decode worker holds blocks for a stream that does not end.
        pool_timeout_s: Longest wait for a load from the pool before the rest is recomputed.
        start_timeout_s: Longest wait for all processes to be ready.
        stop_timeout_s: Longest time from Ctrl-C to the end of every process.
    """

    model: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    block_tokens: int = 16
    dram_bytes: int = 1 << 30
    gpu_bytes: int = 512 << 20
    host: str = "127.0.0.1"
    port: int = 8000
    chunk_tokens: int = 256
    running_max: int = 16
    waiting_max: int = 256
    request_timeout_s: float = 600.0
    handoff_timeout_s: float = 120.0
    pool_timeout_s: float = 5.0
    start_timeout_s: float = 300.0
    stop_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        _require(
            self.block_tokens > 0 and self.block_tokens % 16 == 0,
            "runtime.block_tokens",
            self.block_tokens,
            "use a positive multiple of 16",
        )
        _require(
            self.device == "cpu",
            "runtime.device",
            self.device,
            "use cpu: no other device has been run yet",
        )
        _require(
            self.dtype in COMPUTE_DTYPES,
            "runtime.dtype",
            self.dtype,
            f"use one of {', '.join(COMPUTE_DTYPES)}",
        )
        _require_port(self.port, "runtime.port")
        _require_positive(self, "runtime", "dram_bytes", "gpu_bytes", "chunk_tokens")
        _require_positive(self, "runtime", "running_max", "waiting_max", "request_timeout_s")
        _require_positive(self, "runtime", "handoff_timeout_s", "pool_timeout_s")
        _require_positive(self, "runtime", "start_timeout_s", "stop_timeout_s")
