"""The fleet's own certificate authority, with two issuers so that a node's certificate opens no door:

    coordinator   signs the coordinator's client certificate and the fleet door's; node APIs trust it alone
    nodes         signs the nodes' certificates; the coordinator trusts it alone, and expects the node's id as the name

A certificate signing request gives its public key only: every name is chosen here. Leaves live 90 days and are renewed when less than
a third is left; notBefore lies five minutes back for hosts whose clocks disagree.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.errors import BadInput

LEAF_LIFE = timedelta(days=90)
ISSUER_LIFE = timedelta(days=3650)
BACKDATED = timedelta(minutes=5)

PublicKey = ec.EllipticCurvePublicKey


def node_name(node: str) -> str:
    """The DNS name in a node's certificate: its id, whatever its address is."""
    return f"{node}.node.boxfleet.internal"


def needs_renewal(certificate: x509.Certificate, now: datetime) -> bool:
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return certificate.not_valid_after_utc - now < life / 3


@dataclass(frozen=True)
class Issuer:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def load(cls, folder: Path, name: str) -> Issuer:
        """The issuer of that name, made at its first use."""
        key, path = _load_key(folder / f"{name}-ca.key"), folder / f"{name}-ca.pem"
        if not path.exists():
            subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"boxfleet {name} CA")])
            builder = _certificate(subject, subject, key.public_key(), ISSUER_LIFE).add_extension(
                x509.BasicConstraints(ca=True, path_length=0), critical=True
            )
            builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
            _write(path, builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return cls(key, x509.load_pem_x509_certificate(path.read_bytes()))

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(Encoding.PEM).decode()

    def sign(self, public_key: PublicKey, names: Sequence[str], purpose: x509.ObjectIdentifier) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        builder = _certificate(subject, self.certificate.subject, public_key, LEAF_LIFE)
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage([purpose]), False),
            (x509.SubjectAlternativeName([_name(name) for name in names]), False),
            (x509.SubjectKeyIdentifier.from_public_key(public_key), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False),
        ]
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self.key, hashes.SHA256())


class Authority:
    """Both issuers, and the coordinator's two identities as TLS contexts, which `renew` refreshes in place: new connections use
    the new certificate, open ones stay. Blocking; call it from a thread."""

    def __init__(self, folder: Path, door_names: Sequence[str]) -> None:
        self.folder = folder
        self._door_names = list(door_names)
        self.coordinator = Issuer.load(folder, "coordinator")
        self.nodes = Issuer.load(folder, "nodes")
        self.client_context = ssl.create_default_context(cadata=self.nodes.pem)
        self.client_context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.door_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.door_context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.door_context.set_alpn_protocols(["http/1.1"])
        self.renew()

    @classmethod
    def load(cls, folder: Path, door_names: Sequence[str]) -> Authority:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(folder, door_names)

    def renew(self) -> None:
        """Issues the coordinator's own certificates where they are missing, near their end or short of a name."""
        identities = (
            ("client", ["coordinator.boxfleet.internal"], ExtendedKeyUsageOID.CLIENT_AUTH, self.client_context),
            ("fleet-door", self._door_names, ExtendedKeyUsageOID.SERVER_AUTH, self.door_context),
        )
        for file, names, purpose, context in identities:
            key_path, path = self.folder / f"{file}.key", self.folder / f"{file}.pem"
            key = _load_key(key_path)
            if not path.exists() or not _still_good(path, names):
                certificate = self.coordinator.sign(key.public_key(), names, purpose)
                _write(path, certificate.public_bytes(Encoding.PEM))
            context.load_cert_chain(path, key_path)

    def sign_node(self, node: str, csr: str) -> str:
        """A certificate (PEM) for the public key of a request. Raises BadInput for one that is not a valid request."""
        try:
            request = x509.load_pem_x509_csr(csr.encode())
            key = request.public_key()
            valid = request.is_signature_valid
        except Exception as error:
            raise BadInput("csr is not a PEM certificate signing request", cause=str(error)) from error
        if not valid or not isinstance(key, PublicKey):
            raise BadInput("csr must be signed by its own elliptic-curve key")
        return self._node_certificate(node, key)

    def renewed_node(self, node: str, certificate: str) -> str | None:
        """A new certificate for the same key when the old one nears its end, else None."""
        old = x509.load_pem_x509_certificate(certificate.encode())
        key = old.public_key()
        if not needs_renewal(old, datetime.now(UTC)) or not isinstance(key, PublicKey):
            return None
        return self._node_certificate(node, key)

    def _node_certificate(self, node: str, key: PublicKey) -> str:
        certificate = self.nodes.sign(key, [node_name(node)], ExtendedKeyUsageOID.SERVER_AUTH)
        return certificate.public_bytes(Encoding.PEM).decode()


def _still_good(path: Path, names: Sequence[str]) -> bool:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return not needs_renewal(certificate, datetime.now(UTC)) and set(held) == {_name(name) for name in names}


def _certificate(subject: x509.Name, issuer: x509.Name, key: PublicKey, life: timedelta) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - BACKDATED
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(start + life)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        key = ec.generate_private_key(ec.SECP256R1())
        _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return cast(ec.EllipticCurvePrivateKey, load_pem_private_key(path.read_bytes(), None))


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, and never readable by others."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
