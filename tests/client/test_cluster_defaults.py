"""Files that environment variables name: defaults of the ClusterConfig, and the address of the user node."""

import json
from pathlib import Path
from typing import Any

import pytest

from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError


def test_defaults_come_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "defaults.yaml"
    file.write_text("num_csx: 3\njob_priority: p1\njob_labels: [team=a]\nmgmt_address: here:1\n")
    monkeypatch.setenv("CEREBRAS_WAFER_SCALE_CLUSTER_DEFAULTS", str(file))
    config = ClusterConfig(job_priority="p3")
    assert (config.num_csx, config.job_priority, config.job_labels, config.mgmt_address) == (
        3,
        "p3",
        ["team=a"],
        "here:1",
    )
    assert ClusterConfig.get_default("num_csx") == 3
    monkeypatch.delenv("CEREBRAS_WAFER_SCALE_CLUSTER_DEFAULTS")
    assert ClusterConfig().num_csx == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("number: 1", "has 'number', which is no field"),
        ("[1, 2]", "must have fields"),
        ("a: [", "is not YAML"),
        ("num_csx: 0", "num_csx must be at least 1"),
        (None, "cannot be read"),
    ],
)
def test_wrong_defaults_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    file = tmp_path / "defaults.yaml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("CEREBRAS_WAFER_SCALE_CLUSTER_DEFAULTS", str(file))
    with pytest.raises(ConfigurationError, match=message):
        ClusterConfig()


def user_node(namespaces: list[str], server: str = "cluster.example:443") -> dict[str, Any]:
    return {
        "currentContext": "second",
        "contexts": [{"name": "first", "cluster": "none"}, {"name": "second", "cluster": "mine"}],
        "clusters": [{"name": "mine", "server": server, "namespaces": [{"name": name} for name in namespaces]}],
    }


def test_the_address_comes_from_the_user_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAFERBOX_MANAGEMENT", raising=False)
    file = tmp_path / "config_v2"
    monkeypatch.setenv("CSCONFIG_PATH", str(file))
    file.write_text(json.dumps(user_node(["job-operator"])))
    assert ClusterConfig().named_management()[0] == "cluster.example:443"
    assert ClusterConfig(mgmt_address="here:1").named_management()[0] == "here:1"
    file.write_text(json.dumps(user_node(["one", "two"])))
    with pytest.raises(ConfigurationError, match=r"several namespaces: set mgmt_namespace to one of \['one', 'two'\]"):
        _ = ClusterConfig().named_management()
    assert ClusterConfig(mgmt_namespace="two").named_management()[0] == "cluster.example:443"
    with pytest.raises(ConfigurationError, match="no namespace 'three'"):
        _ = ClusterConfig(mgmt_namespace="three").named_management()
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", "there:2")
    assert ClusterConfig().named_management()[0] == "there:2"


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({**user_node([]), "currentContext": "third"})])
def test_a_wrong_user_node_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delenv("WAFERBOX_MANAGEMENT", raising=False)
    file = tmp_path / "config_v2"
    file.write_text(text)
    monkeypatch.setenv("CSCONFIG_PATH", str(file))
    with pytest.raises(ConfigurationError, match="has no cluster for its current context"):
        _ = ClusterConfig().named_management()
