"""What scripts take from cerebras.appliance does what they take it for."""

import logging
import os
from pathlib import Path

import cloudpickle
import h5py
import pytest
import torch
from cerebras.appliance.appliance_manager import TensorGroup, TensorSendPayload
from cerebras.appliance.cluster.client import TelemetryClient
from cerebras.appliance.cluster_client import VolumeMount
from cerebras.appliance.cs_run_config import CSRunConfig
from cerebras.appliance.CSConfig import CSConfig
from cerebras.appliance.environment import appliance_environ
from cerebras.appliance.pb.workflow.appliance.common.common_config_pb2 import ExecutionStrategy
from cerebras.appliance.storage import (
    H5Reader,
    H5Writer,
    S3Reader,
    S3Writer,
    StorageDeleter,
    StorageReader,
    StorageWriter,
)
from cerebras.appliance.storage.s3_storage import S3Deleter
from cerebras.appliance.utils.file import create_symlink
from cerebras.appliance.utils.units import bytes_to_human, convert_byte_unit

import cstorch
import waferbox
from cerebras.appliance import log
from cstorch import backends
from cstorch.errors import ConfigurationError, UsageError
from cstorch.utils.data import DataLoader


def test_a_logger_is_named_by_a_decorator() -> None:
    @log.named_class_logger("Trainer")
    class Named(log.ClassLogger):
        pass

    @log.named_class_logger
    class Plain:
        pass

    @log.named_class_logger()
    class Called:
        pass

    assert Named.logger.name == Named().logger.name == "cerebras.Trainer"
    assert Plain.logger.name.endswith("Plain")  # type: ignore[attr-defined]
    assert Called.logger.name.endswith("Called")  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="class or has a name"):
        log.named_class_logger(3)


def test_two_more_levels_have_names_and_methods(caplog: pytest.LogCaptureFixture) -> None:
    assert log.get_level_name("verbose") == log.VERBOSE == 15
    assert log.get_level_name(log.TRACE) == "TRACE"
    assert log.get_level_name("info") == logging.INFO

    class Mine(log.ClassLogger):
        pass

    with caplog.at_level(log.VERBOSE, logger=Mine.logger.name):
        Mine.logger.verbose("said %s", 1)
        Mine.logger.trace("not said")
    (record,) = caplog.records
    assert (record.levelname, record.getMessage(), record.filename) == ("VERBOSE", "said 1", Path(__file__).name)


def test_levels_of_servers_are_collected() -> None:
    log.wsc_logger.getChild("sampled").setLevel("DEBUG")
    log.wsc_logger.setLevel(log.TRACE)
    try:
        settings = log.collect_wsc_log_settings()
    finally:
        log.wsc_logger.setLevel(logging.NOTSET)
        log.wsc_logger.getChild("sampled").setLevel(logging.NOTSET)
    assert [(setting.tag, setting.level) for setting in settings] == [(None, log.TRACE), ("sampled", logging.DEBUG)]
    assert log.collect_wsc_log_settings() == []


def test_variables_reach_the_workers_before_what_they_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLED_VARIABLE", "before")
    appliance_environ["SAMPLED_VARIABLE"] = "1"
    try:
        assert os.environ["SAMPLED_VARIABLE"] == appliance_environ["SAMPLED_VARIABLE"] == "1"
        assert appliance_environ.copy() == {"SAMPLED_VARIABLE": "1"}
        assert appliance_environ.setdefault("SAMPLED_VARIABLE", "2") == "1"
        builder = DataLoader(list).builder()
        os.environ["SAMPLED_VARIABLE"] = "of the worker"
        recipe = cloudpickle.loads(builder)
        assert os.environ["SAMPLED_VARIABLE"] == "1"
        assert next(iter(recipe)) == "environment"
    finally:
        del appliance_environ["SAMPLED_VARIABLE"]
    assert "SAMPLED_VARIABLE" not in os.environ
    assert "environment" not in cloudpickle.loads(DataLoader(list).builder())


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "0.0B"), (1023, "1023.0B"), (1536, "1.5KiB"), (3 << 40, "3.0TiB"), (5 << 60, "5120.0PiB")]
)
def test_bytes_for_people(amount: int, text: str) -> None:
    assert bytes_to_human(amount) == text


def test_units_of_bytes() -> None:
    assert bytes_to_human(1500, fmt="{value:.2f} {unit}", log_base=10) == "1.50 KB"
    assert convert_byte_unit(10, "B", src_unit="GB") == 10_000_000_000
    assert convert_byte_unit(1 << 30, "GiB") == 1
    assert convert_byte_unit(1536, "KiB", precision=1) == 1.5
    for wrong in ({"src_unit": "XB"}, {"precision": -1}):
        with pytest.raises(ValueError, match=r"unit|precision"):
            convert_byte_unit(1, "B", **wrong)
    with pytest.raises(ValueError, match="log_base"):
        bytes_to_human(1, log_base=3)


