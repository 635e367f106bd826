"""The optimizers against torch's, or against a reference in float64 where the rules differ on purpose."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cstorch
from cstorch.optim import SGD, Adam, AdamW, Optimizer, configure_optimizer

STEPS = 20
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((5, 3), (4,), ())
    ]


def train(make: Make, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Some steps on gradients that depend on the parameters."""
    own = parameters(dtype)
    optimizer = make(own)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([((p - 0.3 * step) ** 2).sum() + p.sin().sum() for p in own]).sum().backward()
        optimizer.step()
    return [p.detach() for p in own]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor], rtol: float = 1e-5) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.9, "maximize": True},
    ],
    ids=str,
)
def test_sgd_equals_torch(settings: dict[str, float]) -> None:
    assert_same(
        train(lambda p: SGD(p, lr=0.02, **settings)),  # type: ignore[arg-type]
        train(lambda p: torch.optim.SGD(p, lr=0.02, **settings)),  # type: ignore[arg-type]
    )


def test_sgd_dampening_counts_on_the_first_step() -> None:
    p = torch.tensor([1.0], requires_grad=True)
    optimizer = SGD([p], lr=1.0, momentum=0.5, dampening=0.25)
    p.grad = torch.tensor([2.0])
    optimizer.step()
    assert p.item() == pytest.approx(1 - 1.5)
    optimizer.step()
    assert p.item() == pytest.approx(-0.5 - (0.75 + 1.5))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
def test_adam_equals_torch_without_eps(optimizer: str, amsgrad: bool) -> None:
    # The only difference to torch is where eps is added; in float32 the powers of beta2 cost some digits.
    settings = {"lr": 0.05, "eps": 1e-12, "weight_decay": 0.05, "amsgrad": amsgrad}
    assert_same(
        train(lambda p: configure_optimizer(optimizer, p, **settings)),
        train(lambda p: getattr(torch.optim, optimizer)(p, **settings)),
        rtol=3e-4,
    )


class ReferenceAdam(torch.optim.Optimizer):
    """The rule of cstorch_api 2.4, written with the number of the step in float64."""

    def __init__(self, params: list[torch.Tensor], decoupled: bool, correct_bias: bool, weight_decay: float) -> None:
        super().__init__(params, {"lr": 0.05})
        self.decoupled, self.correct_bias, self.weight_decay = decoupled, correct_bias, weight_decay
        self.t = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.t += 1
        for p in self.param_groups[0]["params"]:
            g = p.grad if self.decoupled else p.grad + self.weight_decay * p
            m = self.state[p]["m"] = 0.9 * self.state[p].get("m", 0) + 0.1 * g
            v = self.state[p]["v"] = 0.999 * self.state[p].get("v", 0) + 0.001 * g * g
            u = m / (v.sqrt() + 1e-2)
            if self.correct_bias:
                u = u * (1 - 0.999**self.t) ** 0.5 / (1 - 0.9**self.t)
            if self.decoupled:
                u = u + self.weight_decay * p
            p.sub_(0.05 * u)


@pytest.mark.parametrize("correct_bias", [True, False])
def test_adamw_rule(correct_bias: bool) -> None:
    assert_same(
        train(lambda p: AdamW(p, lr=0.05, eps=1e-2, weight_decay=0.1, correct_bias=correct_bias)),
        train(lambda p: ReferenceAdam(p, True, correct_bias, 0.1), torch.float64),
        rtol=3e-4,
    )


def test_adam_rule() -> None:
    assert_same(
        train(lambda p: Adam(p, lr=0.05, eps=1e-2, weight_decay=0.1)),
        train(lambda p: ReferenceAdam(p, False, True, 0.1), torch.float64),
        rtol=3e-4,
    )


def test_the_learning_rate_may_be_a_tensor() -> None:
    for optimizer_class in (SGD, Adam, AdamW):
        with_tensor = train(lambda p: _with_lr(optimizer_class(p, lr=1.0), torch.tensor(0.02)))  # noqa: B023
        assert_same(with_tensor, train(lambda p: optimizer_class(p, lr=0.02)))  # noqa: B023


def _with_lr(optimizer: Optimizer, lr: torch.Tensor) -> Optimizer:
    optimizer.param_groups[0]["lr"] = lr
    return optimizer


def test_parameter_groups_have_settings_of_their_own() -> None:
    first, second = (torch.ones(2, requires_grad=True) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.5, "momentum": 0.9}]
    optimizer = SGD(groups, lr=0.1)
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    optimizer.step()
    assert first[0].item() == pytest.approx(0.9)
    assert second[0].item() == pytest.approx(0.5)
    assert list(optimizer.state[second]) == ["momentum_buffer"]
    assert not optimizer.state[first]


