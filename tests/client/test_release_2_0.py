"""cerebras_pytorch, releases 2.0 and 2.1, on the CPU and on a cluster that is a fake."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster, StartCluster
from summarized_steps import Writer, count, input_fn
from torch import nn

import cerebras_pytorch as cstorch
import cstorch as newest
from cstorch.errors import ConfigurationError, UsageError


@pytest.fixture
def cluster(start_cluster: StartCluster) -> FakeCluster:
    return start_cluster(count)


def executor(**settings: Any) -> Any:
    return cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=2, **settings)


def test_summaries_go_to_the_writer_of_the_executor_on_the_cpu(tmp_path: Path) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path, max_checkpoints=3)
    writer = Writer()

    @cstorch.trace  # type: ignore[untyped-decorator]  # the names of this release have no types
    def step(batch: torch.Tensor) -> None:
        cstorch.summarize_scalar("mean", batch.mean())
        cstorch.summarize_scalar("number", 7)
        cstorch.summarize_tensor("row", batch[0])

    for batch in executor(writer=writer):
        step(batch)
    assert writer.scalars == [("mean", 1.0, 1), ("number", 7.0, 1), ("mean", 3.0, 2), ("number", 7.0, 2)]
    assert writer.tensors == [("row", [1.0, 1.0], 1), ("row", [3.0, 3.0], 2)]
    for batch in executor():
        step(batch)  # without a writer nothing happens


def test_summaries_called_in_the_traced_step_are_written_after_every_step(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.backend("CSX", artifact_dir=tmp_path, log_initialization=False)
    model = nn.Linear(2, 1)
    compiled = cstorch.compile(model)
    writer = Writer()

    @cstorch.trace  # type: ignore[untyped-decorator]  # the names of this release have no types
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = compiled(batch).mean()
        cstorch.summarize_scalar("loss", loss)
        return loss * 2

    config = cstorch.utils.CSConfig(mgmt_address=cluster.address)
    for batch in executor(cs_config=config, writer=writer):
        step(batch)
    assert writer.scalars == [("loss", 1.0, 1), ("loss", 2.0, 2)]


def test_a_python_number_in_a_summary_is_refused_on_the_cluster(tmp_path: Path) -> None:
    cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    with pytest.raises(TypeError, match="Python float"):
        cstorch.summarize_scalar("rate", 0.5)


def test_the_cluster_is_that_of_the_first_executor(tmp_path: Path) -> None:
    backend = cstorch.backend("WSE", artifact_dir=tmp_path, validate_only=True)
    config = cstorch.utils.CSConfig(num_csx=2, job_labels=["who=me"], mount_dirs=None)
    with pytest.warns(UserWarning, match="validate_only"):
        executor(cs_config=config)
    assert backend.cluster_config == config.cluster_config()
    assert backend.cluster_config is not None
    assert (backend.cluster_config.num_csx, backend.cluster_config.num_workers_per_csx) == (2, 1)
    with pytest.warns(UserWarning, match="validate_only"), pytest.raises(UsageError, match="global: num_csx"):
        executor(cs_config=cstorch.utils.CSConfig(num_csx=4))


def test_cs_config_has_the_defaults_of_its_time() -> None:
    config = cstorch.utils.CSConfig()
    assert (config.num_csx, config.max_wgt_servers, config.max_act_per_csx) == (1, 24, 60)
    assert (config.num_workers_per_csx, config.transfer_processes) == (0, 5)
    assert config.cluster_config().max_wgt_servers == 0  # as the job's share: an embedded cluster makes no 24 of them
    assert cstorch.utils.CSConfig(max_wgt_servers=3).cluster_config().max_wgt_servers == 3
    cstorch.utils.CSConfig(precision_opt_level=2)
    assert newest.backends.csx.precision.optimization_level == 2
    newest.backends.reset()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"num_csx": 0}, ConfigurationError, "num_csx must be at least 1"),
        ({"num_workers_per_csx": -1}, ConfigurationError, "at least 0"),
        ({"transfer_processes": 0}, ConfigurationError, "at least 1"),
        ({"precision_opt_level": 3}, ConfigurationError, "must be one of 0, 1, 2"),
    ],
)
def test_a_cs_config_says_what_is_wrong(settings: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cstorch.utils.CSConfig(**settings)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_cpu_backend_takes_mixed_precision(tmp_path: Path, enabled: bool) -> None:
    cstorch.backend("CPU", artifact_dir=tmp_path, mixed_precision=enabled)
    assert cstorch.amp.mixed_precision() is enabled


def test_wrong_settings_of_a_backend_and_an_executor_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="drop_data must be True or False"):
        cstorch.backend("CSX", artifact_dir=tmp_path, drop_data=1)
    with pytest.raises(TypeError, match="colour"):
        cstorch.backend("CSX", artifact_dir=tmp_path, colour="red")
    with pytest.raises(UsageError, match="no backend yet"):
        cstorch.backend()
    cpu = cstorch.backend("CPU", artifact_dir=tmp_path, mixed_precision=True)
    assert cstorch.backend() is cstorch.backend("cpu") is cpu
    with pytest.raises(UsageError, match="CPU backend already"):
        cstorch.backend("CSX")
    with pytest.raises(TypeError, match="CSConfig"):
        executor(cs_config={"num_csx": 1})
    with pytest.raises(TypeError, match="rhythm"):
        executor(rhythm=1)


def test_all_metrics_at_once_and_half_types() -> None:
    accuracy = cstorch.metrics.AccuracyMetric("accuracy")
    accuracy(labels=torch.tensor([1, 2]), predictions=torch.tensor([1, 0]))
    assert cstorch.metrics.compute_all_metrics() == {"accuracy": 0.5}
    cstorch.amp.use_bfloat16(True)
    assert cstorch.amp.get_half_dtype() is torch.bfloat16
    cstorch.amp.use_bfloat16(False)
    assert cstorch.amp.get_half_dtype() is torch.float16
