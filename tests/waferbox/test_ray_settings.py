"""What is asked of Ray: resources of roles, bundles, and what is said where there is no room."""

import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from waferbox.cluster.launcher import ClusterSettings
from waferbox.commands.cli import app
from waferbox.ray_engine.credentials import Credentials
from waferbox.ray_engine.settings import lay_out, missing_resources, parse_resources, read_runtime_env

ROLES = {"memoryx": 1, "swarmx": 1, "wafer": 2, "workers": 3}


def test_a_role_gets_its_defaults_and_what_is_asked_for() -> None:
    resources = parse_resources(["wafer.GPU=1", "memoryx.memory=2g", "worker.CPU=0.5", "swarmx.nvme=1"])
    assert resources["wafer"] == {"CPU": 1.0, "GPU": 1.0}
    assert resources["memoryx"]["memory"] == 2 * 2**30
    assert resources["workers"] == {"CPU": 0.5}
    assert resources["swarmx"]["nvme"] == 1.0


@pytest.mark.parametrize("word", ["wafers.CPU=1", "wafer=1", "wafer.CPU", "wafer.CPU=much", "wafer.CPU=-1", "wafer.=1"])
def test_what_is_no_resource_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"must look like|the amount is a number"):
        parse_resources([word])


def test_a_wafer_and_its_workers_share_a_bundle() -> None:
    layout = lay_out(ROLES, parse_resources([]))
    assert layout.members == [["wafer", "workers", "workers"], ["wafer", "workers"], ["memoryx"], ["swarmx"]]
    assert [bundle["CPU"] for bundle in layout.bundles] == [1.5, 1.25, 0.5, 0.25]
    assert layout.slots.count(("workers", 0)) == 2
    assert sum(ROLES.values()) == len(layout.slots)


@pytest.mark.parametrize(
    ("given", "hosts", "memoryx", "swarmx"),
    [
        ({"wafers": 4}, 4, 4, 4),
        ({"wafers": 2}, 4, 2, 2),  # the other hosts have no wafer
        ({"wafers": 8}, 2, 2, 3),  # a tree over eight wafers has three nodes
        ({"wafers": 4, "memoryx": 1}, 4, 1, 4),
        ({"wafers": 4, "memoryx": 8, "swarmx": 1}, 4, 8, 1),
        ({"wafers": 4}, 1, 1, 1),
    ],
)
def test_each_host_has_a_shard_and_a_swarmx_node(given: dict[str, Any], hosts: int, memoryx: int, swarmx: int) -> None:
    roles = ClusterSettings(**given).over_hosts(hosts).roles
    assert (roles["memoryx"], roles["swarmx"]) == (memoryx, swarmx)


def test_it_is_said_which_bundle_waits_for_what() -> None:
    layout = lay_out(ROLES, parse_resources(["wafer.GPU=1"]))
    hosts = [{"Alive": True, "Resources": {"CPU": 8.0}}, {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}}]
    told = missing_resources(layout, hosts, {"CPU": 0.25}).splitlines()
    assert told[0] == "  1 x (1 wafer + 2 workers), each CPU 1.5, GPU 1: no host has so much"
    assert told[2] == "  1 x (1 memoryx), each CPU 0.5: too little CPU is free"
    assert told[3] == "  1 x (1 swarmx), each CPU 0.25"
    assert told[4] == "  free on 1 hosts together: CPU 0.25"


def test_credentials_are_not_printed_and_lie_where_their_user_alone_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "waferbox-ray-999999999-left").mkdir()
    credentials = Credentials(key=b"k" * 32, certificates={"node.pem": b"pem"})
    assert "kkk" not in repr(credentials)
    assert "pem" not in repr(credentials)
    folder, variables = credentials.lay_out()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert Path(variables["WAFERBOX_SECRET_FILE"]).read_bytes() == b"k" * 32
    assert variables["WAFERBOX_TLS_DIR"] == str(folder)


def test_a_runtime_environment_is_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "env.yaml"
    file.write_text("working_dir: .\n")
    assert read_runtime_env(file) == {"working_dir": "."}
    file.write_text("- pip\n")
    with pytest.raises(ValueError, match="has to be a mapping"):
        read_runtime_env(file)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--resource", "wafer.GPU=1"], "need --engine ray"),
        (["--engine", "ray", "--background"], "stays in the foreground"),
        (["--engine", "ray", "--resource", "wafer"], "must look like"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    refused = CliRunner().invoke(app, ["up", *options])
    assert refused.exit_code == 2
    assert reason in refused.output


def test_an_address_without_ray_is_an_error_that_says_what_to_do() -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from waferbox.launch.local_clusters import ClusterError
    from waferbox.ray_engine.launcher import RayLauncher
    from waferbox.ray_engine.settings import RaySettings

    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ClusterError, match=r"there is no Ray cluster at .* `ray start --head`"):
        RayLauncher(RaySettings(address=address))