def test_state_exists_before_the_first_step_and_keeps_its_identity() -> None:
    own = parameters()
    optimizer = AdamW(own)
    before = {(i, name): value for i, p in enumerate(own) for name, value in optimizer.state[p].items()}
    assert {name for _, name in before} == {"exp_avg", "exp_avg_sq", "beta1_power", "beta2_power"}
    for p in own:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for (i, name), value in before.items():
        assert optimizer.state[own[i]][name] is value
    assert before[0, "beta1_power"].item() == pytest.approx(0.9**2)


def test_a_parameter_without_a_gradient_stays() -> None:
    p = torch.ones(2, requires_grad=True)
    AdamW([p], weight_decay=0.5).step()
    assert p.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("SGD", {"lr": -1.0}),
        ("SGD", {"lr": 1.0, "momentum": -0.1}),
        ("SGD", {"lr": 1.0, "weight_decay": -0.1}),
        ("SGD", {"lr": 1.0, "nesterov": True}),
        ("Adam", {"lr": -1.0}),
        ("Adam", {"eps": -1.0}),
        ("AdamW", {"betas": (1.0, 0.9)}),
        ("AdamW", {"betas": (0.9, -0.1)}),
        ("AdamW", {"weight_decay": -0.1}),
    ],
    ids=str,
)
def test_bad_settings(optimizer: str, settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"Invalid|Nesterov"):
        configure_optimizer(optimizer, parameters(), **settings)


def test_configure_optimizer_names() -> None:
    assert isinstance(configure_optimizer("adamw", parameters(), lr=0.1), AdamW)
    with pytest.raises(ValueError, match=r"no optimizer 'Foo'.*SGD"):
        configure_optimizer("Foo", parameters())


class Counting(Optimizer):
    """Custom: sets an attribute after the base constructor, as torch optimizers may."""

    def __init__(self, params: list[torch.Tensor], enable_global_step: bool = True) -> None:
        super().__init__(params, {"lr": 1.0}, enable_global_step=enable_global_step)
        self.scale = 3.0

    def preinitialize(self) -> None:
        for p in self.parameters():
            self.state[p]["scaled"] = torch.full_like(p, self.scale)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.parameters():
            step = self.increment_global_step(p)
            p.add_(self.state[p]["scaled"] * step)


def test_custom_optimizer_with_a_global_step() -> None:
    p = torch.zeros(2, requires_grad=True)
    optimizer = Counting([p])
    for _ in range(3):
        optimizer.step()
    assert p.tolist() == [18, 18]
    assert optimizer.state[p]["step"].dtype == torch.float32
    assert optimizer.state[p]["step"].item() == 3


def test_no_global_step_unless_asked_for() -> None:
    with pytest.raises(RuntimeError, match="enable_global_step=True"):
        Counting([torch.zeros(2, requires_grad=True)], enable_global_step=False).step()


def test_a_group_added_later_gets_state_and_leaves_the_rest() -> None:
    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    optimizer = Counting([first])
    optimizer.step()
    optimizer.add_param_group({"params": [second]})
    assert optimizer.state[first]["step"].item() == 1
    assert optimizer.state[second]["step"].item() == 0
    assert second in optimizer.state


def test_state_dict_round_trip_continues_exactly() -> None:
    def steps(optimizer: Optimizer, own: list[torch.Tensor], n: int) -> None:
        for _ in range(n):
            optimizer.zero_grad()
            torch.stack([(p**2).sum() for p in own]).sum().backward()
            optimizer.step()

    straight = parameters()
    first = AdamW(straight, lr=0.1, weight_decay=0.1)
    steps(first, straight, 5)
    copies = [p.detach().clone().requires_grad_() for p in straight]
    second = AdamW(copies, lr=0.7)
    moment = second.state[copies[0]]["exp_avg"]
    second.load_state_dict(first.state_dict())
    assert second.state[copies[0]]["exp_avg"] is moment
    assert moment.data_ptr() != first.state[straight[0]]["exp_avg"].data_ptr()
    assert second.param_groups[0]["lr"] == 0.1
    steps(first, straight, 5)
    steps(second, copies, 5)
    for a, b in zip(straight, copies, strict=True):
        assert torch.equal(a, b)


