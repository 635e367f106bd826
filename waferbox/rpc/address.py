"""Addresses of the form host:port: parsing them, and binding a server to one."""

import contextlib
import errno
import ipaddress
import os
import re
import socket
from collections.abc import Callable
from typing import Final, TypeVar

import grpc

from waferbox.security.tls import add_port

MAX_TAKEN_PORTS: Final = 100  # that are tried, before none is free

_Used = TypeVar("_Used")

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_WILDCARD_HOSTS = frozenset({"0.0.0.0", "[::]"})


def split_address(address: str, *, any_port: bool = False) -> tuple[str, int]:
    """Host and port. any_port: whether port 0 is allowed too. Raises ValueError, with the expected form."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not (0 if any_port else 1) <= int(match[2]) <= 65535:
        example = "127.0.0.1:0" if any_port else "127.0.0.1:9000"
        raise ValueError(f"{address!r} is no address: it must look like host:port, for example {example}")
    return match[1], int(match[2])


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches a host, as `split_address` returns it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bind(server: grpc.Server | grpc.aio.Server, listen: str) -> str:
    """Adds a port to a server; returns the address at which others reach it. Raises OSError if that is impossible."""
    try:
        host, port = split_address(listen, any_port=True)
    except ValueError as error:
        raise OSError(f"cannot listen at {listen}: {error}") from error
    if is_loopback(host) and (problem := _loopback_problem(host)):
        raise OSError(f"cannot listen at {listen}: {problem}")
    try:
        bound = add_port(server, listen)
    except (ValueError, RuntimeError) as error:
        raise OSError(f"cannot listen at {listen}: {_bind_error(host, port) or error}") from error
    if not bound or (port and bound != port):
        raise OSError(f"cannot listen at {listen}: {_bind_error(host, port)}".removesuffix(": "))
    return reached_at(host, bound)


def _loopback_problem(host: str) -> str:
    """Returns why processes of this machine cannot reach each other at a loopback address; empty: they can."""
    try:
        # Without a packet: a server can also listen while the interface is down.
        with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
            probe.bind((host.strip("[]"), 0))
            probe.connect((host.strip("[]"), 1))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENETUNREACH):
            return f"{error.strerror}: the loopback interface must be up, with {host} (`ip link set lo up`)"
    return ""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if host.startswith("[") else socket.AF_INET


def _bind_error(host: str, port: int) -> str:
    """Returns why an address cannot be listened at, which gRPC does not say; empty: it can be now."""
    try:
        socket.create_server((host.strip("[]"), port), family=_family(host)).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return f"{reason}; port 0 is any free one" if error.errno == errno.EADDRINUSE else reason
    return ""


def listen(use: Callable[[str], _Used], address: str, *, next_free: bool) -> _Used:
    """Listens at an address; returns what `use` does.

    Args:
        use: begins to listen at an address. Raises OSError if that is impossible.
        address: host:port; port 0: any free port.
        next_free: whether, if the port is taken, the next one that is free is used.

    Raises:
        OSError: the address cannot be listened at.
    """
    if next_free:
        host, first = split_address(address, any_port=True)
        for port in range(first, min(first + MAX_TAKEN_PORTS, 65535)):
            with contextlib.suppress(OSError):
                return use(f"{host}:{port}")
    return use(address)


def reached_at(host: str, port: int) -> str:
    """The address at which other hosts reach a server that listens there."""
    return f"{socket.gethostname() if host in _WILDCARD_HOSTS else host}:{port}"
