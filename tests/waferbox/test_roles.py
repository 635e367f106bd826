"""The table of roles agrees with the protocol, the packages and the services of docker-compose.yml."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from waferbox import roles
from wsc.v1 import node_pb2

ROOT = Path(__file__).parents[2]


def test_the_protocol_numbers_the_nodes_and_the_coordinator() -> None:
    numbers = {role.number for role in (*roles.REGISTERED, roles.COORDINATOR)}
    assert numbers == set(node_pb2.Role.values()) - {node_pb2.ROLE_UNSPECIFIED}
    assert all(roles.role_of(role.number) is role for role in roles.REGISTERED)


def test_other_numbers_are_no_role_of_a_node() -> None:
    known = {number for number in range(100) if roles.is_registered(number)}  # type: ignore[arg-type]  # any number
    assert known == {role.number for role in roles.REGISTERED}


@pytest.mark.parametrize("role", roles.ROLES, ids=lambda role: role.name)
def test_the_module_of_a_role_can_be_started(role: roles.Role) -> None:
    assert importlib.util.find_spec(f"{role.module}.__main__")


def test_docker_compose_has_a_service_for_each_role_of_a_node_and_for_management() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {role.name for role in (*roles.REGISTERED, roles.MANAGEMENT)} <= services.keys()


def test_names() -> None:
    assert roles.WORKER.counted(1) == "1 input worker"
    assert roles.WORKER.counted(2) == "2 input workers"
    assert roles.member_index(roles.WAFER.member_name(12)) == 12


def test_the_table_is_imported_without_protobuf() -> None:
    code = "import sys, waferbox.roles, waferbox.launch.process; sys.exit('google.protobuf' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode
