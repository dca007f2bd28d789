"""What a server is made of, out of its configuration file: limits, who may call, who else there is.

Owns the rules that concern several settings at once, such as: nobody listens beyond loopback without
TLS and somebody to let in. Opens no port. Who calls it: the server's main.
"""

import ipaddress
import ssl
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc

from kvpool.block import NodeId
from kvpool.client.access import ClientAccess, is_loopback
from kvpool.client.secret_file import read_secret
from kvpool.config import PoolConfig, ServerConfig, SsdConfig, TransferConfig
from kvpool.errors import ConfigError, UsageError
from kvpool.index.membership import Member, Membership, StaticMembership, node_id
from kvpool.server.access import Credential, TenantAccess
from kvpool.server.settings import (
    FileSettings,
    ListenSettings,
    NodeSettings,
    TenantSettings,
)
from kvpool.server.tenant import Authenticator, OpenAccess, Tenant

_PEM_BYTES_MAX: Final = 1 << 20
STOP_TIMEOUT_MIN_S: Final = 0.5
# What the file calls a setting that the code has under another name.
_FILE_KEYS: Final = {
    "server.run_dir": "node.run_dir",
    "server.stop_timeout_s": "node.stop_timeout_s",
    "server.clients_max": "node.clients_max",
    "server.stores_max": "node.stores_max",
    "server.calls_max": "node.calls_max",
    "server.directory_names_max": "ring.directory_names_max",
    "server.announce_interval_s": "ring.announce_interval_s",
    "pool.dram_bytes": "pool.dram",
    "pool.ssd.capacity_bytes": "pool.ssd.capacity",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a server is made of.

    Attributes:
        config: Limits and names.
        authenticator: Who may call.
        credentials: gRPC's, for ``config.listen``; None: no TLS.
        membership: Of the pool; None: this server is alone. To be closed by its user.
        access: How this server shows other servers who it is.
        http: Address of the HTTP port; None: none.
    """

    config: ServerConfig
    authenticator: Authenticator
    credentials: object
    membership: Membership | None
    access: ClientAccess
    http: tuple[str, int] | None


def parts_of(settings: FileSettings, run_dir: Path) -> Parts:
    """Make the parts. Raises ConfigError: a setting contradicts another, or a file cannot be used."""
    listen = settings.listen
    _check_listen(settings)
    authenticator = _authenticator(settings)
    return Parts(
        config=_config(settings, run_dir),
        authenticator=authenticator,
        credentials=_credentials(listen),
        membership=_membership(settings),
        access=_access(settings),
        http=None if not listen.http else split_address(listen.http, "listen.http"),
    )


def split_address(text: str, key: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[IPv6]:PORT``. Raises ConfigError naming ``key``."""
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare and bare == host:
        raise ConfigError(
            f"{key} is {text!r}: write an IPv6 address in brackets, such as [::1]:7420", key=key
        )
    if not colon or not bare or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{key} is {text!r}: write HOST:PORT, such as 127.0.0.1:7420", key=key)
    if not all(part.isalnum() or part in ".-:_" for part in bare) or not bare.isascii():
        raise ConfigError(f"{key} is {text!r}: {bare!r} is no name or address of a host", key=key)
    return bare, int(port)


def _check_listen(settings: FileSettings) -> None:
    listen = settings.listen
    if (not listen.certificate_file) != (not listen.key_file):
        raise ConfigError(
            "listen.certificate_file and listen.key_file go together", key="listen.key_file"
        )
    if listen.client_ca_file and not listen.certificate_file:
        raise ConfigError(
            "listen.client_ca_file needs TLS: set listen.certificate_file and listen.key_file",
            key="listen.client_ca_file",
        )
    if not listen.address:
        return
    host, _ = split_address(listen.address, "listen.address")
    if listen.advertise:
        split_address(listen.advertise, "listen.advertise")
    if is_loopback(host) or listen.insecure:
        return
    if not listen.certificate_file:
        raise ConfigError(
            f"listen.address is {listen.address}, beyond loopback, without TLS: set "
            "listen.certificate_file and listen.key_file, or listen.insecure = true where whoever "
            "reaches it may do everything",
            key="listen.address",
        )
    if not listen.client_ca_file and not settings.tenants:
        raise ConfigError(
            f"listen.address is {listen.address}, beyond loopback, and lets everybody in: list "
            "[[tenants]], or set listen.client_ca_file, or listen.insecure = true",
            key="listen.address",
        )


def _config(settings: FileSettings, run_dir: Path) -> ServerConfig:
    node, pool, ssd = settings.node, settings.pool, settings.pool.ssd
    if ssd.capacity and not ssd.folder:
        raise ConfigError("pool.ssd.capacity is set: set pool.ssd.folder", key="pool.ssd.folder")
    if node.stop_timeout_s < STOP_TIMEOUT_MIN_S:
        raise ConfigError(
            f"node.stop_timeout_s is {node.stop_timeout_s}: a server needs {STOP_TIMEOUT_MIN_S} s to "
            "end in order",
            key="node.stop_timeout_s",
        )
    if ssd.folder and not ssd.capacity:
        raise ConfigError("pool.ssd.folder is set: set pool.ssd.capacity", key="pool.ssd.capacity")
    if pool.numa_node < -1:
        raise ConfigError(
            f"pool.numa_node is {pool.numa_node}: name a node, see numactl --hardware, or leave it out",
            key="pool.numa_node",
        )
    try:
        return _made(settings, run_dir)
    except ConfigError as error:
        named = str(error.key or "")
        key = _FILE_KEYS.get(named, named)
        raise ConfigError(str(error).replace(named, key, 1), key=key) from error


def _made(settings: FileSettings, run_dir: Path) -> ServerConfig:
    node, pool, transfer = settings.node, settings.pool, settings.transfer
    ssd = pool.ssd
    return ServerConfig(
        run_dir=run_dir,
        pool=PoolConfig(
            dram_bytes=int(pool.dram),
            numa_node=None if pool.numa_node == -1 else pool.numa_node,
            locked=pool.locked,
            ssd=None
            if not ssd.folder
            else SsdConfig(
                folder=Path(ssd.folder),
                capacity_bytes=int(ssd.capacity),
                flush_bytes_s=int(ssd.flush_bytes_s),
                flush_timeout_s=ssd.flush_timeout_s,
                backlog_bytes_max=int(ssd.backlog_bytes_max),
                durable_bytes_max=int(ssd.durable_bytes_max),
                promote_timeout_s=ssd.promote_timeout_s,
            ),
            lease_seconds_max=pool.lease_seconds_max,
            lease_bytes_max=int(pool.lease_bytes_max),
        ),
        stop_timeout_s=node.stop_timeout_s,
        clients_max=node.clients_max,
        stores_max=node.stores_max,
        calls_max=node.calls_max,
        node=node.name,
        listen=settings.listen.address,
        advertise=_advertised(settings),
        transfer=TransferConfig(
            ucx_host=transfer.ucx_host,
            trusted_network=transfer.trusted_network,
            advertise=transfer.advertise,
            ucx_library=transfer.ucx_library,
            ucx_transports=transfer.ucx_transports,
        ),
        directory_names_max=settings.ring.directory_names_max,
        announce_interval_s=settings.ring.announce_interval_s,
    )


def _advertised(settings: FileSettings) -> str:
    """Return where others find this node: as the list says, if there is one; empty: where it listens."""
    listen, ring = settings.listen, settings.ring
    for one in ring.members:
        split_address(one.address, "ring.members.address")
        if one.name == settings.node.name and listen.advertise not in ("", one.address):
            raise ConfigError(
                f"listen.advertise is {listen.advertise}, and ring.members says {one.address} of this "
                "node: say one thing",
                key="listen.advertise",
            )
    listed = [one.address for one in ring.members if one.name == settings.node.name]
    advertised = listen.advertise or (listed[0] if listed else "")
    if not (ring.members or ring.etcd.endpoints) or not listen.address:
        return advertised
    key = "listen.advertise"
    host, _ = split_address(advertised or listen.address, key)
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise ConfigError(
                f"others cannot reach {advertised or listen.address}: set {key} (or the address in "
                "ring.members) to one that they can",
                key=key,
            )
    return advertised


def _credentials(listen: ListenSettings) -> object:
    if not listen.certificate_file:
        return None
    chain = _pem(listen.certificate_file, "listen.certificate_file")
    read_private(Path(listen.key_file), "listen.key_file")
    key = _pem(listen.key_file, "listen.key_file")
    ca = _pem(listen.client_ca_file, "listen.client_ca_file") if listen.client_ca_file else None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key_name = "listen.key_file"
    try:
        # gRPC says of files that do not fit no more than that it cannot listen.
        context.load_cert_chain(listen.certificate_file, listen.key_file, password=lambda: b"")
        if ca is not None:
            key_name = "listen.client_ca_file"
            context.load_verify_locations(listen.client_ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key_name}: {error}: name PEM files that fit each other, a key without a password",
            key=key_name,
        ) from error
    return grpc.ssl_server_credentials([(key, chain)], ca, require_client_auth=ca is not None)


