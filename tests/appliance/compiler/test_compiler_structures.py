"""Steps of unusual structure on simulated clusters: what is sent where and when, and what may be overwritten when."""

from typing import Any

import pytest
import torch
from compiled_steps import BATCH, CLUSTERS, Step
from torch import nn
from torch.nn import functional as F
from wide_steps import WIDE, Wide, check, rows, sgd, trained

from wsc.v1 import plan_pb2

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# -- the order of messages, and buffers that are read in place


def test_large_weights_are_read_in_place_under_every_order() -> None:
    def build(model: Any) -> Step:
        return lambda x: trained(model, model(x).pow(2).mean())

    check(build, Wide(3, state=False), clusters=CLUSTERS, seeds=range(8))


def test_weights_are_loaded_again_for_the_backward_pass() -> None:
    def build(model: Any) -> Step:
        return lambda x: trained(model, model(x).pow(2).mean())

    settings: dict[str, Any] = {"prefetch_layers": 1, "drops_weights": True}
    traced = check(build, Wide(4, state=False), clusters=[(1, 1), (2, 2)], **settings)
    plan = traced.plan(2, 1, **settings)
    received = [i.receive.group for i in plan.wafer.instructions if i.WhichOneof("kind") == "receive"]
    assert len(received) > len(set(received))


def test_an_output_leaves_before_the_last_update() -> None:
    """At the end of a step the next weights wait for what MemoryX does."""

    def build(model: Any) -> Step:
        return lambda x: trained(model, model(x).pow(2).mean())

    (shard,) = check(build, Wide(3, state=False), clusters=[(2, 1)]).plan(2, 1).memoryx
    outputs = {group.id for group in shard.groups if group.kind == plan_pb2.GROUP_KIND_OUTPUT}
    kinds = [i.WhichOneof("kind") for i in shard.instructions]
    (sent,) = [n for n, i in enumerate(shard.instructions) if kinds[n] == "send" and i.send.group in outputs]
    assert "receive" in kinds[sent:]
    assert "run" in kinds[sent:]


def test_a_late_weight_is_a_round_trip() -> None:
    """A statistic of the batch, times a weight: MemoryX's work, on whose result the wafers wait."""

    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            mean = (x.mean(0) * model.layers[0].bias).tanh()
            return trained(model, ((x - mean) @ model.layers[0].weight).pow(2).mean() + model(x).sum())

        return step

    check(build, Wide(2, state=False), clusters=CLUSTERS)


def test_a_late_weight_that_depends_on_another_shard() -> None:
    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            norms = model.layers[0].weight.norm() * x.sum() + model.layers[1].weight.norm()
            return trained(model, (x @ (model.layers[0].weight * norms.tanh())).pow(2).mean() + model(x).sum())

        return step

    check(build, Wide(2, state=False), clusters=CLUSTERS)


def test_computed_weights_are_sent_each_step() -> None:
    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            first, second = model.layers
            weight = first.weight / first.weight.norm(dim=1, keepdim=True)
            return trained(model, F.linear(F.linear(x, weight, first.bias), second.weight, second.bias).pow(2).mean())

        return step

    check(build, Wide(2, state=False), clusters=CLUSTERS, seeds=range(5))


