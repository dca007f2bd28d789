"""What kvpool-server's configuration file may say: its sections, every key with meaning and default.

Owns names and units, nothing else: ``settings_file.py`` reads and prints them, and what they mean is
checked where they are used. Who calls it: that, and the server's main.
"""

from typing import Annotated

import msgspec


class Size(int):
    """Bytes; in a file a number, or a text such as ``"8GiB"``."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class NodeSettings(Section, frozen=True, kw_only=True):
    """The server itself."""

    name: Annotated[
        str,
        msgspec.Meta(
            description="Name of this node in the pool: letters, digits, dots, dashes. Needed where "
            "there are several; empty: it is alone"
        ),
    ] = ""
    run_dir: Annotated[
        str,
        msgspec.Meta(
            description="Folder of its sockets, mode 0700, for clients of this host; empty: a fresh one"
        ),
    ] = ""
    log_level: Annotated[str, msgspec.Meta(description="debug, info, warning or error")] = "warning"
    stop_timeout_s: Annotated[
        float,
        msgspec.Meta(
            description="Longest time from SIGTERM to the end of the process, 0.5 or more"
        ),
    ] = 3.0
    clients_max: Annotated[
        int, msgspec.Meta(description="Connected clients; one more is refused")
    ] = 256
    stores_max: Annotated[
        int, msgspec.Meta(description="Stores at once over all clients; one more is refused")
    ] = 256
    calls_max: Annotated[
        int,
        msgspec.Meta(description="Calls at once that come by gRPC; one more is refused"),
    ] = 4096


class SsdSettings(Section, frozen=True, kw_only=True):
    """The SSD tier below the DRAM tier, if ``folder`` is set."""

    folder: Annotated[
        str,
        msgspec.Meta(
            description="Folder of this server alone, on a local disk; empty: no SSD tier"
        ),
    ] = ""
    capacity: Annotated[
        Size, msgspec.Meta(description="Room that is taken there at once, such as 100GiB")
    ] = Size(0)
    flush_bytes_s: Annotated[
        Size, msgspec.Meta(description="Bytes a second written in the background; 0: no limit")
    ] = Size(0)
    flush_timeout_s: Annotated[float, msgspec.Meta(description="Longest time of one write")] = 10.0
    backlog_bytes_max: Annotated[
        Size,
        msgspec.Meta(description="Blocks that wait to be written; beyond it the oldest are let go"),
    ] = Size(1 << 30)
    durable_bytes_max: Annotated[
        Size, msgspec.Meta(description="Blocks that may wait to be durable; more are refused")
    ] = Size(1 << 30)
    promote_timeout_s: Annotated[
        float, msgspec.Meta(description="Longest time that a lease takes to bring blocks up")
    ] = 1.0


class PoolSettings(Section, frozen=True, kw_only=True):
    """What this server keeps."""

    dram: Annotated[
        Size, msgspec.Meta(description="Size of the DRAM tier, taken with the first client")
    ] = Size(1 << 30)
    numa_node: Annotated[
        int, msgspec.Meta(description="NUMA node that it lies on; -1: where the server runs")
    ] = -1
    locked: Annotated[
        bool, msgspec.Meta(description="Keep it out of swap; needs the right to lock so much")
    ] = False
    lease_seconds_max: Annotated[float, msgspec.Meta(description="Longest lease")] = 300.0
    lease_bytes_max: Annotated[
        Size, msgspec.Meta(description="Bytes that one client may hold leased at once")
    ] = Size(8 << 30)
    ssd: SsdSettings = SsdSettings()


class ListenSettings(Section, frozen=True, kw_only=True):
    """For clients and servers on other hosts. The sockets in ``node.run_dir`` are always there."""

    address: Annotated[
        str,
        msgspec.Meta(
            description="HOST:PORT of the control plane (gRPC); empty: this host's clients only"
        ),
    ] = ""
    advertise: Annotated[
        str,
        msgspec.Meta(
            description="HOST:PORT that others are told; empty: as ring.members says, else the address"
        ),
    ] = ""
    certificate_file: Annotated[
        str, msgspec.Meta(description="This server's certificate (PEM, with its chain): TLS is on")
    ] = ""
    key_file: Annotated[str, msgspec.Meta(description="Its private key (PEM), mode 0600")] = ""
    client_ca_file: Annotated[
        str,
        msgspec.Meta(
            description="Authorities (PEM) that sign callers' certificates: every caller must have one"
        ),
    ] = ""
    insecure: Annotated[
        bool,
        msgspec.Meta(description="Listen beyond loopback without TLS, where nothing else can be"),
    ] = False
    http: Annotated[
        str,
        msgspec.Meta(
            description="HOST:PORT of /metrics, /healthz and /readyz, plain HTTP; empty: none"
        ),
    ] = ""


class TransferSettings(Section, frozen=True, kw_only=True):
    """How blocks move."""

    ucx: Annotated[
        bool,
        msgspec.Meta(
            description="Move blocks between hosts through UCX; false: through gRPC streams"
        ),
    ] = False
    ucx_host: Annotated[str, msgspec.Meta(description="Address that UCX binds to")] = "127.0.0.1"
    advertise: Annotated[
        str, msgspec.Meta(description="Address that peers are told; empty: ucx_host")
    ] = ""
    trusted_network: Annotated[
        bool,
        msgspec.Meta(
            description="Needed for any ucx_host but loopback: whoever reaches it can write to this "
            "process's memory"
        ),
    ] = False
    ucx_library: Annotated[
        str,
        msgspec.Meta(description="Path of the libucp to load; empty: chosen, see kvpool doctor"),
    ] = ""
    ucx_transports: Annotated[
        str,
        msgspec.Meta(
            description="Transports that libucp may use, as UCX_TLS names them; rc,tcp where there "
            "is RDMA (not tested on such hardware)"
        ),
    ] = "tcp"


class MemberSettings(Section, frozen=True, kw_only=True):
    """One node of a static list."""

    name: Annotated[str, msgspec.Meta(description="Its node.name")]
    address: Annotated[str, msgspec.Meta(description="Its listen.advertise, HOST:PORT")]


class EtcdSettings(Section, frozen=True, kw_only=True):
    """Membership through etcd, if ``endpoints`` are set. Needs ``pip install 'kvpool[etcd]'``."""

    endpoints: Annotated[
        list[str], msgspec.Meta(description="URLs, such as http://10.0.0.5:2379")
    ] = []
    pool: Annotated[
        str, msgspec.Meta(description="Name of the pool: several may share one etcd")
    ] = "default"
    life_s: Annotated[
        int,
        msgspec.Meta(
            description="A node that fell silent leaves the ring after twice this, whole seconds"
        ),
    ] = 10
    timeout_s: Annotated[float, msgspec.Meta(description="Longest wait for one answer of etcd")] = (
        2.0
    )
    ca_file: Annotated[
        str, msgspec.Meta(description="Authority of etcd's certificate; empty: the system's")
    ] = ""
    certificate_file: Annotated[
        str, msgspec.Meta(description="This node's certificate for etcd, which must allow clients")
    ] = ""
    key_file: Annotated[str, msgspec.Meta(description="Its private key")] = ""


class RingSettings(Section, frozen=True, kw_only=True):
    """Which servers make up the pool: a static list or etcd, or neither for one server alone."""

    members: Annotated[
        list[MemberSettings],
        msgspec.Meta(description="All nodes, this one too, as [[ring.members]] on every server"),
    ] = []
    directory_names_max: Annotated[
        int,
        msgspec.Meta(description="Names that this server's shard of the directory has room for"),
    ] = 1 << 20
    announce_interval_s: Annotated[
        float, msgspec.Meta(description="How often others hear from this server, news or not")
    ] = 1.0
    etcd: EtcdSettings = EtcdSettings()


class AccessSettings(Section, frozen=True, kw_only=True):
    """Who may call ``listen.address``. This user's processes on this host always may."""

    secret_file: Annotated[
        str,
        msgspec.Meta(
            description="File with the pool's secret, mode 0600, the same on every server: tenants' "
            "salts are made from it"
        ),
    ] = ""
    server_token_file: Annotated[
        str,
        msgspec.Meta(
            description="Token that this server shows to others: of a tenant with operator = true"
        ),
    ] = ""
    server_ca_file: Annotated[
        str,
        msgspec.Meta(description="Authorities that sign servers' certificates, to call others"),
    ] = ""
    insecure: Annotated[
        bool,
        msgspec.Meta(
            description="Show server_token_file's token to other hosts without TLS, where nobody "
            "else can listen"
        ),
    ] = False


