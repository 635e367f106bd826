"""TLS between the processes of a cluster: who has no certificate of its authority is not spoken with."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from link_pairs import LANES, connect, filled, raise_defect

from cstorch._internal.session import connecting
from cstorch.errors import ClusterUnreachableError
from waferbox import deadlines, settings
from waferbox.links.listener import LinkListener
from waferbox.rpc.address import bind
from waferbox.rpc.server import make_channel, make_server
from waferbox.security import authority
from waferbox.security.authority import AUTHORITY_KEY, issue
from waferbox.security.tls import AUTHORITY, CLIENT, NODE, TlsError

SECONDS = 3.0


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    issue(folder)
    return folder


@pytest.fixture
def address(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a server that says that it is well."""
    monkeypatch.setenv(settings.TLS_DIR.name, str(certificates))
    server = make_server()
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    address = bind(server, "127.0.0.1:0")
    server.start()
    yield address
    server.stop(0).wait()


def is_well(address: str) -> bool:
    with make_channel(address) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        except grpc.RpcError:
            return False
    return True


def client_folder(folder: Path, certificates: Path, *names: str) -> str:
    for name in names:
        (folder / name).write_bytes((certificates / name).read_bytes())
    return str(folder)


def test_keys_are_their_owners_alone_and_the_authority_stays(tmp_path: Path) -> None:
    issue(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {AUTHORITY, AUTHORITY_KEY, NODE, CLIENT}
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    authority, node = ((tmp_path / name).read_bytes() for name in (AUTHORITY, NODE))
    issue(tmp_path)
    assert (tmp_path / AUTHORITY).read_bytes() == authority
    assert (tmp_path / NODE).read_bytes() != node


def test_members_and_clients_are_served(
    address: str, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_well(address)
    monkeypatch.setenv(settings.TLS_DIR.name, client_folder(tmp_path, certificates, AUTHORITY, CLIENT))
    assert is_well(address)


def test_who_has_a_certificate_of_another_authority_is_not(
    address: str, certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue(tmp_path)
    (tmp_path / AUTHORITY).write_bytes((certificates / AUTHORITY).read_bytes())  # it trusts the server
    monkeypatch.setenv(settings.TLS_DIR.name, str(tmp_path))
    assert not is_well(address)


def test_who_has_no_certificate_is_told_what_to_do(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.TLS_DIR.name)
    monkeypatch.setattr(deadlines, "JOB_CREATION", replace(deadlines.JOB_CREATION, connect=1.0))
    with pytest.raises(ClusterUnreachableError, match="if the cluster uses TLS, WAFERBOX_TLS_DIR must name a folder"):
        connecting.connect(address, "management service", "")


def test_a_clients_certificate_does_not_pass_for_a_process_of_the_cluster(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client_folder(tmp_path, certificates, AUTHORITY)
    (tmp_path / NODE).write_bytes((certificates / CLIENT).read_bytes())
    monkeypatch.setenv(settings.TLS_DIR.name, str(tmp_path))
    server = make_server()
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    address = bind(server, "127.0.0.1:0")
    server.start()
    monkeypatch.setenv(settings.TLS_DIR.name, str(certificates))
    assert not is_well(address)
    server.stop(0).wait()


def test_a_folder_without_certificates_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.TLS_DIR.name, str(tmp_path))
    with pytest.raises(TlsError, match=f"{settings.TLS_DIR.name} names {tmp_path}"):
        make_channel("127.0.0.1:1")


def test_a_certificate_before_its_key_is_refused_and_ends_no_process(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.TLS_DIR.name, client_folder(tmp_path, certificates, AUTHORITY))
    key, marker, certificate = (certificates / CLIENT).read_text().partition("-----BEGIN CERTIFICATE-----")
    (tmp_path / CLIENT).write_text(marker + certificate + key)
    with pytest.raises(TlsError, match="must have a private key, and behind it a certificate"):
        make_channel("127.0.0.1:1")


@pytest.mark.parametrize("lane", LANES)
def test_links_carry_frames(certificates: Path, monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    monkeypatch.setenv(settings.TLS_DIR.name, str(certificates))
    server = make_server()
    address = bind(server, "127.0.0.1:0")
    listener = LinkListener(address, raise_defect)
    listener.add_to_server(server)
    server.start()
    dialled, taken = connect(listener, lane)
    payload = filled(300_000)
    taken.link.expect({1: payload.nbytes})
    dialled.hub.send(dialled.link, 1, 1, payload, as_bytes=True)
    assert bytes(taken.hub.receive(taken.link, 1, 1).view) == bytes(payload.view)
    dialled.close()
    taken.close()
    listener.close()
    server.stop(0).wait()


def test_an_expired_certificate_is_named(tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "CERTIFICATE_DAYS", -1)
    issue(tmp_path)
    monkeypatch.setenv(settings.TLS_DIR.name, str(tmp_path))
    with pytest.raises(TlsError, match=f"the certificate in {tmp_path / NODE} has expired, on 20"):
        make_channel("127.0.0.1:1")
