"""cerebras.pytorch as release 2.2 has it, whose executors name the cluster."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster
from summarized_steps import Writer, count, input_fn
from torch import nn

import cerebras.pytorch as cstorch
from cstorch.errors import UsageError


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(count)


def executor(**settings: Any) -> Any:
    return cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=2, **settings)


@pytest.mark.parametrize("retrace", [True, False])
def test_a_script_of_2_2_runs_on_the_cluster_that_its_executor_names(
    cluster: FakeCluster, tmp_path: Path, retrace: bool
) -> None:
    settings: dict[str, Any] = {"artifact_dir": tmp_path, "compile_dir": None, "retrace_every_iteration": retrace}
    backend = cstorch.backend("CSX", **settings)
    assert cstorch.backends.csx.debug.retrace_every_iteration is retrace
    backend.device.config.drop_data = True
    assert cstorch.backends.csx.debug.drop_data
    model = cstorch.compile(nn.Linear(2, 1), backend)
    writer = Writer()

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).mean()
        cstorch.summarize_scalar("loss", loss)
        return loss * 2

    config = cstorch.utils.CSConfig(mgmt_address=cluster.address, num_csx=2)
    with cstorch.profiler.profile(schedule=cstorch.profiler.schedule(start_step=-1, end_step=-1)) as profile:
        for batch in executor(cs_config=config, writer=writer, listeners=[], micro_batch_size=2):
            step(batch)
    assert profile.op_profiler_json is None
    assert writer.scalars == [("loss", 1.0, 1), ("loss", 2.0, 2)]
    assert [request.num_csx for request in cluster.created] == [2]
    assert cstorch.backends.csx.performance.micro_batch_size == 2
    with pytest.raises(UsageError, match="global: num_csx"):
        executor(cs_config=cstorch.utils.CSConfig(mgmt_address=cluster.address))


def test_a_backend_that_was_given_a_cluster_keeps_it(tmp_path: Path) -> None:
    config = cstorch.utils.CSConfig(num_csx=2)
    cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True, cluster_config=config.cluster_config())
    with pytest.warns(UserWarning, match="validate_only"):
        executor(cs_config=config)
    with pytest.warns(UserWarning, match="validate_only"), pytest.raises(UsageError, match="or what the backend was"):
        executor(cs_config=cstorch.utils.CSConfig(num_csx=4))


def test_the_precision_may_be_set_after_the_cs_config_is_made(tmp_path: Path) -> None:
    cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    config = cstorch.utils.CSConfig()
    config.precision_opt_level = 2
    with pytest.warns(UserWarning, match="validate_only"):
        executor(cs_config=config, micro_batch_size="disable")
    assert cstorch.backends.csx.precision.optimization_level == 2
    assert cstorch.backends.csx.performance.micro_batch_size is None


def test_on_the_cpu_the_settings_are_taken(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path, mixed_precision=True)
    with pytest.raises(TypeError, match="CSConfig"):
        executor(cs_config={"num_csx": 1})
    assert len(list(executor(cs_config=cstorch.utils.CSConfig(num_csx=2), micro_batch_size="auto"))) == 2


@pytest.mark.parametrize("given", [None, 0, 2])
def test_the_executor_tells_the_precision_level_in_effect(tmp_path: Path, given: int | None) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path)
    cstorch.backends.csx.precision.optimization_level = 1
    config = cstorch.utils.CSConfig(num_csx=3)
    config.precision_opt_level = given  # scripts set it afterwards
    loop = executor(cs_config=config)
    for _ in loop:
        running = cstorch.current_executor()
        assert running.cs_config.num_csx == 3  # type: ignore[attr-defined]
    assert config.precision_opt_level is given
    cstorch.backends.csx.precision.optimization_level = 2
    assert loop.cs_config.precision_opt_level == 2


def test_an_executor_that_names_no_cluster_has_that_of_the_backend(tmp_path: Path) -> None:
    cluster = cstorch.distributed.ClusterConfig(num_csx=2, num_workers_per_csx=3, job_labels=["a=b"])
    cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True, cluster_config=cluster)
    with pytest.warns(UserWarning, match="validate_only"):
        config = executor().cs_config
    assert (config.num_csx, config.num_workers_per_csx, config.job_labels) == (2, 3, ["a=b"])
    assert config.precision_opt_level == 1
    assert config.cluster_config() == cluster
