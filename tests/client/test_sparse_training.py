"""Sparse training on the CPU backend, beside the same written out; configuration; what is refused."""

import copy
import inspect
from typing import Any

import pytest
import torch
from sparse_cases import CASES, LR, MOMENTUM, SparseCase, batches, losses_by_hand, network
from torch import nn
from torch.nn import functional as F

import cstorch
from cstorch import sparse
from cstorch.sparse import schedules


def masks_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removesuffix("_mask"): mask for name, mask in model.named_buffers()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps_equal_those_written_out(case: SparseCase) -> None:
    torch.manual_seed(0)
    model = network().double()
    algorithm = sparse.configure(case.config)
    model.apply(algorithm)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    optimizer.apply(algorithm)
    assert algorithm.num_sparse_params == 2
    data = batches(10, torch.float64)
    reference = copy.deepcopy(model)
    masks = {name: mask.clone() for name, mask in masks_of(model).items()}
    assert set(masks) == {"0.weight", "3.weight"}
    torch.manual_seed(1)
    expected = losses_by_hand(case, reference, masks, data, lambda: None)
    torch.manual_seed(1)
    for step, ((features, labels), loss_by_hand) in enumerate(zip(data, expected, strict=True)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.detach(), loss_by_hand, rtol=1e-12, atol=0)
        if step in case.updates:
            for mask in masks_of(model).values():
                assert int(mask.sum()) == round((1 - case.sparsity(step)) * mask.numel())
    for name, mask in masks_of(model).items():
        assert torch.equal(mask, masks[name])
        weight = model.get_parameter(name)
        assert not weight[~mask].any()
        assert not optimizer.state[weight]["momentum_buffer"][~mask].any()
        torch.testing.assert_close(weight, reference.get_parameter(name), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (0.25, [0.25] * 4),
        ({"type": "linear", "init": 0.1, "slope": 0.2}, [0.1, 0.3, 0.5, 0.7]),
        ({"type": "exp", "init": 0.0, "gamma": -0.6931471805599453}, [0.0, 0.5, 0.75, 0.875]),
        ({"type": "power", "init": 0.8, "beta": 0.5}, [0.8, 0.4, 0.2, 0.1]),
        ({"type": "cosine", "init": 0.3, "half_period": 2, "minimum": 0.1}, [0.3, 0.2, 0.1, 0.2]),
        ([0.1, 0.2, 0.3], [0.1, 0.2, 0.2, 0.3]),
        (lambda step, is_update_step: step / 10 + is_update_step, [1.0, 0.1, 1.2, 0.3]),
    ],
)
def test_a_schedule_has_the_value_of_its_formula(config: Any, expected: list[float]) -> None:
    schedule = schedules.make_schedule(config)
    update = schedules.FreqSchedule(freq=2)
    steps = [torch.tensor(step) for step in range(4)]
    values = [float(schedule(step, update(step))) for step in steps]
    assert values == pytest.approx(expected, abs=1e-6)


def test_update_schedules_choose_their_steps() -> None:
    def chosen(update: Any) -> list[int]:
        schedule = schedules.make_update_schedule(update)
        return [step for step in range(12) if schedule(torch.tensor(step))]

    assert chosen(None) == list(range(12))
    assert chosen({"freq": 3, "start": 2, "stop": 8}) == [2, 5]
    assert chosen({"steps": [1, 7]}) == [1, 7]
    assert chosen(lambda step: step == 4) == [4]


def test_first_masks() -> None:
    weight = torch.randn(6, 8)
    weight[0] = 0

    def mask(method: object, sparsity: float | None) -> torch.Tensor:
        layer = nn.Linear(8, 6, bias=False)
        with torch.no_grad():
            layer.weight.copy_(weight)
        layer.apply(sparse.Static(sparsity, init_method=method))
        return layer.get_buffer("weight_mask")

    assert int(mask("random", 0.75).sum()) == 12
    assert not torch.equal(mask("random", 0.75), mask("random", 0.75))
    kept = weight.abs()[mask("topk", 0.75)]
    assert len(kept) == 12
    assert kept.min() > weight.abs()[~mask("topk", 0.75)].max()
    assert torch.equal(mask("from_zeros", None), weight != 0)
    expected = (torch.arange(6)[:, None] + torch.arange(8)) % 2 == 1
    assert torch.equal(mask("checkerboard", 0.5), expected)
    assert torch.equal(mask(lambda p, sparsity, shaper, device: p > 0, 0.5), weight > 0)