def test_state_of_another_optimizer_is_refused() -> None:
    saved = AdamW(parameters()).state_dict()
    with pytest.raises(ValueError, match="'exp_avg_sq' for parameter 0, which Lion does not keep"):
        cstorch.optim.Lion(parameters()).load_state_dict(saved)
    with pytest.raises(ValueError, match="no 'momentum', which SGD needs; was it saved from another"):
        SGD(parameters(), lr=0.1, momentum=0.9).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"state dict have \[3\] parameters, those of this optimizer \[2\]; make it"):
        AdamW(parameters()[:2]).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"group 0 of the loaded state dict has no 'betas', 'eps', which AdamW needs"):
        AdamW(parameters()).load_state_dict(torch.optim.SGD(parameters()).state_dict())


def of_torch(optimizer: type[torch.optim.Optimizer], own: list[torch.Tensor], **settings: Any) -> torch.optim.Optimizer:
    """An optimizer of torch after three steps."""
    made = optimizer(own, **settings)
    for _ in range(3):
        torch.stack([(p**2).sum() for p in own]).sum().backward()
        made.step()
        made.zero_grad()
    return made


def test_a_refused_state_dict_changes_nothing() -> None:
    saved = of_torch(torch.optim.SGD, parameters(), lr=0.7, momentum=0.9).state_dict()
    saved["state"][2]["other"] = torch.ones(())
    own = parameters()
    optimizer = SGD(own, lr=0.1, momentum=0.5)
    with pytest.raises(ValueError, match="'other' for parameter 2, which SGD does not keep"):
        optimizer.load_state_dict(saved)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.5)
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in own)


def test_settings_that_the_loaded_groups_do_not_have_keep_their_values() -> None:
    """Groups of torch's AdamW have no correct_bias; those of old checkpoints have no l2_regularization_rate either."""
    own = parameters()
    optimizer = AdamW([{"params": own, "tags": "all"}], correct_bias=False)
    optimizer.load_state_dict(torch.optim.AdamW(parameters(), lr=0.5).state_dict())
    group = optimizer.param_groups[0]
    expected = {"lr": 0.5, "correct_bias": False, "l2_regularization_rate": 0.0, "tags": "all", "capturable": False}
    assert {name: group[name] for name in expected} == expected
    own[0].grad = torch.ones_like(own[0])
    optimizer.step()


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_the_message_about_torchs_adam_says_how_to_convert_its_state(kind: str) -> None:
    theirs = parameters()
    torchs = of_torch(getattr(torch.optim, kind), theirs, lr=0.1, eps=0.0)
    saved = copy.deepcopy(torchs.state_dict())
    own = [p.detach().clone().requires_grad_() for p in theirs]
    optimizer = getattr(cstorch.optim, kind)(own)
    with pytest.raises(ValueError, match=rf"{kind} counts updates in it: replace it by ") as caught:
        optimizer.load_state_dict(saved)
    assert "beta1_power = betas[0] ** (step + 1) and beta2_power = betas[1] ** (step + 1)" in str(caught.value)
    betas = saved["param_groups"][0]["betas"]
    for values in saved["state"].values():
        step = values.pop("step")
        values["beta1_power"], values["beta2_power"] = (beta ** (step + 1) for beta in betas)
    optimizer.load_state_dict(saved)
    for goes_on, updated in ((torchs, theirs), (optimizer, own)):
        torch.stack([(p**2).sum() for p in updated]).sum().backward()
        goes_on.step()
    torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0)


def test_the_count_of_torchs_adadelta_is_to_be_removed() -> None:
    saved = of_torch(torch.optim.Adadelta, parameters()).state_dict()
    with pytest.raises(ValueError, match="Adadelta counts updates in it: remove it, in the state of each parameter"):
        cstorch.optim.Adadelta(parameters()).load_state_dict(saved)


def test_states_of_sgd_can_be_exchanged_with_torch() -> None:
    def go_on(optimizer: torch.optim.Optimizer, own: list[torch.Tensor]) -> list[torch.Tensor]:
        torch.stack([(p**2).sum() for p in own]).sum().backward()
        optimizer.step()
        return own

    def copies(own: list[torch.Tensor]) -> list[torch.Tensor]:
        return [p.detach().clone().requires_grad_() for p in own]

    theirs = parameters()
    torchs = of_torch(torch.optim.SGD, theirs, lr=0.1, momentum=0.9, nesterov=True)
    own, back = copies(theirs), copies(theirs)
    ours = SGD(own, lr=1.0, momentum=0.5)
    ours.load_state_dict(torchs.state_dict())
    returned = torch.optim.SGD(back)
    returned.load_state_dict(copy.deepcopy(ours.state_dict()))
    expected = go_on(torchs, theirs)
    assert all(map(torch.allclose, go_on(ours, own), expected))
    assert all(map(torch.allclose, go_on(returned, back), expected))