class TenantSettings(Section, frozen=True, kw_only=True):
    """Who may call, and how much of the pool is his. ``[[tenants]]``; none: whoever gets through."""

    name: Annotated[str, msgspec.Meta(description="Name, in messages and logs")]
    token_file: Annotated[
        str, msgspec.Meta(description="File with his bearer token, mode 0600; empty: no token")
    ] = ""
    certificate_names: Annotated[
        list[str],
        msgspec.Meta(
            description="Names of which his certificate must have one; empty: any, or none"
        ),
    ] = []
    lease_bytes_max: Annotated[
        Size, msgspec.Meta(description="Bytes that all his clients may hold leased; 0: no limit")
    ] = Size(0)
    store_bytes_max: Annotated[
        Size, msgspec.Meta(description="Bytes of his blocks on this server; 0: no limit")
    ] = Size(0)
    clients_max: Annotated[
        int,
        msgspec.Meta(
            description="His connected clients; 0: an equal share of node.clients_max for each "
            "tenant, and one for this user's own processes"
        ),
    ] = 0
    stores_max: Annotated[
        int, msgspec.Meta(description="His stores at once; 0: a share of node.stores_max")
    ] = 0
    calls_max: Annotated[
        int, msgspec.Meta(description="His calls at once by gRPC; 0: a share of node.calls_max")
    ] = 0
    operator: Annotated[
        bool,
        msgspec.Meta(description="May evict, verify and announce: for servers and people"),
    ] = False


class FileSettings(Section, frozen=True, kw_only=True):
    """The whole file."""

    node: NodeSettings = NodeSettings()
    pool: PoolSettings = PoolSettings()
    listen: ListenSettings = ListenSettings()
    transfer: TransferSettings = TransferSettings()
    ring: RingSettings = RingSettings()
    access: AccessSettings = AccessSettings()
    tenants: list[TenantSettings] = []
