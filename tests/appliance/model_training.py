"""Every small model in training: what plain torch makes of it, and what a simulated cluster makes."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from compiled_steps import Getters, Step, Traced, one_at_a_time, simulate
from counted_random import CountedRandom
from model_zoo_contrastive import Towers, clip, pairs
from model_zoo_images import DLRM, Perceptron, ResNet, ViT, clicks, images
from model_zoo_text import MODELS, Bert, TextModel
from pipeline_simulator import PipelineSimulation
from plan_simulator import Simulation
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from appliance.compiler.pipeline import Precision
from cstorch._internal.state import Registry, named_getters
from cstorch._internal.tracing import COUNTER
from cstorch.optim import SGD, AdamW, Optimizer

STEPS, CLIP = 3, 0.5
MODEL = "state.model."


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> Optimizer:
    """For models with biases that a softmax or a batch norm takes out again: their gradients are rounding noise, which
    AdamW would turn into steps of full size, in torch as here."""
    return SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Trained:
    """A model, its loss, the batches that it is trained on, and by what."""

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    batch: Callable[[], Any]
    optimizer: Callable[[Any], Optimizer]


def of_text(
    model: TextModel, optimizer: Callable[[Any], Optimizer], make: Callable[[], nn.Module] | None = None
) -> Any:
    return Trained(make or model.make, lambda network, batch: model.loss(network, batch)[0], model.batch, optimizer)


def of_classes(make: Callable[[], nn.Module], batches: Any, optimizer: Callable[[Any], Optimizer]) -> Trained:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(*inputs) if isinstance(inputs, tuple) else model(inputs), labels)

    def batch() -> Any:
        return tree_map_only(torch.Tensor, _single, batches(1)[0])

    return Trained(make, loss, batch, optimizer)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


TRAINED: Mapping[str, Trained] = {
    "mlp": of_classes(Perceptron, images, adamw),
    "cnn": of_classes(lambda: ResNet(dropout=0.25), images, sgd),
    "gpt2": of_text(MODELS["gpt2"], sgd),
    "bert": of_text(MODELS["bert"], sgd, lambda: Bert(dropout=0.1)),
    "t5": of_text(MODELS["t5"], adamw),
    "llama": of_text(MODELS["llama"], adamw),
    "llama-built-in": of_text(MODELS["llama-built-in"], adamw),
    "vit": of_classes(ViT, images, adamw),
    "dlrm": of_classes(DLRM, clicks, adamw),
    "clip": Trained(Towers, lambda model, batch: clip(model, *batch), pairs, adamw),
}


def with_twice_the_rows(name: str) -> Trained:
    """The same on batches of 24 rows, which more micro-batches divide."""
    trained = TRAINED[name]

    def batch() -> Any:
        return tree_map(lambda first, second: torch.cat([first, second]), trained.batch(), trained.batch())

    return dataclasses.replace(trained, batch=batch)


IN_MICRO_BATCHES: Mapping[str, Trained] = {
    f"{name} of 24 rows": with_twice_the_rows(name) for name in ("mlp", "cnn", "gpt2", "bert", "t5", "dlrm", "clip")
}
_ALL: Mapping[str, Trained] = {**TRAINED, **IN_MICRO_BATCHES}


def training(name: str, autocast: torch.dtype | None = None) -> Callable[[Any], tuple[Step, Getters]]:
    """Forward and loss (under torch's autocast, if a type is given), backward, clipping and the optimizer."""
    trained = _ALL[name]

    def build(model: Any) -> tuple[Step, Getters]:
        model.train()
        registry = Registry()
        optimizer = trained.optimizer(model.parameters())
        registry.register("optimizer", optimizer)

        def step(batch: Any) -> torch.Tensor:
            with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                loss = trained.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            return loss.detach()

        return step, dict(named_getters(registry))

    return build


@dataclass(frozen=True)
class Run:
    """The losses of some steps, and parameters and buffers after them."""

    losses: torch.Tensor
    states: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, losses: Sequence[torch.Tensor], states: Mapping[str, torch.Tensor]) -> "Run":
        of_model = {name: value.detach().clone() for name, value in states.items() if name.startswith(MODEL)}
        floats = [value for value in (*losses, *of_model.values()) if value.is_floating_point()]
        assert {value.dtype for value in floats} == {torch.float32}
        return cls(torch.stack(list(losses)), of_model)


@functools.cache
def traced(name: str) -> Traced:
    torch.manual_seed(0)
    return Traced(training(name), _ALL[name].make(), _ALL[name].batch(), double=False)


@functools.cache
def start(name: str, seed: int) -> tuple[nn.Module, list[Any]]:
    """Another network, with other batches, for each seed."""
    torch.manual_seed(seed)
    return _ALL[name].make(), [_ALL[name].batch() for _ in range(STEPS)]


@functools.cache
def plain(name: str, autocast: torch.dtype | None, seed: int) -> Run:
    """What torch makes of a seed. Its random operations draw the cluster's numbers."""
    network, batches = start(name, seed)
    network = copy.deepcopy(network)
    step, _ = training(name, autocast)(network)
    losses = []
    numbers = CountedRandom(counter(seed))
    is_random = COUNTER in traced(name).initial  # else every operation would be looked at for nothing
    for batch in batches:
        with numbers if is_random else contextlib.nullcontext():
            losses.append(step(batch))
        numbers.next_step()
    return Run.of(losses, states_of(name, network))


def simulated(
    name: str, precision: Precision | None, wafers: int, seed: int, rounds: bool = False, **settings: Any
) -> Run:
    """What a simulated cluster of so many wafers, and as many shards, makes of a seed.

    rounds: micro-batches go through the layers one at a time; settings: of the target.
    """
    network, batches = start(name, seed)
    simulation = _simulation(name, precision, wafers, rounds, **settings)
    simulation.states = {**traced(name).initial, **states_of(name, network)}
    if COUNTER in simulation.states:
        simulation.states[COUNTER] = torch.tensor(counter(seed))
    outputs = simulation.run([tree_leaves(batch) for batch in batches], seed)
    return Run.of([value for output in outputs for value in output.values()], simulation.states)


def counter(seed: int) -> int:
    """Of random numbers, in the first step."""
    return 1000 * seed


@functools.cache
def _simulation(
    name: str, precision: Precision | None, wafers: int, rounds: bool, **settings: Any
) -> Simulation | PipelineSimulation:
    with one_at_a_time() if rounds else contextlib.nullcontext():
        plan = traced(name).plan(wafers, wafers, precision=precision, **settings)
    assert not rounds or plan.wafer.micro_batches_at_once == 1
    return simulate(plan, traced(name).initial)


def states_of(name: str, network: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that are states of the step."""
    values = {f"{MODEL}{key}": value for key, value in [*network.named_parameters(), *network.named_buffers()]}
    return {key: value for key, value in values.items() if key in traced(name).initial}


def assert_equal(ours: Run, expected: Run, losses: float, states: float) -> None:
    """Within a relative error of losses, and of states relative to the largest element of each."""
    torch.testing.assert_close(ours.losses, expected.losses, rtol=losses, atol=0)
    assert ours.states.keys() == expected.states.keys()
    for key, value in expected.states.items():
        largest = float(value.abs().max())
        torch.testing.assert_close(
            ours.states[key], value, rtol=0, atol=states * largest, msg=partial("{}: {}".format, key)
        )
