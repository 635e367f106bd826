"""Small names of the client that scripts import: each does what it can, and says when it is called what it cannot."""

import dataclasses
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cerebras.framework.torch.core import cb_model, modes
from cerebras.pytorch.backend import get_backend_args
from cerebras.pytorch.backend.ltc_backend import register_after_tensor_to_cpu
from cerebras.pytorch.lib import cerebras_pytorch_lib
from cerebras.pytorch.utils.call_once import call_once
from cerebras.pytorch.utils.kernel import kernel_annotater
from cerebras.pytorch.utils.num_kv_groups import groups_annotater
from cerebras_pytorch.saver import CerebrasStateDict, CheckpointReader, PyTorchH5Saver
from fake_cluster import StartCluster, State
from packaging.version import Version
from torch import nn
from torch.utils import _pytree as pytree

import cerebras.pytorch as cstorch
import cerebras_pytorch as older
import waferbox
from cerebras.framework.torch import amp as oldest_amp
from cerebras.pytorch.experimental.listener import create_listener, register_traced_tensor_hook
from cerebras_pytorch.workflow.python.cs_perf_analyzer import AssessBottlenecks, locate_csperf_log
from cstorch.errors import ConfigurationError, UsageError


@pytest.mark.parametrize(("module", "release"), [(cstorch, (2, 10)), (older, (2, 1))])
def test_the_version_is_that_of_a_release_of_the_api(module: Any, release: tuple[int, int]) -> None:
    """The Zoo compares it with that of a checkpoint, unless that has a local part."""
    version = Version(module.__version__)
    assert (version.major, version.minor) == release
    assert version.local == f"waferbox.{waferbox.__version__}"


def test_annotations_change_nothing() -> None:
    for decorate in (kernel_annotater("FLASH"), kernel_annotater(None), groups_annotater(4), groups_annotater()):
        assert decorate(torch.matmul) is torch.matmul
    with pytest.raises(TypeError, match="kernel"):
        kernel_annotater(3)
    with pytest.raises(TypeError, match="num_kv_groups"):
        groups_annotater("4")
    cerebras_pytorch_lib.set_attribute(torch.ones(1), "cs.internal", {"a": 1})
    assert not cstorch._generating_docs  # type: ignore[attr-defined]  # not for scripts


def test_a_function_is_called_once() -> None:
    calls: list[int] = []
    repeated: list[int] = []

    @call_once(lambda: repeated.append(1))  # type: ignore[untyped-decorator]  # the names of this release have no types
    def add(value: int) -> int:
        if value < 0:
            raise ValueError("negative")
        calls.append(value)
        return value

    with pytest.raises(ValueError, match="negative"):
        add(-1)
    assert [add(1), add(2), add(3)] == [1, 1, 1]
    assert calls == [1]
    assert len(repeated) == 2


def test_a_function_is_called_once_by_many_threads() -> None:
    calls: list[int] = []
    together = threading.Barrier(4)

    @call_once()  # type: ignore[untyped-decorator]  # the names of this release have no types
    def note() -> int:
        calls.append(1)
        return len(calls)

    def run() -> int:
        together.wait(timeout=60)
        return note()

    with ThreadPoolExecutor(4) as pool:
        results = [future.result() for future in [pool.submit(run) for _ in range(4)]]
    assert results == [1, 1, 1, 1]
    assert calls == [1]


def test_the_parameters_of_a_backend() -> None:
    assert "artifact_dir" in get_backend_args("cpu")
    assert "cluster_config" not in get_backend_args("CPU")
    assert "cluster_config" in get_backend_args("CSX")
    assert get_backend_args("CSX")["compile_only"].default is False
    with pytest.raises(ConfigurationError):
        get_backend_args("TPU")


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(batch))
        return result


