"""Batches and results in objects of a script's classes train on a cluster as on the CPU."""

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cluster_rig import RunningCluster
from torch import nn
from torch.nn import functional as F

import cerebras.pytorch as cstorch

ROWS, FEATURES, CLASSES = 8, 6, 3

pytestmark = pytest.mark.cluster


class Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Encoding(UserDict[str, Any]):
    def to(self, device: torch.device) -> "Encoding":
        return Encoding({name: tensor.to(device) for name, tensor in self.items()})


class Ordered(OrderedDict[str, Any]):
    pass


@dataclass(frozen=True, slots=True)
class Sample:
    rows: torch.Tensor
    source: str


@dataclass
class Samples:
    parts: list[Sample]


@dataclass
class Result:
    loss: torch.Tensor
    others: dict[str, torch.Tensor]


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any, torch.device], torch.Tensor]]] = {
    "a dict's subclass": (lambda rows: Attributes(rows=rows), lambda made, device: made.rows),
    "an OrderedDict's subclass": (lambda rows: Ordered(rows=rows), lambda made, device: made["rows"].to(device)),
    "a UserDict": (lambda rows: Encoding({"rows": rows}), lambda made, device: made.to(device)["rows"]),
    "a namespace": (lambda rows: SimpleNamespace(rows=rows), lambda made, device: made.rows),
    "objects in an object": (lambda rows: Samples([Sample(rows, "file")]), lambda made, device: made.parts[0].rows),
}


def input_fn(kind: str) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(ROWS) % CLASSES
    return [Attributes(x=KINDS[kind][0](torch.randn(ROWS, FEATURES, generator=generator)), y=labels) for _ in range(5)]


@pytest.mark.parametrize("num_csx", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_objects_train_as_on_the_cpu(
    cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, num_csx: int
) -> None:
    monkeypatch.setenv("WAFERBOX_MANAGEMENT", cluster.management)
    losses: dict[str, list[float]] = {"CPU": [], "CSX": []}
    for target, seen in losses.items():
        config = cstorch.distributed.ClusterConfig(num_csx=num_csx) if target == "CSX" else None
        backend = cstorch.backend(target, artifact_dir=tmp_path / target, cluster_config=config)
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES)
        compiled = cstorch.compile(model, backend)
        optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)

        @cstorch.trace
        def step(batch: Any, compiled: Any = compiled, optimizer: Any = optimizer, backend: Any = backend) -> Result:
            loss = F.cross_entropy(compiled(KINDS[kind][1](batch.x, backend.torch_device)), batch.y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return Result(loss, {"doubled": loss * 2})

        @cstorch.step_closure
        def report(result: Result, named: Any, seen: list[float] = seen) -> None:
            assert result.others["doubled"].item() == 2 * result.loss.item() == 2 * named.loss.item()
            seen.append(result.loss.item())

        for batch in cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn, kind)):
            result = step(batch)
            report(result, Attributes(loss=result.loss))
        cstorch.close_backend()
    assert len(losses["CSX"]) == 5
    assert losses["CSX"] == pytest.approx(losses["CPU"], rel=1e-6)
    assert len(set(losses["CSX"])) == 5