def _authenticator(settings: FileSettings) -> Authenticator:
    if not settings.tenants:
        return OpenAccess()
    secret_file = settings.access.secret_file
    secret = read_secret(Path(secret_file), "access.secret_file") if secret_file else ""
    for tenant in settings.tenants:
        if tenant.certificate_names and not settings.listen.client_ca_file:
            raise ConfigError(
                f"tenant {tenant.name} shows a certificate: set listen.client_ca_file",
                key="tenants.certificate_names",
            )
    places = len(settings.tenants) + 1  # one for this user's own processes
    credentials = [_credential(tenant, settings.node, places) for tenant in settings.tenants]
    return TenantAccess(credentials, secret)


def _credential(settings: TenantSettings, node: NodeSettings, places: int) -> Credential:
    token = ""
    if settings.token_file:
        token = read_secret(Path(settings.token_file), "tenants.token_file")
    return Credential(
        tenant=Tenant(
            name=settings.name,
            lease_bytes_max=int(settings.lease_bytes_max) or None,
            store_bytes_max=int(settings.store_bytes_max) or None,
            operator=settings.operator,
            clients_max=_share("clients_max", settings.clients_max, node.clients_max, places),
            stores_max=_share("stores_max", settings.stores_max, node.stores_max, places),
            calls_max=_share("calls_max", settings.calls_max, node.calls_max, places),
        ),
        token=token,
        certificate_names=tuple(settings.certificate_names),
    )