def test_load_hooks_run_before_and_after_the_whole_state_dict() -> None:
    saved = of_torch(torch.optim.SGD, parameters(), lr=0.7, momentum=0.9).state_dict()
    saved["state"][0]["other"] = torch.ones(())
    own = parameters()
    optimizer = SGD(own, lr=0.1, momentum=0.5)

    def without_other(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        state = {number: {"momentum_buffer": values["momentum_buffer"]} for number, values in loaded["state"].items()}
        return {**loaded, "state": state}

    seen: list[torch.Tensor] = []
    optimizer.register_load_state_dict_pre_hook(without_other)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[own[0]]["momentum_buffer"].clone()))
    optimizer.load_state_dict(saved)
    assert torch.equal(seen[0], saved["state"][0]["momentum_buffer"])
    assert optimizer.param_groups[0]["lr"] == 0.7


def test_hooks_apply_and_visit_state() -> None:
    own = parameters()
    optimizer = SGD(own, lr=0.1, momentum=0.9)
    seen: list[str] = []
    optimizer.register_zero_grad_pre_hook(lambda *_: seen.append("pre"))
    handle = optimizer.register_zero_grad_post_hook(lambda *_: seen.append("post"))
    optimizer.zero_grad()
    handle.remove()
    optimizer.zero_grad(set_to_none=False)
    assert seen == ["pre", "post", "pre"]
    assert optimizer.apply(lambda o: seen.append(type(o).__name__)) is optimizer
    assert seen[-1] == "SGD"
    optimizer.visit_state(lambda value: value + 2)
    assert optimizer.state[own[1]]["momentum_buffer"].tolist() == [2] * 4
    optimizer.visit_state(lambda value: None)
    assert optimizer.state[own[1]]["momentum_buffer"].tolist() == [2] * 4


def test_closure_result_is_returned() -> None:
    p = torch.ones(1, requires_grad=True)
    optimizer = SGD([p], lr=0.1)

    def closure() -> float:
        (p * 2).sum().backward()
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert p.item() == pytest.approx(0.8)


def test_an_optimizer_without_preinitialize_is_told_what_it_is_for() -> None:
    class Incomplete(Optimizer):
        def step(self, closure: Callable[[], float] | None = None) -> None: ...  # type: ignore[override]

    with pytest.raises(TypeError, match=r"Incomplete does not define preinitialize\. An optimizer makes all its state"):
        Incomplete([torch.ones(1, requires_grad=True)], {"lr": 0.1})  # type: ignore[abstract]


def test_state_that_a_script_has_dropped_is_made_anew(tmp_path: Path) -> None:
    """As in plain PyTorch, where a step makes what it does not find."""
    cstorch.backend("CPU", artifact_dir=tmp_path)
    model = cstorch.compile(nn.Linear(3, 1))
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for drop in (False, True):
        if drop:
            optimizer.state.clear()
        loader = cstorch.utils.data.DataLoader(lambda: [torch.ones(2, 3)] * 2)
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=2):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        momentum = optimizer.state[model.bias]["momentum_buffer"]
        torch.testing.assert_close(momentum, torch.full((1,), 2 * 1.9))


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adamax", "NAdam", "RAdam"])
@pytest.mark.parametrize("updates", [0, 1, 30, 2000])
def test_changed_betas_correct_the_bias_as_those_of_torch(kind: str, updates: int) -> None:
    theirs = parameters()
    own = [p.detach().clone().requires_grad_() for p in theirs]
    optimizers = [
        getattr(library, kind)(each, lr=1e-3, eps=1e-12, weight_decay=0.0)
        for library, each in ((torch.optim, theirs), (cstorch.optim, own))
    ]
    for update in range(updates + 3):
        for optimizer, each in zip(optimizers, (theirs, own), strict=True):
            if update == updates:
                optimizer.param_groups[0]["betas"] = (0.5, 0.95)
            for p in each:
                p.grad = torch.full_like(p, 1.0 + update % 3)
            optimizer.step()
    torch.testing.assert_close(own, theirs, atol=2e-5, rtol=1e-4)


def test_loaded_betas_are_those_of_the_loaded_powers() -> None:
    saved = Adam(parameters(), betas=(0.5, 0.6)).state_dict()
    own = parameters()
    optimizer = Adam(own)
    optimizer.load_state_dict(saved)
    optimizer.fit_beta_powers()
    assert optimizer.state[own[0]]["beta1_power"].item() == 0.5
    assert copy.deepcopy(optimizer)._betas_of_powers == [(0.5, 0.6)]
