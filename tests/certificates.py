"""Certificates for tests, made in memory: an authority, servers, clients, and those that expired."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from kvpool.client.access import ClientAccess


@dataclass(frozen=True)
class Files:
    """PEM files of one certificate."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; its own is in ``ca``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._made = trustme.CA()
        self.ca = folder / "ca.pem"
        self._made.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *, expired: bool = False) -> Files:
        """Make a certificate for a name (and for 127.0.0.1), of now or of last year."""
        now = datetime.now(UTC)
        leaf = self._made.issue_cert(
            name,
            "127.0.0.1",
            "localhost",
            common_name=name,
            not_before=now - timedelta(days=400 if expired else 1),
            not_after=now + timedelta(days=-200 if expired else 30),
        )
        files = Files(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        with files.certificate.open("wb") as file:
            for pem in leaf.cert_chain_pems:
                file.write(pem.bytes())
        leaf.private_key_pem.write_to_path(files.key)
        files.key.chmod(0o600)
        return files

    def access(self, files: Files | None = None, token: str = "") -> ClientAccess:
        """Return what a caller shows who trusts this authority."""
        return ClientAccess(
            token=token,
            ca=self.ca.read_bytes(),
            certificate=files.certificate.read_bytes() if files else b"",
            key=files.key.read_bytes() if files else b"",
        )
