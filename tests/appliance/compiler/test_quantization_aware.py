"""Fake quantization, alone and by modules of torch.ao.quantization, on one wafer and on two, against plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import Traced, loss_and_gradients
from torch import nn

from cstorch.errors import TraceError

quantization: Any = pytest.importorskip("torch.ao.quantization")  # which leaves torch

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CLUSTERS = [(1, 1), (2, 1)]
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
INTEGERS: Any = {"dtype": torch.int32}

Function = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, Function] = {
    "numbers": lambda y: torch.fake_quantize_per_tensor_affine(y, 0.013, 3, -32, 31),
    "names": lambda y: torch.fake_quantize_per_tensor_affine(
        input=y, scale=1 / 3, zero_point=0, quant_min=0, quant_max=15
    ),
    "tensors": lambda y: torch.fake_quantize_per_tensor_affine(
        y, torch.tensor([0.02], device=y.device), torch.tensor([-7], device=y.device, **INTEGERS), -128, 127
    ),
    "channels": lambda y: torch.fake_quantize_per_channel_affine(
        y, y.detach().abs().amax(0) / 20, torch.tensor([1, 0, -2], device=y.device, **INTEGERS), 1, -8, 7
    ),
    "zero points between levels": lambda y: torch.fake_quantize_per_channel_affine(
        y, y.detach().abs().amax(0) / 20, torch.tensor([0.4, 0.0, -1.3], device=y.device), 1, -8, 7
    ),
    "a half": lambda y: torch.fake_quantize_per_tensor_affine(y.bfloat16(), 0.05, 0, -8, 7).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    function = FUNCTIONS[name]

    def step(m: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        made = function(m(x))
        return [made.detach(), *loss_and_gradients(m, (made * made.detach().cos()).sum())]

    traced = Traced(lambda m: lambda x: step(m, x), nn.Linear(6, 3), BATCHES[0], double=False)
    traced.check([BATCHES[0]], CLUSTERS, rtol=1e-6)


def fake_quantize(**settings: Any) -> Any:
    return quantization.FakeQuantize.with_args(
        observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, reduce_range=False, **settings
    )


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "fused": lambda: quantization.get_default_qat_qconfig("x86"),
    "fused, whole tensors": lambda: quantization.get_default_qat_qconfig("qnnpack"),
    "modules": lambda: quantization.get_default_qat_qconfig("x86", version=0),
    "modules, symmetric": lambda: quantization.QConfig(
        activation=fake_quantize(dtype=torch.quint8, qscheme=torch.per_tensor_symmetric),
        weight=quantization.default_weight_fake_quant,
    ),
}


def prepared(configuration: str) -> nn.Module:
    model: Any = nn.Sequential(
        quantization.QuantStub(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), quantization.DeQuantStub()
    )
    model.qconfig = CONFIGURATIONS[configuration]()
    made: nn.Module = quantization.prepare_qat(model.train())
    return made


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_models(configuration: str) -> None:
    torch.manual_seed(0)
    model = prepared(configuration)
    model(BATCHES[2])  # gives the statistics of channels their sizes

    def step(m: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        results = loss_and_gradients(m, m(x).square().mean())
        with torch.no_grad():
            for parameter in m.parameters():
                parameter.mul_(0.9)
        return results

    traced = Traced(lambda m: lambda x: step(m, x), model, BATCHES[0], double=False)
    traced.check(BATCHES, CLUSTERS, rtol=1e-5)


def test_without_observation() -> None:
    model = prepared("fused")
    model(BATCHES[2])
    model.apply(quantization.disable_observer)
    for switch in (quantization.enable_fake_quant, quantization.disable_fake_quant):
        model.apply(switch)
        traced = Traced(lambda m: lambda x: loss_and_gradients(m, m(x).sum()), model, BATCHES[0], double=False)
        traced.check(BATCHES, CLUSTERS, rtol=1e-5)


@pytest.mark.parametrize("configuration", ["fused", "modules"])
def test_statistics_of_channels_without_a_size(configuration: str) -> None:
    with pytest.raises(TraceError, match=r"keep their sizes"):
        Traced(lambda m: m, prepared(configuration), BATCHES[0], double=False)