def _share(name: str, limit: int, of_all: int, places: int) -> int:
    """Return how many a tenant may have at once: as the file says, or an equal part."""
    if limit < 0:
        raise ConfigError(
            f"tenants.{name} is {limit}: write a number above 0, or 0 for an equal share of "
            f"node.{name}",
            key=f"tenants.{name}",
        )
    return limit or max(1, of_all // places)


def _membership(settings: FileSettings) -> Membership | None:
    ring, node = settings.ring, settings.node
    if ring.members and ring.etcd.endpoints:
        raise ConfigError(
            "ring.members and ring.etcd.endpoints exclude each other: use one", key="ring.members"
        )
    if not ring.members and not ring.etcd.endpoints:
        return None
    if not node.name:
        raise ConfigError("a node of a ring needs a name: set node.name", key="node.name")
    try:
        node_id(node.name)
        if not settings.listen.address:
            raise ConfigError(
                "a node of a ring must be reached: set listen.address", key="listen.address"
            )
        if ring.members:
            listed = [Member(node=NodeId(one.name), address=one.address) for one in ring.members]
            if node.name not in [one.node for one in listed]:
                raise ConfigError(
                    f"node.name is {node.name}, and not among ring.members", key="node.name"
                )
            return StaticMembership(listed)
        return _etcd(settings)
    except ConfigError:
        raise
    except UsageError as error:
        raise ConfigError(str(error), key="ring") from error


def _etcd(settings: FileSettings) -> Membership:
    try:
        from kvpool.index.etcd import EtcdMembership
        from kvpool.index.etcd_gateway import Gateway
    except ImportError as error:
        raise ConfigError(
            "ring.etcd needs httpx: pip install 'kvpool[etcd]'", key="ring.etcd.endpoints"
        ) from error
    etcd = settings.ring.etcd
    gateway = Gateway(
        etcd.endpoints,
        timeout_s=etcd.timeout_s,
        ca_file=Path(etcd.ca_file) if etcd.ca_file else None,
        cert_file=Path(etcd.certificate_file) if etcd.certificate_file else None,
        key_file=Path(etcd.key_file) if etcd.key_file else None,
    )
    return EtcdMembership(gateway, pool=etcd.pool, life_s=etcd.life_s)


def _access(settings: FileSettings) -> ClientAccess:
    """Return how this server calls others: with its own certificate, and a token if it has one."""
    access, listen = settings.access, settings.listen
    token = ""
    if access.server_token_file:
        token = read_secret(Path(access.server_token_file), "access.server_token_file")
    ca = access.server_ca_file
    if (
        listen.certificate_file
        and not ca
        and (settings.ring.members or settings.ring.etcd.endpoints)
    ):
        raise ConfigError(
            "servers of this ring speak TLS: set access.server_ca_file, to call the others",
            key="access.server_ca_file",
        )
    made = ClientAccess(token=token, insecure=access.insecure)
    if ca:
        made = replace(made, ca=_pem(ca, "access.server_ca_file"))
        if listen.certificate_file:
            chain = _pem(listen.certificate_file, "listen.certificate_file")
            made = replace(made, certificate=chain, key=_pem(listen.key_file, "listen.key_file"))
    for one in settings.ring.members:
        try:
            made.require_safe(one.address)
        except UsageError as error:
            raise ConfigError(str(error), key="access.server_ca_file") from error
    return made


def read_private(path: Path, key: str) -> None:
    """Raise ConfigError if others than this user can read a private key."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}", key=key) from error
    if status.st_mode & 0o077:
        raise ConfigError(
            f"{key}: others may read {path}: say chmod 600 {path}, and make a new key", key=key
        )


def _pem(name: str, key: str) -> bytes:
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {name} cannot be read: {error.strerror}", key=key) from error
    if len(data) > _PEM_BYTES_MAX or b"-----BEGIN " not in data:
        raise ConfigError(f"{key}: {name} is no PEM file", key=key)
    return data
