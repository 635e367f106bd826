"""TLS between all processes of a cluster, and for its clients: mutual, by an authority of the cluster's own.

The folder that WAFERBOX_TLS_DIR names has authority.pem, and a key with its certificate: node.pem for processes of the
cluster, client.pem for scripts and commands. Every server requires a certificate of the authority. A client recognises
a process of the cluster by the name in its certificate, whatever its address; client.pem does not have that name.
"""

import datetime
import functools
from pathlib import Path
from typing import Final

import grpc

from waferbox import settings

AUTHORITY: Final = "authority.pem"
NODE: Final = "node.pem"
CLIENT: Final = "client.pem"
NODE_NAME: Final = "node.waferbox.internal"  # in the certificates of processes
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"


class TlsError(OSError):
    """Raised where a file for TLS is missing or wrong; the message names the file and the way out."""


def add_port(server: grpc.Server | grpc.aio.Server, listen: str) -> int:
    """Adds a port to a server; returns its number, or 0. Raises RuntimeError if that fails; TlsError."""
    folder = tls_folder()
    if folder is None:
        return server.add_insecure_port(listen)
    return server.add_secure_port(listen, _server_credentials(folder))


def open_channel(address: str, options: list[tuple[str, int]]) -> grpc.Channel:
    """A channel to host:port. Raises TlsError."""
    folder = tls_folder()
    if folder is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _channel_credentials(folder), options=[*options, *_NAMED])


def open_async_channel(address: str, options: list[tuple[str, int]]) -> grpc.aio.Channel:
    """A channel to host:port for the event loop in which it is made. Raises TlsError."""
    folder = tls_folder()
    if folder is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _channel_credentials(folder), options=[*options, *_NAMED])


def tls_folder() -> Path | None:
    """The folder of the certificates that this process uses; None if it uses no TLS."""
    return settings.TLS_DIR.get()


_NAMED: Final = [("grpc.ssl_target_name_override", NODE_NAME)]


@functools.lru_cache(maxsize=8)
def _server_credentials(folder: Path) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([_pair(folder, NODE)], _read(folder, AUTHORITY), require_client_auth=True)


@functools.lru_cache(maxsize=8)
def _channel_credentials(folder: Path) -> grpc.ChannelCredentials:
    key, certificate = _pair(folder, NODE if (folder / NODE).exists() else CLIENT)
    return grpc.ssl_channel_credentials(_read(folder, AUTHORITY), key, certificate)


def _pair(folder: Path, name: str) -> tuple[bytes, bytes]:
    key, marker, certificate = _read(folder, name).partition(_CERTIFICATE)
    if b"PRIVATE KEY" not in key or not marker:  # gRPC would abort the process
        raise TlsError(f"{folder / name} must have a private key, and behind it a certificate")
    _check_date(folder / name, marker + certificate)
    return key, marker + certificate


def _check_date(file: Path, certificate: bytes) -> None:
    """Raises TlsError for a certificate that is no longer valid: the other side would close connections in silence."""
    from cryptography import x509  # in the function, as only processes with TLS need it

    try:
        end = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except ValueError as error:
        raise TlsError(f"the certificate in {file} cannot be read: {error}") from error
    if end < datetime.datetime.now(datetime.UTC):
        raise TlsError(
            f"the certificate in {file} has expired, on {end:%Y-%m-%d}: `waferbox up --tls` makes another; a client on "
            "another machine needs a new copy"
        )


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise TlsError(
            f"{settings.TLS_DIR.name} names {folder}, where {name} cannot be read ({error.strerror}): "
            f"`waferbox up --tls` makes one; a client on another machine needs copies of {AUTHORITY} and {CLIENT}"
        ) from error