def test_a_hand_written_batch_norm() -> None:
    class Model(nn.Module):
        mean: torch.Tensor
        variance: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 3)
            self.scale, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("variance", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            mean, variance = x.mean(0), x.var(0, correction=0)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(mean, alpha=0.1)
                self.variance.mul_(0.9).add_(variance, alpha=0.1)
            return self.last(torch.relu((x - mean) * torch.rsqrt(variance + 1e-5) * self.scale + self.shift))

    def build(model: Any) -> Step:
        return lambda x: trained(model, model(x).pow(2).mean())

    check(build, Model(), rows(3, 7), CLUSTERS)


def test_a_weight_that_no_gradient_reaches_may_still_decay() -> None:
    """Nothing that the shard of such a weight waits for depends on it: it must hear when the wafers have read it."""

    def build(model: Any) -> Step:
        model.layers[0].weight.requires_grad_(False)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                model.layers[0].weight.mul_(0.5)
            sgd(parameter for parameter in model.parameters() if parameter.requires_grad)
            return loss.detach()

        return step

    check(build, Wide(2, state=False), clusters=CLUSTERS, seeds=range(6))


def test_weights_that_change_in_an_evaluation() -> None:
    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            result = model(x).sum()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            return result.detach()

        return step

    check(build, Wide(2, state=False), clusters=CLUSTERS, seeds=range(6))


# -- outputs


def test_an_evaluation_changes_nothing() -> None:
    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> Any:
            with torch.no_grad():
                scores = model(x)
            return scores, scores.argmax(1), (scores > 0).sum(), scores[:, 0] > 0

        return step

    traced = check(build, Wide(1, state=False), clusters=CLUSTERS)
    plan = traced.plan(2, 2)
    assert not [i for part in plan.memoryx for i in part.instructions if i.WhichOneof("kind") in ("run", "commit")]


def test_outputs_of_sequence_first_models_are_gathered() -> None:
    def build(model: Any) -> Step:
        def step(batch: torch.Tensor) -> Any:
            x = batch.transpose(0, 1)  # (time, batch, features)
            scores = model(x.reshape(-1, x.shape[2]))
            return trained(model, scores.pow(2).mean()), scores.detach(), scores.detach().reshape(4, BATCH, 5), x

        return step

    batches = [torch.randn(BATCH, 4, 6, dtype=torch.float64) for _ in range(2)]
    plan = check(build, nn.Linear(6, 5), batches, CLUSTERS).plan(2)
    assert [(output.dim, output.outer) for output in plan.coordinator.outputs if output.gathered] == [
        (0, 4),
        (1, 1),
        (1, 1),
    ]


def test_inputs_constants_and_states_may_be_outputs() -> None:
    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> Any:
            before = [layer.weight.detach().clone() for layer in model.layers]
            loss = trained(model, model(x).pow(2).mean())
            after = [layer.weight.detach() for layer in model.layers]
            return loss, x, before, after, model.table, model.table.sum(), torch.ones_like(x[0]), model.count

        return step

    check(build, Wide(), clusters=CLUSTERS)


def test_an_output_is_the_value_that_the_trace_says() -> None:
    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> Any:
            with torch.no_grad():
                first = model.count + 0
                model.count.add_(x.sum())
                second = model.count + 0
                model.table.add_(model.count)
                table = model.table[0] + 0
                model.table.mul_(0.5)
                model.count.mul_(0.25)
            return first, second, model.count, table, model.table[0], x.sum()

        return step

    check(build, Wide(1), clusters=CLUSTERS)


# -- state


def test_states_that_swap() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in (
                ("a", (WIDE, WIDE)),
                ("b", (WIDE, WIDE)),
                ("c", ()),
                ("d", ()),
                ("e", (3,)),
                ("f", (3,)),
            ):
                self.register_buffer(name, torch.randn(shape))

    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> Any:
            result = (x @ model.a).sum() + (x @ model.b).pow(2).sum() + model.c
            for left, right in ((model.a, model.b), (model.c, model.d)):
                kept = left.clone()
                left.copy_(right)
                right.copy_(kept)
            model.e.copy_(model.f)
            model.f.fill_(2.0)
            return result

        return step

    check(build, Model(), clusters=CLUSTERS, seeds=range(4))


def test_a_state_may_become_a_reduced_value_or_a_broadcast_one() -> None:
    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> Any:
            with torch.no_grad():
                model.table.copy_(x.t() @ x)
                model.count.copy_(model.layers[0].weight.norm())
                model.layers[0].bias.copy_(x.sum().expand(WIDE))
            return model.count * 2

        return step

    check(build, Wide(1), clusters=CLUSTERS)


def test_numbers_travel_between_shards() -> None:
    """A norm over all weights, each shard's copy of a number, and a state that is a norm of another shard's weight."""

    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> Any:
            loss = model(x).pow(2).mean()
            loss.backward()
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with torch.no_grad():
                model.count.copy_(model.layers[1].weight.norm() + model.count)
                model.table.mul_(torch.tanh(total) + model.layers[0].weight.norm() * 0.01)
            sgd(model.parameters())
            return loss.detach(), total, model.count

        return step

    check(build, Wide(3), clusters=CLUSTERS)


def test_tied_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 6, padding_idx=1)
            self.middle = nn.Linear(6, 6)
            self.last = nn.Linear(6, 9, bias=False)
            self.last.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.middle(self.embedding(ids).mean(1))))

    def build(model: Any) -> Step:
        def step(batch: Any) -> Any:
            ids, labels = batch
            return trained(model, F.cross_entropy(model(ids), labels))

        return step

    batches = [(torch.randint(9, (BATCH, 4)), torch.randint(9, (BATCH,))) for _ in range(3)]
    plan = check(build, Model(), batches, CLUSTERS).plan(2)
    # The two gradients of the tied weight are added by the wafers, and travel once.
    reductions = {g.id: g for g in plan.wafer.groups if g.kind == plan_pb2.GROUP_KIND_REDUCTION}
    shapes = [tuple(member.type.shape) for group in reductions.values() for member in group.members]
    assert shapes.count((9, 6)) == 1


def test_layer_norm() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)
            self.plain = nn.LayerNorm(6, elementwise_affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.plain(F.gelu(self.norm(self.first(x)))))

    def build(model: Any) -> Step:
        return lambda x: trained(model, model(x).pow(2).mean())

    check(build, Model(), rows(3, 7))


def test_attention_over_time() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.last = nn.Linear(6, 18), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).split(6, -1)
            scores = torch.bmm(q, k.transpose(1, 2)) / 6**0.5
            return self.last(torch.bmm(F.softmax(scores, -1), v))

    def build(model: Any) -> Step:
        return lambda x: trained(model, model(x).pow(2).mean())

    check(build, Model(), [torch.randn(BATCH, 4, 6, dtype=torch.float64) for _ in range(2)])


def test_one_wafer_may_mix_samples() -> None:
    def build(model: Any) -> Step:
        def step(x: torch.Tensor) -> Any:
            scores = model(x) @ model(x).t()
            loss = trained(model, F.softmax(scores, 0).pow(2).sum() + scores.flip(0).cumsum(0)[3].sum())
            with torch.no_grad():
                model.table[:BATCH].copy_(x)
            return loss, scores.sort(0)[0].detach(), model.table[0, 0]

        return step

    check(build, Wide(1), clusters=[(1, 1), (1, 2)])