def test_a_link_takes_the_place_of_the_former(tmp_path: Path) -> None:
    for target in ("first", "second"):
        (tmp_path / target).mkdir()
        create_symlink(tmp_path / "latest", Path(target), target_is_directory=True)
    assert (tmp_path / "latest").readlink() == Path("second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "second"]
    with pytest.raises(OSError, match="directory"):
        create_symlink(tmp_path / "first", "second")
    assert len(list(tmp_path.iterdir())) == 3


def test_storage_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.mdl"
    assert StorageWriter.is_valid_path(path)
    assert not StorageWriter.path_exists(path)
    assert not StorageReader.path_exists(path)
    cstorch.save({"a": torch.ones(3)}, path)
    assert StorageReader.path_exists(path)
    assert StorageReader.get_type(str(path)) is H5Reader
    reader = StorageReader.get(path)
    assert isinstance(reader, H5Reader)
    assert reader.exists()
    assert reader.fstat.st_size == path.stat().st_size
    assert reader.stats.st_mtime == path.stat().st_mtime
    assert reader.global_metadata[cstorch.storage.constants.__CSTORCH_VERSION__] == waferbox.__version__
    assert reader.read("a")[0].tolist() == [1, 1, 1]
    with pytest.raises(FileExistsError, match="never overwritten"):
        StorageWriter.get(path)
    deleter = StorageDeleter.get(path)
    with pytest.raises(UsageError, match="only the whole file"):
        deleter.delete("a")
    assert deleter.delete()
    assert not StorageDeleter.path_exists(path)
    assert not deleter.delete()


def test_what_is_no_checkpoint_has_no_reader(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        H5Reader(tmp_path / "absent")
    (tmp_path / "text").write_text("text")
    with pytest.raises(ValueError, match="no H5 file"):
        H5Reader(tmp_path / "text")
    with pytest.raises(UsageError, match=r"cstorch\.save"):
        H5Writer(tmp_path / "new")


def test_no_path_is_of_s3() -> None:
    path = "s3://bucket/checkpoint"
    for kind in (S3Reader, S3Writer, S3Deleter, StorageReader, StorageWriter, StorageDeleter, H5Writer):
        assert not kind.is_valid_path(path)
    assert not S3Reader.path_exists(path)
    with pytest.raises(ValueError, match="a checkpoint is a file"):
        StorageReader.get(path)
    with pytest.raises(UsageError, match="not in S3"):
        S3Writer(path)


def test_a_storage_of_the_script_is_found(tmp_path: Path) -> None:
    class Mine(StorageDeleter):
        @classmethod
        def is_valid_path(cls, path: str | os.PathLike[str]) -> bool:
            return str(path).startswith("mine://")

        @classmethod
        def path_exists(cls, path: str | os.PathLike[str]) -> bool:
            return True

        def delete(self, key: str | None = None) -> bool:
            return True

    assert StorageDeleter.get_type("mine://x") is Mine
    assert StorageDeleter.path_exists("mine://x")


def test_none_means_the_default_of_a_setting() -> None:
    config = CSConfig(num_csx=None, max_wgt_servers=None, mount_dirs=None, execution_strategy=None)
    assert config == CSConfig()
    assert config.cluster_config().num_csx == 1


def test_the_strategy_sets_the_flag() -> None:
    flags = backends.csx.performance
    for strategy, name in (
        (ExecutionStrategy.ES_PIPELINE, "pipeline"),
        (ExecutionStrategy.ES_WEIGHT_STREAMING, "weight_streaming"),
        ("pipeline", "pipeline"),
        ("weight_streaming", "weight_streaming"),
    ):
        CSConfig(execution_strategy=strategy)
        assert flags.execution_strategy == name
        CSConfig()  # leaves it
        assert flags.execution_strategy == name
    for wrong in ("pipelined", 7):
        with pytest.raises(ConfigurationError, match="must be weight_streaming or pipeline, got"):
            CSConfig(execution_strategy=wrong)


def test_volumes_are_folders_to_mount(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    volume = VolumeMount(name="data", mount_path=str(tmp_path))
    config = CSConfig(volume_mounts=[volume], mount_dirs=[str(tmp_path / "more")])
    assert config.cluster_config().mount_dirs == [str(tmp_path / "more"), str(tmp_path)]


def test_figures_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    client = TelemetryClient(None, max_buffer_size=2, max_buffer_seconds=1)
    with caplog.at_level(logging.DEBUG, logger="cstorch"):
        client.push({"before": 1})
        with client:
            client.push({"loss": 1.5}, labels={"step": "3"})
    assert caplog.messages == ["Figures {'loss': 1.5}, labels {'step': '3'}"]


def test_groups_of_weights_and_a_configuration_of_another_framework() -> None:
    payload = TensorSendPayload(fw_name="weight", tensor=torch.ones(1))
    group = TensorGroup(tensors=[payload], closure=lambda tensors: tensors[0].tensor.zero_())
    assert group.closure is not None
    group.closure(group.tensors)
    assert payload.tensor.item() == 0
    with pytest.raises(UsageError, match="TensorFlow"):
        CSRunConfig(cs_config=CSConfig())


def test_the_version_is_in_the_file(tmp_path: Path) -> None:
    cstorch.save({"a": 1}, tmp_path / "checkpoint")
    with h5py.File(tmp_path / "checkpoint") as file:
        assert cstorch.storage.constants.__VERSION__ in file.attrs
