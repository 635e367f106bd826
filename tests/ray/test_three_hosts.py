"""Clusters on Ray over three hosts, in network namespaces: the results are those of the embedded cluster.

`make ray-test` says so by WAFERBOX_RAY_TEST: it takes minutes, so `make test` skips it.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_rig import RunningCluster, RunningScript, Surroundings

from benchmarks.network import Host

pytest.importorskip("ray", reason="Ray is not installed: pip install 'waferbox[ray]'")

from hosts_rig import MARKS, ON_SITE, SECONDS, SITE, TRAINING, TRAINING_ARGUMENTS, UpOnRay, on_one_host
from ray_rig import ray_cluster

pytestmark = MARKS

GPT = Path(__file__).parent / "gpt.py"
DIGITS = Path(__file__).parents[2] / "examples" / "fc_digits" / "train.py"
DIGITS_ARGUMENTS = ("--num-csx", "2", "--model-dir", "model")


@pytest.fixture(scope="module")
def ray_address(surroundings: Surroundings, three_hosts: list[Host]) -> Iterator[str]:
    with ray_cluster(surroundings, three_hosts, SITE) as address:
        yield address


def progress(script: RunningScript) -> list[str]:
    """What it said of its losses and its accuracy, without times and rates."""
    return re.findall(r"(?:Step=\d+, Loss=|held-out digits: )[\d.]+", script.errors)


def test_digits_and_a_gpt_train_by_tls_to_the_digit(
    surroundings: Surroundings, three_hosts: list[Host], ray_address: str, embedded: RunningCluster, tmp_path: Path
) -> None:
    first, *others = three_hosts
    with UpOnRay(surroundings, first, ray_address, "tls", "--tls", *ON_SITE) as up:
        assert "WAFERBOX_TLS_DIR" in up.variables()
        assert up.hosts_of_wafers() == {host.address for host in others}
        digits = up.script(DIGITS, *DIGITS_ARGUMENTS)
        assert digits.wait(SECONDS) == 0, f"{digits.errors}\n{up.log()}"
        gpt = up.script(GPT)
        assert gpt.wait(SECONDS) == 0, f"{gpt.errors}\n{up.log()}"
    assert len(progress(digits)) == 400 / 50 + 5 + 1
    assert progress(digits) == progress(on_one_host(embedded, tmp_path, DIGITS, *DIGITS_ARGUMENTS))
    assert len(gpt.output.split()) == 12
    assert gpt.output == on_one_host(embedded, tmp_path, GPT).output


def test_two_clusters_are_on_one_ray_at_once(
    surroundings: Surroundings, three_hosts: list[Host], ray_address: str, embedded: RunningCluster, tmp_path: Path
) -> None:
    with (
        UpOnRay(surroundings, three_hosts[0], ray_address, "ada", "--insecure") as ada,
        UpOnRay(surroundings, three_hosts[1], ray_address, "bob", "--insecure") as bob,
    ):
        scripts = [up.script(TRAINING, *TRAINING_ARGUMENTS) for up in (ada, bob)]
        for each in scripts:
            (each.surroundings.folder / "go").touch()
            assert each.wait(SECONDS) == 0, each.errors
    undisturbed = on_one_host(embedded, tmp_path, TRAINING, *TRAINING_ARGUMENTS)
    assert [each.output for each in scripts] == [undisturbed.output] * 2
