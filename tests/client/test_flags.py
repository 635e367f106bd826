"""The tree of flags: values, ranges, groups as contexts, what has no effect and says so."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cluster import FakeCluster
from halved_weight import Setup, run

import cstorch
from cstorch.backends.flag import Flag, Flags
from cstorch.errors import ConfigurationError, UsageError

csx = cstorch.backends.csx


def all_flags(group: Flags = csx) -> list[tuple[Flags, str]]:
    inner = [item for child in group.groups().values() for item in all_flags(child)]
    return [(group, name) for name in group.flags()] + inner


@pytest.mark.parametrize(("group", "name"), all_flags(), ids=lambda value: getattr(value, "path", value))
def test_every_flag_takes_its_own_value_and_goes_back(group: Flags, name: str) -> None:
    default = getattr(group, name)
    setattr(group, name, default)
    assert getattr(group, name) == default
    delattr(group, name)
    assert getattr(group, name) == default


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("precision", "optimization_level", 2),
        ("precision", "half_gradients", True),
        ("performance", "micro_batch_size", "explore"),
        ("performance", "micro_batch_size", {"explore": {"min": 2, "max": 8}}),
        ("performance", "micro_batch_size", 4),
        ("performance", "micro_batch_size", None),
        ("performance", "transfer_processes", 2),
        ("performance", "compress_weights", True),
        ("cluster", "auto_taint", True),
        ("debug", "drop_data", True),
        ("debug", "wrk_memory_gi", 16),
        ("debug", "op_definition_module", "ops"),
        ("debug", "fabric_type_blacklist", ["a"]),
    ],
)
def test_values_are_kept_until_the_reset(path: str, name: str, value: Any) -> None:
    group = getattr(csx, path)
    default = getattr(group, name)
    setattr(group, name, value)
    assert getattr(group, name) == value
    cstorch.backends.reset()
    assert getattr(group, name) == default != value


@pytest.mark.parametrize(
    ("path", "name", "value", "text"),
    [
        ("performance", "micro_batch_size", 0, 'must be "auto", "explore"'),
        ("performance", "micro_batch_size", True, "must be"),
        ("performance", "micro_batch_size", {"explore": {"least": 2}}, "must be"),
        ("performance", "transfer_processes", 0, "an int of at least 1, not 0"),
        ("performance", "max_transfer_bytes", 1.5, "an int of at least 1"),
        ("performance", "num_replicas", 2**32, "must be at most 4294967295"),
        ("performance", "micro_batch_size", 2**32, "each int is at most 4294967295"),
        ("performance", "micro_batch_size", {"explore": {"max": 2**32}}, "each int is at most 4294967295"),
        ("cluster", "max_num_restarts", 1_000_001, "must be at most 1000000"),
        ("debug", "wafer_memory_gi", 2**34, "must be at most 17179869183"),
        ("performance", "compress_weights", 1, "True or False, not 1"),
        ("debug", "op_definition_module", 3, "must be a str"),
        ("debug", "wrk_memory_gi", "16", "an int of at least 1"),
    ],
)
def test_wrong_values_are_refused_by_name(path: str, name: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"cstorch.backends.csx.{path}.{name} must be") as error:
        setattr(getattr(csx, path), name, value)
    assert text in str(error.value)


def test_an_unknown_flag_has_a_suggestion() -> None:
    with pytest.raises(AttributeError, match=r"csx.precision has no flag 'optimisation_level': did you mean 'optim"):
        csx.precision.optimisation_level = 2  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"csx.debug has no flag 'retrace_each_iteration': did you mean"):
        _ = csx.debug.retrace_each_iteration  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"csx.cluster has no flag 'zzz': there are auto_taint"):
        csx.cluster.zzz = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="csx has no flag 'debug'"):
        csx.debug = None  # type: ignore[assignment]  # a group is not replaced


def test_a_group_is_a_context() -> None:
    csx.precision.optimization_level = 2
    with csx.precision(optimization_level=0), csx.storage.s3(profile="mine"):
        assert (csx.precision.optimization_level, csx.storage.s3.profile) == (0, "mine")
    assert (csx.precision.optimization_level, csx.storage.s3.profile) == (2, None)
    with pytest.raises(ConfigurationError), csx.debug(retrace_every_iteration=True, drop_data="yes"):
        raise AssertionError
    assert csx.debug.retrace_every_iteration is False


def test_settings_of_the_compiler_can_be_set_one_by_one() -> None:
    csx.debug.ini.ws_some_setting = 1
    csx.debug.ini = {"another": 2}
    assert csx.debug.ini.another == 2


def test_what_has_no_effect_says_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, "cstorch")
    flag = Flag(1, int, without_effect="it is a test")
    cluster: Any = csx.cluster
    monkeypatch.setattr(type(cluster), "trial", flag, raising=False)
    flag.__set_name__(type(cluster), "trial")
    cluster.trial = 1
    assert caplog.messages == []
    cluster.trial = 2
    cluster.trial = 3
    assert caplog.messages == ["The flag csx.cluster.trial has no effect here: it is a test"]


def test_no_flag_changes_inside_a_loop(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)

    def body(batch: torch.Tensor) -> None:
        with pytest.raises(UsageError, match="before the loop"):
            csx.debug.drop_data = True
        with pytest.raises(UsageError, match="before the loop"), csx.performance(micro_batch_size=2):
            raise AssertionError
        setup.step(batch)

    run(setup.executor(1), body)
    assert (csx.debug.drop_data, csx.performance.micro_batch_size) == (False, "auto")


def test_retracing_calls_the_function_in_every_step(cluster: FakeCluster, tmp_path: Path) -> None:
    csx.debug.retrace_every_iteration = True
    setup = Setup(cluster, tmp_path)
    seen: list[float] = []
    report = cstorch.step_closure(lambda loss: seen.append(float(loss)))
    run(setup.executor(3), lambda batch: report(setup.step(batch)))
    assert (setup.traces, len(cluster.compiled), seen) == (3, 1, [1.0, 2.0, 3.0])


def test_retracing_another_program_is_refused(cluster: FakeCluster, tmp_path: Path) -> None:
    csx.debug.retrace_every_iteration = True
    setup = Setup(cluster, tmp_path)
    executor = setup.executor(3)
    step = cstorch.trace(lambda batch: setup.compiled(batch).mean() * executor.user_iteration)
    with pytest.raises(UsageError, match=r"something else in step 2 than in the first.*must be a tensor"):
        run(executor, step)


@pytest.mark.parametrize("is_on", [True, False])
def test_initialization_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_on: bool) -> None:
    caplog.set_level(logging.INFO, "cstorch")
    csx.debug.log_initialization = is_on
    cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    cstorch.compile(torch.nn.Linear(2, 3))
    assert caplog.messages == ["The model is on the device: Linear, 9 parameters"] * is_on
