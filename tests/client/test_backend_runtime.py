"""The backend, compile, ClusterConfig, and the CPU backend's loop."""

from pathlib import Path

import pytest
import torch
from torch import nn

import cstorch
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.errors import ConfigurationError, UsageError


def test_there_is_one_backend_per_process(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no backend yet"):
        cstorch.backend()
    cpu = cstorch.backend("cpu", artifact_dir=tmp_path)
    assert cstorch.backend() is cpu
    assert cstorch.backend("CPU") is cpu
    with pytest.raises(UsageError, match="has a CPU backend already"):
        cstorch.backend("CSX")
    with pytest.raises(ConfigurationError, match="unknown backend 'TPU'"):
        cstorch.backend("TPU")


def test_cpu_device_is_plain(tmp_path: Path) -> None:
    backend = cstorch.backend("CPU", artifact_dir=tmp_path)
    with backend.device:
        model = nn.Linear(2, 2)
    assert model.weight.device.type == "cpu"
    assert cstorch.current_torch_device() == torch.device("cpu")
    assert not cstorch.use_cs()


def test_csx_device_makes_device_tensors(tmp_path: Path) -> None:
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    with backend.device, backend.device:
        model = nn.Linear(2, 2)
    assert model.weight.device.type == "lazy"
    assert cstorch.use_cs()
    assert cstorch.zeros_like(torch.ones(3)).device.type == "lazy"


def test_device_restores_after_an_error(tmp_path: Path) -> None:
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    with pytest.raises(ZeroDivisionError), backend.device:
        _ = 1 / 0
    assert torch.zeros(1).device.type == "cpu"


def test_compile_moves_and_delegates(tmp_path: Path) -> None:
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    model = nn.Linear(2, 3)
    weight = model.weight
    compiled = cstorch.compile(model, backend)
    assert model.weight is weight
    assert weight.device.type == "lazy"
    assert dict(compiled.named_parameters())["weight"] is weight
    compiled.eval()
    assert not model.training
    compiled.tag = "x"
    assert model.tag == "x"
    with pytest.raises(UsageError, match="assign"):
        compiled.load_state_dict(model.state_dict(), assign=True)
    assert cstorch.compile(compiled) is compiled  # type: ignore[arg-type]  # scripts may do so


def test_compile_refuses_what_is_no_module_and_another_backend(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    with pytest.raises(TypeError, match="int"):
        cstorch.compile(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        cstorch.compile(nn.Linear(1, 1), "CSX")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_csx": 0}, "num_csx must be at least 1"),
        ({"num_csx": 1025}, "num_csx must be at most 1024"),
        ({"num_workers_per_csx": -1}, "num_workers_per_csx"),
        ({"num_workers_per_csx": 257}, "num_workers_per_csx must be at most 256"),
        ({"run_ahead_steps": 2**70}, "run_ahead_steps must be at most 65536"),
        ({"max_wgt_servers": 2**32}, "max_wgt_servers must be at most 4294967295"),
        ({"job_time_sec": 2**32}, "job_time_sec must be at most 4294967295"),
        ({"max_wgt_servers": -1}, "max_wgt_servers"),
        ({"mgmt_address": "no where"}, "host:port"),
        ({"mgmt_address": "host:99999"}, "host:port"),
        ({"job_labels": ["no equal sign"]}, "key=value"),
        ({"job_priority": "p9"}, "p1, p2 or p3"),
        ({"mount_dirs": ["/no/such/folder"]}, "/no/such/folder"),
        ({"lane": "pigeon"}, "lane must be one of"),
    ],
)
def test_cluster_config_says_what_is_wrong(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ClusterConfig(**settings)  # type: ignore[arg-type]


def test_management_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WAFERBOX_MANAGEMENT", raising=False)
    assert ClusterConfig().named_management()[0] == ""
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", "somewhere:1234")
    assert ClusterConfig().named_management()[0] == "somewhere:1234"
    assert ClusterConfig(mgmt_address="here:1").named_management()[0] == "here:1"
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", "bro ken")
    with pytest.raises(ConfigurationError, match="WAFERBOX_MANAGEMENT"):
        _ = ClusterConfig().named_management()


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAFERBOX_LANE", "grpc")
    monkeypatch.setenv("WAFERBOX_RUN_AHEAD_STEPS", "3")
    config = ClusterConfig()
    assert (config.lane, config.run_ahead_steps) == ("grpc", 3)
    assert ClusterConfig.get_default("num_csx") == 1
