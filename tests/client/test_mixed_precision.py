"""How a script says in which precision its steps compute, and that the cluster hears of it."""

from pathlib import Path

import pytest
import torch
from fake_cluster import FakeCluster
from halved_weight import Setup, run

import cstorch
from cstorch.errors import ConfigurationError, UsageError
from wsc.v1 import plan_pb2


def test_the_defaults() -> None:
    assert not cstorch.amp.mixed_precision()
    assert cstorch.amp.get_half_dtype() is torch.float16
    assert cstorch.backends.csx.precision.optimization_level == 1


@pytest.mark.parametrize(
    ("value", "name", "dtype"),
    [
        ("float16", "float16", torch.float16),
        ("bfloat16", "bfloat16", torch.bfloat16),
        ("cbfloat16", "cbfloat16", torch.float16),
        (torch.bfloat16, "bfloat16", torch.bfloat16),
    ],
)
def test_the_half_is_set_by_name_or_type(value: str | torch.dtype, name: str, dtype: torch.dtype) -> None:
    assert cstorch.amp.set_half_dtype(value) is dtype
    assert cstorch.amp.get_half_dtype() is dtype
    assert cstorch.amp.get_half_dtype_str() == name
    assert not cstorch.amp.mixed_precision()


@pytest.mark.parametrize("value", ["float32", torch.float32, "half"])
def test_another_half_is_refused(value: str | torch.dtype) -> None:
    with pytest.raises(ConfigurationError, match="use one of float16, bfloat16, cbfloat16"):
        cstorch.amp.set_half_dtype(value)


@pytest.mark.parametrize("level", [-1, 3, True, "1", 1.0])
def test_another_level_is_refused(level: object) -> None:
    with pytest.raises(ConfigurationError, match="must be one of 0, 1, 2, not"):
        cstorch.backends.csx.precision.optimization_level = level
    assert cstorch.backends.csx.precision.optimization_level == 1


def test_an_unknown_flag_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        cstorch.backends.csx.precision.optimisation_level = 2
    with pytest.raises(AttributeError):
        cstorch.backends.csx.precison = None


def test_reset_gives_the_defaults() -> None:
    cstorch.backends.csx.precision.optimization_level = 2
    cstorch.backends.reset()
    assert cstorch.backends.csx.precision.optimization_level == 1


def test_the_kernel_library_is_one_of_two() -> None:
    performance = cstorch.backends.csx.performance
    assert performance.kernel_library == "aten"
    performance.kernel_library = "inductor"
    with pytest.raises(ConfigurationError, match="one of 'aten', 'inductor', not 'fast'"):
        performance.kernel_library = "fast"
    assert performance.kernel_library == "inductor"
    cstorch.backends.reset()
    assert cstorch.backends.csx.performance.kernel_library == "aten"


def test_the_compile_says_nothing_of_precision_unless_it_is_mixed(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.amp.set_half_dtype("bfloat16")
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    (options,) = cluster.options
    assert not options.HasField("precision")


def test_the_compile_says_what_precision_is_wanted(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.amp.set_half_dtype("cbfloat16")
    assert cstorch.amp.enable_mixed_precision() is True
    cstorch.backends.csx.precision.optimization_level = 2
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    wanted = plan_pb2.Precision(half=plan_pb2.HALF_TYPE_CBFLOAT16, optimization_level=2)
    (options,) = cluster.options
    assert options.precision == wanted


def test_gradients_travel_in_half_where_the_script_asks_for_it(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cstorch.amp.set_half_dtype("bfloat16")
    cstorch.amp.enable_mixed_precision()
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    cstorch.backends.csx.precision.half_gradients = True
    run(setup.executor(1), setup.step)
    assert [options.precision.half_gradients for options in cluster.options] == [False, True]
    said = [line for line in caplog.messages if line.startswith("Mixed precision")]
    assert ["gradients travel in it" in line for line in said] == [False, True]


def test_without_mixed_precision_there_is_no_half_for_gradients(cluster: FakeCluster, tmp_path: Path) -> None:
    cstorch.backends.csx.precision.half_gradients = True
    setup = Setup(cluster, tmp_path)
    with pytest.raises(ConfigurationError, match=r"half_gradients: .* call cstorch.amp.enable_mixed_precision\(\)"):
        run(setup.executor(1), setup.step)
    assert not cluster.options


def test_the_compile_says_what_wafers_may_hold_where_the_script_does(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)
    run(setup.executor(1), setup.step)
    cstorch.backends.csx.debug.wafer_memory_gi = 3
    run(setup.executor(1), setup.step)
    assert [options.wafer_memory_bytes for options in cluster.options] == [0, 3 << 30]


def test_the_precision_of_a_loop_does_not_change_in_it(cluster: FakeCluster, tmp_path: Path) -> None:
    setup = Setup(cluster, tmp_path)

    def body(batch: torch.Tensor) -> None:
        with pytest.raises(UsageError, match="before the loop"):
            cstorch.amp.enable_mixed_precision()
        with pytest.raises(UsageError, match="before the loop"):
            cstorch.amp.set_half_dtype("bfloat16")
        with pytest.raises(UsageError, match="before the loop"):
            cstorch.backends.csx.precision.optimization_level = 2
        setup.step(batch)

    run(setup.executor(1), body)
    (options,) = cluster.options
    assert not options.HasField("precision")
