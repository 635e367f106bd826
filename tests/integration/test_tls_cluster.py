"""A cluster that speaks TLS: jobs train on it, also over the lane between hosts; who has no certificate is told."""

from pathlib import Path

import pytest
from cluster_rig import StartCluster, StartScript
from typer.testing import CliRunner

from waferbox import settings
from waferbox.commands.cli import app
from waferbox.security.authority import issue
from waferbox.security.tls import AUTHORITY, CLIENT

TRAIN = Path(__file__).parents[2] / "examples" / "fc_digits" / "train.py"


@pytest.mark.cluster
def test_a_job_trains_over_tls(
    start_script: StartScript, start_cluster: StartCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, of_client = tmp_path / "tls", tmp_path / "client"
    issue(authority)
    of_client.mkdir()
    for name in (AUTHORITY, CLIENT):
        (of_client / name).write_bytes((authority / name).read_bytes())
    monkeypatch.setenv(settings.TLS_DIR.name, str(authority))  # for the questions that this process asks
    arguments = ("--num-csx", 1, "--num-steps", 20, "--model-dir", tmp_path / "model")
    with start_cluster(tmp_path / "cluster", variables={settings.TLS_DIR.name: str(authority)}) as cluster:
        variables = {"WAFERBOX_LANE": "grpc", settings.TLS_DIR.name: str(of_client)}
        script = start_script(TRAIN, *arguments, management=cluster.management, **variables)
        assert script.wait() == 0, script.errors
        plain = start_script(TRAIN, *arguments, management=cluster.management)
        assert plain.wait() == 1
        assert (
            f"if the cluster uses TLS, {settings.TLS_DIR.name} must name a folder with its certificates" in plain.errors
        )


def test_a_cluster_is_not_open_to_a_network_by_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    refused = CliRunner().invoke(app, ["up", "--listen", "0.0.0.0:0"])
    assert refused.exit_code == 1
    assert "add --tls, or --insecure" in refused.output
