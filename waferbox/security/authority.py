"""A cluster's own certificate authority, and the certificates that it issues. Imported only where these are made."""

import datetime
import os
import secrets
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from waferbox.security.tls import AUTHORITY, CLIENT, NODE, NODE_NAME

AUTHORITY_KEY: Final = "authority.key"
AUTHORITY_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 397


def issue(folder: Path) -> None:
    """Writes new certificates for a cluster's processes and its clients into a folder. Raises OSError.

    The authority in the folder issues them; it is made if the folder has none.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / AUTHORITY_KEY).exists():
        _make_authority(folder)
    key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    for file, name, purposes in (
        (NODE, NODE_NAME, both),
        (CLIENT, "client.waferbox.internal", [ExtendedKeyUsageOID.CLIENT_AUTH]),
    ):
        own_key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(name, authority.subject, own_key, CERTIFICATE_DAYS)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        )
        certificate = builder.sign(key, hashes.SHA256())
        _write(folder / file, _pem(own_key) + certificate.public_bytes(serialization.Encoding.PEM))


def _make_authority(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"waferbox cluster {secrets.token_hex(4)}"
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, None, key, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / AUTHORITY, certificate.public_bytes(serialization.Encoding.PEM))
    _write(folder / AUTHORITY_KEY, _pem(key))


def _builder(
    name: str, issuer: x509.Name | None, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of hosts differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    """Writes a file that only its owner may read, under another name until it is complete."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    temporary.replace(path)
