"""GradScaler and its relatives, without a cluster: what they refuse, what they carry, and the CPU backend."""

from typing import Any

import pytest
import torch
from torch import nn

import cerebras_pytorch
import cerebras_pytorch.experimental
import cerebras_torch
import cstorch
from cstorch._internal.state import named_getters
from cstorch._internal.tracing import trace_step
from cstorch.errors import ConfigurationError, UsageError

STATES = ["loss_scale", "steps_since_rescale", "overflows_since_rescale", "num_skipped_steps"]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def csx() -> None:
    cstorch.backend("CSX", validate_only=True)


def model_and_optimizer() -> tuple[nn.Linear, cstorch.optim.Optimizer]:
    with cstorch.device("CSX") if cstorch.use_cs() else cstorch.device("CPU"):
        model = nn.Linear(2, 1)
    return model, cstorch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss_scale": "static"}, "number or 'dynamic', not 'static'"),
        ({"loss_scale": -1.0}, "loss_scale must be a positive number"),
        ({"init_scale": float("inf")}, "init_scale must be"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "is above max_loss_scale"),
        ({"steps_per_increase": 0}, "at least 1"),
        ({"overflow_tolerance": 1.0}, "less than 1"),
        ({"max_gradient_norm": -1.0}, "not be negative"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        cstorch.amp.GradScaler(**{"loss_scale": "dynamic", **settings})


@pytest.mark.usefixtures("csx")
@pytest.mark.parametrize(("half", "scale"), [("float16", 2.0**15), ("cbfloat16", 2.0**31), ("bfloat16", 1.0)])
def test_a_dynamic_scale_begins_as_its_half_needs(half: Any, scale: float) -> None:
    cstorch.amp.set_half_dtype(half)
    assert float(cstorch.amp.GradScaler("dynamic").get_scale()) == scale


@pytest.mark.usefixtures("csx")
def test_the_state_of_a_dynamic_scale() -> None:
    scaler = cstorch.amp.GradScaler("dynamic", max_loss_scale=2.0**10)
    assert sorted(named_getters()) == sorted(f"state.grad_scaler.0.{name}" for name in STATES)
    assert list(scaler.state_dict()) == STATES
    assert scaler.state_dict()["loss_scale"].dtype is torch.float32
    scaler.load_state_dict(dict(zip(STATES, (2.0**12, 7, 1, 3), strict=True)))
    assert [float(value) for value in scaler.state_dict().values()] == [2.0**12, 7, 1, 3]
    assert float(scaler.get_non_clamped_scale()) == 2.0**12
    assert float(scaler.get_scale()) == 2.0**10
    assert int(scaler.get_num_skipped_steps()) == 3
    scaler.load_state_dict({})
    assert scaler.state_dict(destination={"other": 1}).keys() == {"other", *STATES}
    with pytest.raises(ValueError, match="lacks num_skipped_steps"):
        scaler.load_state_dict(dict.fromkeys(STATES[:-1], 1))


@pytest.mark.usefixtures("csx")
def test_a_static_scale_has_no_state() -> None:
    scaler = cstorch.amp.GradScaler(8.0)
    assert scaler.get_scale() == 8.0
    assert scaler.state_dict() == named_getters() == {}
    with pytest.raises(UsageError, match="stays what it is"):
        scaler.update(4.0)


def test_on_the_cpu_nothing_is_scaled_and_no_step_skipped() -> None:
    cstorch.backend("CPU")
    model, optimizer = model_and_optimizer()
    scaler = cstorch.amp.GradScaler("dynamic")
    loss = model(torch.ones(1, 2)).sum()
    assert scaler.scale(loss) is loss
    before = model.weight.detach().clone()
    cstorch.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=100.0)
    assert torch.equal(model.weight.detach(), before - 0.1)
    assert scaler.state_dict() == {}
    assert scaler.get_num_skipped_steps() == 0
    assert scaler.get_scale() == 1.0
    assert cstorch.amp.isfinite(optimizer) is True
    scaler.load_state_dict({"loss_scale": 2.0})


