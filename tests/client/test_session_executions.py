"""Executions on a cluster that is a fake, over real gRPC."""

import logging
import re
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cluster import FakeCluster, until
from halved_weight import NAMES, Setup, run
from torch.utils import _pytree as pytree

import cstorch
from cstorch.errors import InputError, StateError, TraceError
from cstorch.utils.data import DataExecutor, DataLoader, Schedule
from cstorch.utils.tracker import RateTracker
from wsc.v1 import coordinator_pb2


def test_closures_see_the_values_of_their_step_in_order(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    seen: list[tuple[int, float, int]] = []

    @cstorch.step_closure
    def report(loss: torch.Tensor, number: int, more: dict[str, torch.Tensor]) -> None:
        assert loss.device.type == "cpu"
        assert torch.equal(loss, more["again"])
        seen.append((number, loss.item(), executor.user_iteration))

    executor = setup.executor(5)
    losses = []
    batches = []
    for batch in executor:
        loss = setup.step(batch)
        assert report(loss, executor.user_iteration, {"again": loss}) is None
        losses.append(loss)
        batches.append(batch)
    assert seen == [(number, float(number), number) for number in range(1, 6)]
    assert setup.traces == 1
    assert [loss.item() for loss in losses] == [1.0, 2.0, 3.0, 4.0, 5.0]  # known when their steps have run
    assert all(type(batch) is type(batches[0]) for batch in batches)
    assert [name for name, _, _ in cluster.compiled[0]["outputs"]] == ["output_loss"]
    assert cluster.begun[0].num_steps == 5
    assert (executor.artifact_dir / "cirh.mlir").exists()
    assert cluster.prepared[0].loader == cluster.begun[0].loader
    assert executor.profiler.total_samples() == 20


def test_rates_are_by_the_clock_of_the_cluster(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.step_seconds = 2.0
    setup = Setup(cluster, tmp_path)
    rates = []

    @cstorch.step_closure
    def report() -> None:
        rates.append((executor.profiler.rate(), executor.profiler.global_rate()))

    executor = setup.executor(4)
    for batch in executor:
        setup.step(batch)
        report()
    assert rates == [(2.0, 2.0)] * 4
    assert executor.profiler.total_time() == 8.0


def test_rates_of_a_script_are_by_that_clock_too(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.step_seconds = 2.0
    setup = Setup(cluster, tmp_path)
    own = RateTracker(smooth_factor=0)
    rates = []

    @cstorch.step_closure
    def report() -> None:
        own.add(10)
        rates.append(own.rate())

    executor = setup.executor(4)
    for batch in executor:
        setup.step(batch)
        report()
    assert rates[1:] == pytest.approx([5.0] * 3)


def test_closures_called_in_the_step_run_every_step_with_frozen_python_values(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    setup = Setup(cluster, tmp_path)
    seen: list[tuple[str, int, float]] = []
    executor = setup.executor(3)

    @cstorch.step_closure
    def inside(number: int, doubled: torch.Tensor) -> None:
        seen.append(("inside", number, doubled.item()))

    @cstorch.step_closure
    def outside(number: int, loss: torch.Tensor) -> None:
        seen.append(("outside", number, loss.item()))

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = setup.compiled(batch).mean()
        inside(executor.user_iteration, loss * 2)
        return loss

    cluster.step = lambda state, step: {
        "output_doubled": torch.tensor(2.0 * step),
        "output_loss": torch.tensor(step * 1.0),
    }
    for batch in executor:
        outside(executor.user_iteration, step(batch))
    assert seen == [
        ("inside", 1, 2.0),
        ("outside", 1, 1.0),
        ("inside", 1, 4.0),
        ("outside", 2, 2.0),
        ("inside", 1, 6.0),
        ("outside", 3, 3.0),
    ]


def test_closures_run_on_activation_steps_only(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    seen: list[int] = []
    report = cstorch.step_closure(lambda loss: seen.append(int(loss)))
    for batch in setup.executor(5, activation_steps=2):
        report(setup.step(batch))
    assert seen == [2, 4, 5]


def test_the_cluster_runs_ahead_of_a_slow_closure_up_to_the_bound(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    ahead: list[int] = []

    @cstorch.step_closure
    def slow(loss: torch.Tensor) -> None:
        if not ahead:
            deadline = time.monotonic() + 5
            while cluster.steps_run < cluster.run_ahead_steps and time.monotonic() < deadline:
                time.sleep(0.01)
        ahead.append(cluster.steps_run)

    for batch in setup.executor(12):
        slow(setup.step(batch))
    assert ahead[0] == cluster.run_ahead_steps
    assert len(ahead) == 12


def test_checkpoint_closures_read_the_state_of_their_step(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    seen: list[tuple[str, int, float]] = []

    @cstorch.checkpoint_closure
    def save(number: int) -> None:
        seen.append(("save", number, float(setup.model.state_dict()["weight"].cpu()[0, 0])))

    @cstorch.step_closure
    def report(loss: torch.Tensor) -> None:
        seen.append(("report", int(loss), 0.0))

    executor = setup.executor(5, checkpoint_steps=2)
    for batch in executor:
        save(executor.user_iteration)
        report(setup.step(batch))
    saved = [(number, value) for kind, number, value in seen if kind == "save"]
    assert saved == [(2, 0.25), (4, 0.0625), (5, 0.03125)]
    assert seen.index(("report", 2, 0.0)) < seen.index(("save", 2, 0.25))
    assert list(cluster.begun[0].checkpoint_steps) == [2, 4, 5]
    assert setup.weight() == 0.03125


def test_state_cannot_be_read_off_a_checkpoint_step(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    report = cstorch.step_closure(lambda loss: setup.weight())
    with pytest.raises(StateError, match=r"cannot be read now.*checkpoint_closure"):
        run(setup.executor(3), lambda batch: report(setup.step(batch)))


def test_state_changed_in_a_checkpoint_closure_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    change = cstorch.checkpoint_closure(lambda: setup.model.weight.data.mul_(2))
    with pytest.raises(StateError, match="is changed in a closure, while the execution goes on"):
        run(setup.executor(3, checkpoint_steps=2), lambda batch: (setup.step(batch), change()))


def test_the_next_execution_goes_on_and_only_what_changed_is_sent(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    for batch in setup.executor(2):
        setup.step(batch)
    assert cluster.written[0] == NAMES
    for batch in setup.executor(1, checkpoint_steps=1):
        setup.step(batch)
    assert cluster.written[1] == []
    assert setup.weight() == 0.125
    with torch.no_grad():
        setup.model.weight.mul_(8)
    for batch in setup.executor(1):
        setup.step(batch)
    assert cluster.written[2] == ["state.model.weight"]
    assert setup.weight() == 0.5
    assert len(cluster.created) == 1  # one job for all executions


@pytest.mark.parametrize("checkpoint_steps", [None, 0])
def test_weights_can_be_changed_only_after_a_checkpoint_on_the_last_step(
    cluster: FakeCluster, tmp_path: Path, checkpoint_steps: int | None
) -> None:
    setup = Setup(cluster, tmp_path)
    run(setup.executor(2, checkpoint_steps=checkpoint_steps), lambda batch: setup.step(batch))
    with torch.no_grad():
        setup.model.weight.fill_(8)
    with pytest.raises(StateError, match=r"'state.model.weight' was changed after .* checkpoint_steps greater than 0"):
        run(setup.executor(1), lambda batch: setup.step(batch))
    setup.backend.cluster_config.changes_need_checkpoint = False  # as releases after 2.3 are
    run(setup.executor(1), lambda batch: setup.step(batch))
    assert setup.weight() == 4


def test_a_checkpoint_elsewhere_does_not_allow_changes(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    only_the_first = Schedule([Schedule.Range(0, 1)])
    run(setup.executor(2, checkpoint_steps=only_the_first), lambda batch: setup.step(batch))
    with torch.no_grad():
        setup.model.weight.fill_(8)
    with pytest.raises(StateError, match="without a checkpoint on its last step"):
        run(setup.executor(1), lambda batch: setup.step(batch))


def test_evaluation_uses_the_trained_weights(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    for batch in setup.executor(2):
        setup.step(batch)

    @cstorch.trace
    def evaluate(batch: torch.Tensor) -> torch.Tensor:
        return setup.compiled(batch).sum()

    cluster.step = lambda state, step: {"output_values_0": state["state.model.weight"].sum()}
    for batch in setup.executor(1):
        evaluate(batch)
    assert cluster.written[1] == []
    assert setup.weight() == 0.25


def test_the_states_after_a_loop_that_was_left_are_those_of_its_step(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cstorch")
    setup = Setup(cluster, tmp_path)
    closures: list[float] = []

    @cstorch.step_closure
    def note(loss: torch.Tensor) -> None:
        closures.append(float(loss))

    for number, batch in enumerate(setup.executor(20)):
        note(setup.step(batch))
        if number == 2:
            break
    assert closures == [1.0, 2.0, 3.0]
    until(lambda: cluster.stopped_after == [3])  # though nothing needs the states yet: others may need the nodes
    assert setup.weight() == 1 / 8
    assert cluster.stopped_after == [3]
    assert "The loop was left after step 3 of 20" in caplog.text
    for batch in setup.executor(1):
        setup.step(batch)
    assert setup.weight() == 1 / 16
    assert cluster.cancelled == []


@pytest.mark.parametrize("activation_steps", [1, 10])
def test_a_step_without_input_is_an_error_after_the_steps_before_it(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, activation_steps: int
) -> None:
    """The script may go on: also where it was ahead, as it awaits no outputs."""
    caplog.set_level(logging.INFO, "cstorch")
    setup = Setup(cluster, tmp_path)
    cluster.step_without_input = 4
    closures: list[float] = []
    note = cstorch.step_closure(lambda loss: closures.append(float(loss)))
    with pytest.raises(InputError, match="no picture"):  # noqa: PT012
        for batch in setup.executor(20, activation_steps=activation_steps):
            note(setup.step(batch))
    assert closures == ([1.0, 2.0, 3.0] if activation_steps == 1 else [])
    assert setup.weight() == 1 / 8
    assert cluster.stopped_after == [3]
    assert "The loop was left after step 3 of 20" in caplog.text
    assert "On a Cerebras system" not in caplog.text  # which has no such step either
    for batch in setup.executor(1):
        setup.step(batch)
    assert setup.weight() == 1 / 16
    assert cluster.cancelled == []


@pytest.mark.parametrize("where", ["the body", "a closure"])
def test_an_executor_stops_its_loop(cluster: FakeCluster, tmp_path: Path, where: str) -> None:
    setup = Setup(cluster, tmp_path)
    executor = setup.executor(20)
    seen: list[int] = []

    @cstorch.step_closure
    def note(loss: torch.Tensor) -> None:
        seen.append(executor.user_iteration)
        if where == "a closure" and len(seen) == 3:
            executor.stop()

    for batch in executor:
        note(setup.step(batch))
        if where == "the body" and executor.user_iteration == 3:
            executor.stop()
    assert seen == [1, 2, 3]
    assert setup.weight() == 1 / 8
    assert cluster.stopped_after == [3]


def test_an_interrupted_script_goes_on_from_its_last_step(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        for number, batch in enumerate(setup.executor(20)):
            if number == 2:
                raise KeyboardInterrupt
            setup.step(batch)
    for batch in setup.executor(1):
        setup.step(batch)
    assert cluster.stopped_after == [2]
    assert setup.weight() == 1 / 8


def test_a_script_that_leaves_its_loop_and_ends_cancels_the_job(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    for batch in setup.executor(20):
        setup.step(batch)
        break
    setup.backend.close()
    assert cluster.cancelled == ["job-1"]


def test_leaving_early_without_recovery_loses_the_state_and_says_so(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cstorch.backends.csx.cluster, "max_num_restarts", 0)
    setup = Setup(cluster, tmp_path)
    for number, batch in enumerate(setup.executor(20)):
        setup.step(batch)
        if number == 2:
            break
    assert cluster.cancelled == ["job-1"]
    with pytest.raises(StateError, match="left before its last step"):
        setup.weight()
    with pytest.raises(StateError, match="left before its last step"):
        run(setup.executor(2), lambda batch: setup.step(batch))
    with torch.no_grad():
        setup.model.load_state_dict({"weight": torch.full((1, 2), 3.0), "bias": torch.zeros(1)})
    for batch in setup.executor(1):
        setup.step(batch)
    assert setup.weight() == 1.5


def test_validate_only_traces_and_compile_only_compiles(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cstorch")
    closures: list[torch.Tensor] = []
    setup = Setup(cluster, tmp_path, compile_only=True)
    with pytest.warns(UserWarning, match="compile_only"):
        executor = setup.executor(5)
    for batch in executor:
        cstorch.step_closure(closures.append)(setup.step(batch))
    assert len(executor) == 1
    assert len(cluster.compiled) == 1
    assert (cluster.begun, cluster.prepared, closures) == ([], [], [])
    assert setup.weight() == 1.0  # it never left, and the step was not done
    assert "With compile_only nothing is run, and no weights were sent" in caplog.messages
    assert any(re.fullmatch(r"Compiled in \S+ s, for job-1 on \d CSX", message) for message in caplog.messages)
    cstorch.close_backend()
    caplog.clear()
    setup = Setup(cluster, tmp_path, validate_only=True)
    executor = setup.executor(1)
    for batch in executor:
        cstorch.step_closure(closures.append)(setup.step(batch))
    assert (len(cluster.compiled), len(cluster.created), closures) == (1, 1, [])
    path = executor.artifact_dir / "cirh.mlir"
    assert path.exists()
    assert caplog.messages[-1:] == [f"The step is valid. With validate_only nothing is compiled or run. CIRH: {path}"]
    assert setup.weight() == 1.0


STAGES: tuple[dict[str, bool], ...] = ({"compile_only": True}, {"validate_only": True}, {})


@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_the_values_of_the_first_batch_are_freed_before_the_step_is_traced(
    cluster: FakeCluster, tmp_path: Path, settings: dict[str, bool]
) -> None:
    setup = Setup(cluster, tmp_path, **settings)
    made: list[weakref.ref[torch.Tensor]] = []

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            batch = {"rows": torch.ones(4, 2), "more": (torch.ones(4, dtype=torch.int64), [torch.ones(4, 3, 1)])}
            made.extend(weakref.ref(leaf) for leaf in pytree.tree_leaves(batch))
            yield batch

    @cstorch.trace
    def step(batch: Any) -> torch.Tensor:
        alive.append([values() is not None for values in made])
        labels, (image,) = batch["more"]
        loss: torch.Tensor = setup.compiled(batch["rows"]).mean() + labels.sum() + image.sum()
        return loss

    alive: list[list[bool]] = []
    for batch in DataExecutor(DataLoader(Loader), num_steps=1):
        forms = pytree.tree_map(lambda leaf: (tuple(leaf.shape), leaf.dtype), batch)
        assert forms == {"rows": ((4, 2), torch.float32), "more": (((4,), torch.int64), [((4, 3, 1), torch.float32)])}
        step(batch)
    assert alive == [[False] * 3]


@pytest.mark.parametrize("settings", STAGES, ids=str)
def test_what_lies_beside_the_tensors_of_the_first_batch_keeps_its_value(
    cluster: FakeCluster, tmp_path: Path, settings: dict[str, bool]
) -> None:
    setup = Setup(cluster, tmp_path, **settings)
    array = np.arange(3)
    for batch in DataExecutor(
        DataLoader(lambda: [{"rows": torch.ones(4, 2), "beside": (0.5, "a", array)}]), num_steps=1
    ):
        scale, text, numbers = batch["beside"]
        assert (scale, text, numbers.tolist()) == (0.5, "a", [0, 1, 2])
        setup.step(batch["rows"])


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": lambda batch: batch.sum().item(),
    "a condition": lambda batch: bool((batch > 0).all()),
    "a copy": lambda batch: batch.cpu(),
    "an array": lambda batch: batch.numpy(),
}


@pytest.mark.parametrize("settings", STAGES, ids=str)
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_read_of_the_first_batch_is_refused_in_the_loop_and_in_the_step(
    cluster: FakeCluster, tmp_path: Path, settings: dict[str, bool], read: Callable[[torch.Tensor], object]
) -> None:
    setup = Setup(cluster, tmp_path, **settings)
    with pytest.raises(TraceError, match="a value of step 1 is read in the loop"):
        run(setup.executor(1), read)

    @cstorch.trace
    def step(batch: torch.Tensor) -> torch.Tensor:
        read(batch)
        loss: torch.Tensor = setup.compiled(batch).mean()
        return loss

    with pytest.raises(TraceError, match="the value of a traced tensor is needed"):
        run(setup.executor(1), step)


@pytest.mark.parametrize("gateway", [False, True])
def test_a_hit_and_the_report_are_told(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, gateway: bool
) -> None:
    caplog.set_level(logging.INFO, "cstorch")
    cluster.found = coordinator_pb2.CompileResponse(cached=True, seconds=0.25, report="/cache/0/report.html")
    cluster.gateway = gateway
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), lambda batch: setup.step(batch))
    where = "/cache/0/report.html (on the cluster)" if gateway else "/cache/0/report.html"
    assert f"Found in the cache and verified in 0.2 s, for job-1 on 1 CSX: {where}" in caplog.messages


def test_a_checkpoint_is_that_of_its_step_while_the_cluster_goes_on(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    ahead: list[int] = []

    @cstorch.checkpoint_closure
    def save(number: int) -> None:
        deadline = time.monotonic() + 5
        as_far_as_it_can = min(number + cluster.run_ahead_steps - 1, 12)
        while cluster.steps_run < as_far_as_it_can and time.monotonic() < deadline:
            time.sleep(0.01)
        ahead.append(cluster.steps_run - number)
        cstorch.save(setup.model.state_dict(), tmp_path / f"{number}.mdl")

    executor = setup.executor(12, checkpoint_steps=4)
    for batch in executor:
        save(executor.user_iteration)
        setup.step(batch)
    assert ahead == [cluster.run_ahead_steps - 1] * 2 + [0]
    for number in (4, 8, 12):
        assert cstorch.load(tmp_path / f"{number}.mdl")["weight"][0, 0].item() == 0.5**number


def test_a_save_off_a_checkpoint_step_is_refused_and_leaves_nothing(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    folder = tmp_path / "checkpoints"

    @cstorch.step_closure
    def save(loss: torch.Tensor) -> None:
        cstorch.save(setup.model.state_dict(), folder / "a.mdl")

    def run() -> None:
        for batch in setup.executor(3):
            save(setup.step(batch))

    with pytest.raises(StateError, match="checkpoint_closure"):
        run()
    assert list(folder.iterdir()) == []
