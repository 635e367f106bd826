"""Other ways to Ray, on one host: through a client of it, and with an environment for hosts that lack something."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster_rig import RunningCluster, Surroundings, wait_for

from benchmarks.network import HERE

pytest.importorskip("ray", reason="Ray is not installed: pip install 'waferbox[ray]'")

from hosts_rig import MARKS, SECONDS, TRAINING, TRAINING_ARGUMENTS, UpOnRay, on_one_host
from ray_rig import free_port, ray_cluster

pytestmark = MARKS


@pytest.fixture(scope="module")
def addresses(surroundings: Surroundings) -> Iterator[tuple[str, str]]:
    """Of a Ray of one host, and of its server for clients."""
    port = free_port(HERE)
    with ray_cluster(surroundings, client_port=port) as address:
        yield address, f"ray://{HERE.address}:{port}"


def test_through_a_client_of_ray_a_killed_wafer_comes_back_too(
    surroundings: Surroundings, addresses: tuple[str, str], embedded: RunningCluster, tmp_path: Path
) -> None:
    with UpOnRay(surroundings, HERE, addresses[1], "client") as up:
        script = up.script(TRAINING, *TRAINING_ARGUMENTS)
        script.wait_for_output("20 ")
        os.kill(up.wafer(), signal.SIGKILL)
        (script.surroundings.folder / "go").touch()
        assert script.wait(SECONDS) == 0, f"{script.errors}\n{up.log()}"
        assert "Ray has started it again" in up.log()
    assert script.output == on_one_host(embedded, tmp_path, TRAINING, *TRAINING_ARGUMENTS).output
    wait_for(lambda: not roles(surroundings), explain=lambda: str(roles(surroundings)))


def test_what_a_runtime_environment_has_is_there_for_input_functions(
    surroundings: Surroundings, addresses: tuple[str, str], tmp_path: Path
) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "only_on_ray.py").write_text("VALUE = 1.5\n")
    file = tmp_path / "environment.yaml"
    file.write_text(yaml.safe_dump({"working_dir": str(modules), "env_vars": {"FACTOR_OF_RAY": "2"}}))
    with UpOnRay(surroundings, HERE, addresses[0], "environment", "--runtime-env", str(file)) as up:
        script = up.script(Path(__file__).parent / "of_ray.py")
        assert script.wait(SECONDS) == 0, f"{script.errors}\n{up.log()}"
    assert script.output.split() == ["12.0", "12.0"]


def roles(surroundings: Surroundings) -> list[list[str]]:
    """The command lines of role processes that live."""
    return [line for process in surroundings.processes() if "waferbox.launch.process" in (line := process.cmdline())]
