"""What state is called."""

import gc

import torch
from torch import nn

from cstorch._internal.state import Registry, named_getters


class Scheduler:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.last_epoch = torch.zeros((), dtype=torch.int64)
        self.initial = 0.1


class Counter(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("total", torch.zeros(()), persistent=False)


def test_names_are_those_of_the_graph() -> None:
    registry = Registry()
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    scheduler, metric = Scheduler(optimizer), Counter("accuracy")
    registry.register("model", model)
    registry.register("optimizer", optimizer)
    registry.register("scheduler", scheduler)
    registry.register("metric", metric)
    assert list(named_getters(registry)) == [
        "state.model.0.weight",
        "state.model.0.bias",
        "state.model.1.weight",
        "state.model.1.bias",
        "state.model.1.running_mean",
        "state.model.1.running_var",
        "state.model.1.num_batches_tracked",
        "state.optimizer.state.0.momentum_buffer",
        "state.optimizer.state.1.momentum_buffer",
        "state.optimizer.state.2.momentum_buffer",
        "state.optimizer.state.3.momentum_buffer",
        "state.schedulers.0.last_epoch",
        "state.metrics.accuracy.0.total",
    ]


def test_an_optimizer_of_a_model_elsewhere_has_no_state() -> None:
    """A script may train another model on the CPU beside that of the cluster."""
    registry = Registry()
    ours, other = nn.Linear(1, 1, device="meta"), nn.Linear(1, 1)
    registry.register("model", ours)
    for model in (ours, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(1, 1)
        registry.register("optimizer", optimizer)
        registry.register("scheduler", scheduler := Scheduler(optimizer))
        model.kept = [optimizer, scheduler]  # type: ignore[assignment]
    assert [name for name in named_getters(registry) if "model" not in name] == [
        "state.optimizer.state.0.momentum_buffer",
        "state.schedulers.0.last_epoch",
    ]


def test_getters_find_a_tensor_that_took_the_place() -> None:
    registry = Registry()
    metric = Counter("a")
    registry.register("metric", metric)
    getter = named_getters(registry)["state.metrics.a.0.total"]
    metric.total = torch.ones(())
    assert getter() is metric.total


def test_numbers_are_not_given_twice() -> None:
    registry = Registry()
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert registry.register("model", first) == 0
    assert registry.register("model", first) == 0
    assert registry.register("model", second) == 1
    del first
    gc.collect()
    assert [name for name in named_getters(registry) if name.startswith("state.model.")] == []
    assert "state.model_1.weight" in named_getters(registry)
    third = nn.Linear(1, 1)
    assert registry.register("model", third) == 2


def test_objects_may_be_collected_while_they_are_listed() -> None:
    """Garbage is collected at any allocation, as that of the list itself."""

    class Cyclic:
        def __init__(self) -> None:
            self.own = self

    registry = Registry()
    kept = [(number, number) for number in range(4000)]  # Python has no free pairs left, so that it allocates more
    thresholds = gc.get_threshold()
    try:
        for allocations in range(1, 60):
            gc.set_threshold(1_000_000)
            for _ in range(40):
                registry.register("metric", Cyclic())
            gc.set_threshold(gc.get_count()[0] + allocations)
            assert all(isinstance(each, Cyclic) for _, each in registry.of_kind("metric"))
    finally:
        gc.set_threshold(*thresholds)
    del kept
    gc.collect()
    assert list(registry.of_kind("metric")) == []
