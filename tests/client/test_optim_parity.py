"""Every optimizer, step by step, against torch's or against its formula."""

import pytest
import torch
from optimizer_cases import BASIC, MORE, Case
from optimizer_references import ExactMuon

from cstorch import optim

STEPS = 20
# Settings and counters are float32, whatever the parameters are.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}


def parameters(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 3), (3, 4)] if case.only_matrices else [(5, 3), (4,), (), (2, 3, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", BASIC + MORE, ids=str)
def test_every_step_equals_the_reference(case: Case, dtype: torch.dtype) -> None:
    ours, theirs = parameters(case, dtype), parameters(case, dtype)
    pairs = [(ours, case.ours(ours)), (theirs, case.reference(theirs))]
    for step in range(STEPS):
        for own, optimizer in pairs:
            optimizer.zero_grad()
            # Gradients that depend on the parameters, and change their sign.
            torch.stack([((p - 0.3 * step) ** 2).sum() + 3 * p.sin().sum() for p in own]).sum().backward()
            optimizer.step()
        for a, e in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, e, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", BASIC, ids=str)
def test_state_is_made_at_the_beginning_and_updated_in_place(case: Case) -> None:
    own = parameters(case, torch.float32)
    optimizer = case.ours(own)
    before = [dict(optimizer.state[p]) for p in own]
    assert any(state for state in before)
    for p in own:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, state in zip(own, before, strict=True):
        assert optimizer.state[p].keys() == state.keys()
        for name, value in state.items():
            assert optimizer.state[p][name] is value
            if name in optimizer.state_names_to_sparsify():
                assert value.shape == p.shape


def test_muon_takes_all_dimensions_but_the_first_for_columns() -> None:
    tensor = torch.randn(4, 2, 3).requires_grad_()
    matrix = tensor.detach().clone().reshape(4, 6).requires_grad_()
    tensor.grad = torch.randn(4, 2, 3)
    matrix.grad = tensor.grad.reshape(4, 6)
    optim.Muon([tensor]).step()
    ExactMuon([matrix], lr=0.02, weight_decay=0.01).step()
    torch.testing.assert_close(tensor.reshape(4, 6), matrix, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="another optimizer"):
        optim.Muon([torch.zeros(3, requires_grad=True)])


def test_lamb_does_not_divide_by_nothing() -> None:
    p = torch.zeros(3, requires_grad=True)
    p.grad = torch.ones(3)
    optim.Lamb([p], lr=0.5).step()
    u = 0.1 / (0.001**0.5 + 1e-6)
    torch.testing.assert_close(p.detach(), torch.full((3,), -0.5 * u))
    p.grad = torch.zeros(3)
    q = torch.ones(3, requires_grad=True)
    q.grad = torch.zeros(3)
    optim.Lamb([q], lr=0.5).step()
    assert q.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Adamax", {"betas": (0.9, 1.0)}),
        ("NAdam", {"momentum_decay": -1.0}),
        ("RAdam", {"eps": -1.0}),
        ("Adagrad", {"lr_decay": -1.0}),
        ("Adadelta", {"rho": 1.5}),
        ("ASGD", {"weight_decay": -1.0}),
        ("Lamb", {"lr": -1.0}),
        ("Lion", {"betas": (-0.1, 0.9)}),
        ("RMSprop", {"momentum": -1.0}),
        ("Rprop", {"etas": (1.2, 0.5)}),
        ("Rprop", {"step_sizes": (1.0, 0.5)}),
        ("Muon", {"weight_decay": -1.0}),
        ("Adafactor", {"lr": None}),
        ("Adafactor", {"lr": 0.1, "relative_step": True}),
        ("Adafactor", {"lr": 0.1, "clip_threshold": 2.0}),
        ("Adafactor", {"lr": 0.1, "eps": (-1.0, 0.0)}),
    ],
    ids=str,
)
def test_bad_settings(name: str, settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"Invalid|Adafactor"):
        getattr(optim, name)([torch.zeros(2, 2, requires_grad=True)], **settings)


class Scaled(optim.Optimizer):
    """A script's own."""

    def __init__(self, params: list[torch.Tensor], lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def preinitialize(self) -> None:
        pass

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


def test_optimizers_by_name() -> None:
    own = [torch.zeros(2, 2, requires_grad=True)]
    for name in optim.__all__:
        found = getattr(optim, name)
        if isinstance(found, type) and found is not optim.Optimizer:
            settings = {"lr": 0.1}
            assert type(optim.configure_optimizer(name.upper(), own, **settings)) is found
    assert isinstance(optim.configure_optimizer("scaled", own), Scaled)
    with pytest.raises(ValueError, match=r"no optimizer 'UpdateRule'.*Adafactor.*SGD"):
        optim.configure_optimizer("UpdateRule", own)


def test_settings_of_older_configurations() -> None:
    own = [torch.zeros(2, requires_grad=True)]
    adam = optim.configure_optimizer("AdamW", own, lr=0.1, weight_decay_rate=0.2, beta1=0.5, beta2=0.6)
    assert (adam.defaults["weight_decay"], adam.defaults["betas"]) == (0.2, (0.5, 0.6))
    assert optim.configure_optimizer("Adafactor", own, lr=0.1, eps1=1e-20, eps2=0.1).defaults["eps"] == (1e-20, 0.1)
    rprop = optim.configure_optimizer("Rprop", own, eta1=0.4, eta2=1.3, step_size_min=0.1, step_size_max=2.0)
    assert (rprop.defaults["etas"], rprop.defaults["step_sizes"]) == ((0.4, 1.3), (0.1, 2.0))
    with pytest.warns(UserWarning, match="SGD has no setting 'nonsense'"):
        assert optim.configure_optimizer("SGD", own, lr=0.1, nonsense=3).defaults["lr"] == 0.1