@pytest.mark.usefixtures("csx")
def test_what_is_called_in_the_wrong_place_is_refused() -> None:
    model, optimizer = model_and_optimizer()
    scaler = cstorch.amp.GradScaler("dynamic")
    with pytest.raises(UsageError, match="within a traced step"):
        scaler.unscale_(optimizer)

    def unscaled_twice(batch: torch.Tensor) -> None:
        scaler.scale(model(batch).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.unscale_(optimizer)

    def updated_only(batch: torch.Tensor) -> None:
        scaler.update()

    for step, match in ((unscaled_twice, "call unscale_ once"), (updated_only, "no gradients were unscaled")):
        with pytest.raises(UsageError, match=match):
            trace_step(step, torch.ones(1, 2), named_getters(), {}, lambda result: [])


def test_one_made_before_the_backend_is_refused() -> None:
    scaler = cstorch.amp.GradScaler("dynamic")
    cstorch.backend("CSX", validate_only=True)
    with pytest.raises(UsageError, match="made before the backend"):
        scaler.scale(torch.ones(()))


def test_autocast_is_torchs_on_the_cpu_and_nothing_on_the_cluster() -> None:
    first = cstorch.backend("CPU")
    layer = nn.Linear(2, 1)
    cstorch.amp.set_half_dtype("bfloat16")
    with cstorch.amp.autocast():
        assert layer(torch.ones(1, 2)).dtype is torch.bfloat16
    assert cstorch.amp.autocast(torch.float16)(layer)(torch.ones(1, 2)).dtype is torch.float16
    assert first.is_cpu
    cstorch.close_backend()
    cstorch.backend("CSX", validate_only=True)
    with cstorch.amp.autocast():
        assert layer(torch.ones(1, 2)).dtype is torch.float32


def test_the_floating_point_type_is_the_half_with_mixed_precision() -> None:
    amp = cstorch.amp
    amp.set_half_dtype("cbfloat16")
    assert (amp.get_floating_point_dtype(), amp.get_floating_point_dtype_str()) == (torch.float32, "float32")
    assert amp.get_floating_point_dtype(torch.float64) is torch.float64
    amp.enable_mixed_precision()
    assert (amp.get_floating_point_dtype(), amp.get_floating_point_dtype_str()) == (torch.float16, "cbfloat16")
    assert amp.is_cbfloat16_tensor(torch.ones(1, dtype=torch.float16))
    assert not amp.is_cbfloat16_tensor(torch.ones(1))
    amp.set_half_dtype("float16")
    assert not amp.is_cbfloat16_tensor(torch.ones(1, dtype=torch.float16))


def test_older_releases_tolerate_overflows_and_have_other_names() -> None:
    assert cstorch.amp.GradScaler()._overflow_tolerance == 0.0
    old = cerebras_pytorch.amp.GradScaler
    assert old()._overflow_tolerance == 0.05
    assert cerebras_pytorch.experimental.amp.GradScaler is old
    assert cerebras_pytorch.experimental.amp.optimizer_step is cstorch.amp.optimizer_step
    oldest = cerebras_torch.amp.GradScaler(loss_scale="dynamic", initial_loss_scale=2.0**10, mixed_precision=True)
    assert cstorch.amp.mixed_precision()
    assert oldest.get_init_params()["initial_loss_scale"] == 2.0**10
    loss = torch.ones(())
    assert oldest(loss) is loss
    assert cerebras_torch.amp.state_dict() == {}


@pytest.mark.usefixtures("csx")
def test_the_oldest_release_keeps_its_state_in_the_module() -> None:
    scaler = cerebras_torch.amp.GradScaler(loss_scale="dynamic")
    state = cerebras_torch.amp.state_dict()
    assert list(state) == STATES
    cerebras_torch.amp.load_state_dict({**state, "loss_scale": torch.tensor(4.0)})
    assert float(scaler.get_scale()) == 4.0