class Writer:
    """Takes what a summary writer takes."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Size]] = []

    def add_tensor(self, name: str, tensor: torch.Tensor, step: int) -> None:
        self.tensors.append((name, tensor.shape))


def run_on_the_cpu(writer: Any = None) -> None:
    older.backend("CPU")
    model = older.compile(Network())

    @older.trace  # type: ignore[untyped-decorator]  # the names of this release have no types
    def step(batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(batch)
        return result

    loader = older.utils.data.DataLoader(lambda: [torch.ones(4, 2)])
    for batch in older.utils.data.DataExecutor(loader, num_steps=1, writer=writer):
        step(batch)


def test_a_hook_hears_what_modules_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heard: list[tuple[str, tuple[int, ...]]] = []
    handle = register_traced_tensor_hook(lambda tensor, name: heard.append((name, tuple(tensor.shape))))
    try:
        Network()(torch.ones(1, 2))  # no step
        run_on_the_cpu()
    finally:
        handle.remove()
    assert {name for name, _ in heard} >= {"model.first", "model.second"}
    assert ("model.first", (4, 3)) in heard
    count = len(heard)
    Network()(torch.ones(1, 2))
    assert len(heard) == count


def test_a_listener_summarises_what_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = Writer()
    listener = create_listener(listener_type="summary", listener_name="mine", tensor_names=["*second"])
    try:
        run_on_the_cpu(writer)
    finally:
        listener.handle.remove()
    assert writer.tensors == [("mine/model.second", torch.Size([4, 1]))]
    with pytest.raises(ConfigurationError, match="'summary'"):
        create_listener(listener_type="other")


def test_a_hook_hears_what_arrives_from_the_cluster(
    start_cluster: StartCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def count(state: State, step: int) -> dict[str, torch.Tensor]:
        return {"output_values_0": torch.tensor(float(step))}

    address = start_cluster(count).address
    cstorch.backend("CSX", cluster_config=cstorch.distributed.ClusterConfig(mgmt_address=address))
    arrived: list[tuple[str, float]] = []
    handle = register_after_tensor_to_cpu(lambda tensor, name: arrived.append((name, float(tensor))))

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        return batch.sum()

    loader = cstorch.utils.data.DataLoader(lambda: [torch.ones(4, 2)] * 2)
    for index, batch in enumerate(cstorch.utils.data.DataExecutor(loader, num_steps=2)):
        step(batch)
        if index == 1:
            handle.remove()
    assert arrived == [("output_values_0", 1.0)]


def test_what_needs_a_loop_on_the_wafer_says_so() -> None:
    tensor = torch.ones(2, 3, dtype=torch.int32)
    calls: list[Callable[[], object]] = [
        lambda: cstorch.experimental.start_implicit_loop(input_tensor=tensor, loop_dim=1),
        lambda: cstorch.experimental.get_loop_iteration_slice(tensor, tensor),
        lambda: cstorch.experimental.update_implicit_loop(tensor, tensor, tensor, tensor, 0, max_tokens=3),
        lambda: older.experimental.run_implicit_autoregressive_loop(
            input_tensor=tensor, output_tensor=tensor, loop_dim=1, start_token=0, stop_token=1, max_tokens=2
        ),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="loop on the wafer"):
            call()
    with pytest.raises(UsageError, match="mx8"):
        cstorch.experimental.Compression("mx8", "*weight")
    for function in (cstorch.cirh.FusedTopK, cstorch.cirh.FusedTopP):
        with pytest.raises(UsageError, match=r"use torch\."):
            function(tensor, k=1, dimension=1)


def test_the_profiler_of_operations_says_that_it_measures_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = tmp_path / "trace.json"
    for start, lines in ((-1, 0), (3, 1)):
        schedule = cstorch.profiler.schedule(start_step=start, end_step=start)
        with cstorch.profiler.profile(schedule=schedule, host_activities=["ACT0"]) as profiler:
            pass
        profiler.export_chrome_trace(trace)
        assert profiler.appliance_response is None
        assert profiler.get_summary() == ""
        assert len(caplog.messages) == lines
    assert not trace.exists()


def test_switches_of_checkpoints(tmp_path: Path) -> None:
    for switch, default in (
        (cstorch.storage.serializers.use_external_link, False),
        (cstorch.storage.serializers.cache_deferred_tensors, True),
    ):
        with switch(not default):
            assert bool(switch) is not default
            cstorch.save({"a": torch.ones(2)}, tmp_path / f"{default}")
        assert bool(switch) is default
        assert cstorch.load(tmp_path / f"{default}")["a"].tolist() == [1, 1]


def test_checkpoints_of_release_1_9(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    PyTorchH5Saver(loaded_checkpoint=None).save(path, {"model": {"w": torch.ones(2)}, "step": 3})
    reader = CheckpointReader(path)
    assert reader.tensor_names == ["model.w", "step"]
    assert reader["step"] == 3
    tree = CerebrasStateDict.create(reader.spec, path)
    assert isinstance(tree, dict)
    assert tree["model"]["w"].tolist() == [1, 1]


def test_modes() -> None:
    assert modes is cstorch.core.modes
    assert older.core.modes is modes
    assert modes.get_modes() == ("train", "eval", "train_and_eval", "inference", "eval_all")
    assert modes.is_valid(modes.EVAL_ALL)


def test_the_loss_among_outputs() -> None:
    class Outputs:
        loss = 3

    tensor = torch.ones(1)
    for outputs, loss in ((tensor, tensor), ((1, 2), 1), ([1], 1), (Outputs(), 3)):
        assert older.utils.extract_loss(outputs) is loss
    with pytest.raises(TypeError, match="returns its loss"):
        older.utils.extract_loss(())


def test_half_types_of_old_scripts() -> None:
    for amp in (older.amp, oldest_amp, older.experimental.amp):
        amp.use_bfloat16(True)
        assert cstorch.amp.get_half_dtype() == torch.bfloat16
        amp.use_bfloat16(False)
        assert oldest_amp._amp_state.half_dtype == torch.float16


def test_the_oldest_names_are_those_of_the_session() -> None:
    assert older.core.cb_model is cb_model
    assert older.Session.__module__ == "cerebras_torch.session"
    assert older.experimental.configure is not None
    assert cb_model._extract_tracker_details.__doc__
    assert older.utils.utils.is_ltc_mlir_mode_enabled()
    assert not hasattr(cstorch.utils.utils, "is_ltc_mlir_mode_enabled")
    older.enable_debug_name_scope()
    cb_model.set_rng_state(7)
    first = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(1))


def test_the_log_of_release_1_6_is_not_there() -> None:
    assert locate_csperf_log("model_dir") is None  # type: ignore[func-returns-value]
    with pytest.raises(UsageError, match="compile-report"):
        AssessBottlenecks("file")


def test_padding_is_computed() -> None:
    tensor, mask = torch.ones(2, 3), torch.zeros(2, 3)
    assert older.nn.StripPadding()(tensor, mask) is tensor


def test_parameters_of_the_micro_batch_have_a_type() -> None:
    from cerebras.pytorch.utils.data.data_executor import DataExecutor, MbsSetting

    assert DataExecutor is cstorch.utils.data.DataExecutor
    assert inspect.isclass(type(MbsSetting))


def test_a_tree_spec_is_changed_as_in_older_versions_of_torch() -> None:
    leaves, spec = pytree.tree_flatten({"a": (1, 2)})
    (pair,) = spec.children()
    replace: Callable[..., Any] = dataclasses.replace
    listed = replace(pair, type=list, children_specs=[*pair.children()])
    changed = replace(spec, type=dict, children_specs=[listed])
    assert pytree.tree_unflatten(leaves, changed) == {"a": [1, 2]}
    assert pytree.tree_flatten({"a": [1, 2]})[1] == changed