def test_filters_see_the_names_in_the_model_that_apply_was_called_on() -> None:
    model = nn.ModuleDict({"embedding": nn.Linear(4, 4), "ffn": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
    model.apply(sparse.configure(0.5))
    assert set(masks_of(model)) == {"ffn.0.weight", "ffn.1.weight"}
    other = nn.ModuleDict({"embedding": nn.Linear(4, 4), "ffn": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})
    algorithm = sparse.configure(
        [
            {"sparsity": 0.5, "param_filter": "ffn.1.weight"},
            {"algorithm": "gmp", "sparsity": 0.25, "param_filter": ["embedding.weight", "*.1.weight"]},
        ]
    )
    cstorch.compile(other, "CPU").apply(algorithm)
    assert {name: int(mask.sum()) for name, mask in masks_of(other).items()} == {
        "embedding.weight": 12,
        "ffn.1.weight": 8,
    }
    assert [type(a) for a in algorithm.algorithms] == [sparse.Static, sparse.GMP]


def test_state_is_taken_up_again_and_loaded_weights_are_pruned() -> None:
    def made() -> tuple[nn.Module, sparse.Group, cstorch.optim.Optimizer]:
        model = network()
        config = {"algorithm": "rigl", "sparsity": 0.5, "drop_fraction": [0.1, 0.2, 0.3], "update": {"freq": 2}}
        algorithm = sparse.configure(config)
        optimizer = cstorch.optim.AdamW(model.parameters(), lr=0.1)
        model.apply(algorithm)
        optimizer.apply(algorithm)
        return model, algorithm, optimizer

    def train(
        model: nn.Module, optimizer: cstorch.optim.Optimizer, data: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        for features, labels in data:
            optimizer.zero_grad()
            F.cross_entropy(model(features), labels).backward()
            optimizer.step()

    data = batches(6, torch.float32)
    model, algorithm, optimizer = made()
    train(model, optimizer, data[:3])
    other_model, other_algorithm, other_optimizer = made()
    other_model.load_state_dict(copy.deepcopy(model.state_dict()))
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other_algorithm.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    train(model, optimizer, data[3:])
    train(other_model, other_optimizer, data[3:])
    for name, value in model.state_dict().items():
        assert torch.equal(value, other_model.state_dict()[name]), name
    dense = {name: torch.ones_like(value) for name, value in model.named_parameters()}
    model.load_state_dict(dense, strict=False)
    for name, mask in masks_of(model).items():
        assert torch.equal(model.get_parameter(name), mask.float())


def test_hooks_get_target_and_computed_sparsity() -> None:
    model = network()
    algorithm = sparse.configure({"algorithm": "gmp", "sparsity": [0.25, 0.5], "init_method": "topk"})
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)
    model.apply(algorithm)
    optimizer.apply(algorithm)
    seen: list[tuple[str, str, float]] = []
    targets = algorithm.register_target_sparsity_hook(lambda _, name, s: seen.append(("target", name, float(s))))
    computed = algorithm.register_computed_sparsity_hook(lambda _, name, s: seen.append(("computed", name, float(s))))
    for _ in range(2):
        model(torch.randn(3, 6)).sum().backward()
        optimizer.step()
    names = ("0.weight", "3.weight")
    assert seen == [(kind, name, s) for s in (0.25, 0.5) for kind in ("target", "computed") for name in names]
    targets.remove()
    computed.remove()
    optimizer.step()
    assert len(seen) == 8


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 0 and less than 1, got 1\.5"):
        sparse.configure(1.5)
    with pytest.raises(ValueError, match="one of static, gmp, set, rigl, not 'magic'"):
        sparse.configure({"algorithm": "magic", "sparsity": 0.5})
    for config in ("x", None, [0.5], {0.5}):
        with pytest.raises(TypeError, match=r"configure takes a sparsity such as 0\.9, a dictionary such as"):
            sparse.configure(config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one of static, gmp, set, rigl, not 3"):
        sparse.configure({"algorithm": 3})
    with pytest.raises(ValueError, match="init_method='random' needs a sparsity"):
        sparse.Static()
    with pytest.raises(ValueError, match="one of constant, linear, exp"):
        sparse.GMP(sparsity={"type": "magic"})
    with pytest.raises(ValueError, match="gamma must not be positive"):
        sparse.GMP(sparsity={"type": "exp", "init": 0.1, "gamma": 1})
    with pytest.raises(ValueError, match="cannot be divided in 3 balanced groups"):
        network().apply(sparse.RigL(sparsity=0.5, balance_out_groups=3))
    with pytest.raises(ValueError, match="balance_in_groups and balance_out_groups exclude each other"):
        sparse.RigL(sparsity=0.5, balance_out_groups=2, balance_in_groups=2)
    with pytest.raises(ValueError, match=r"call model\.apply\(sparsity\) first"):
        cstorch.optim.SGD(network().parameters(), lr=0.1).apply(sparse.configure(0.5))
    with pytest.raises(TypeError, match="to a module or an optimizer, not to int"):
        sparse.configure(0.5).apply(3)


@pytest.mark.parametrize("algorithm", [sparse.Static, sparse.GMP, sparse.SET, sparse.RigL])
def test_an_algorithm_takes_what_its_base_takes_and_nothing_else(algorithm: Any) -> None:
    algorithm(sparsity=0.5, init_method="topk")
    with pytest.raises(TypeError, match="param_filters"):
        algorithm(sparsity=0.5, param_filters=["*"])
    # A configuration class that a script makes of the signature leaves room for settings of `configure`.
    kinds = [parameter.kind for parameter in inspect.signature(algorithm).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds
