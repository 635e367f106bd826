"""A small model of attention, and restartable input for it; workers import this."""

from collections.abc import Iterator
from typing import Any

import torch
from cerebras.pytorch.lib import cerebras_pytorch_lib
from cerebras.pytorch.utils.kernel import kernel_annotater
from cerebras.pytorch.utils.num_kv_groups import groups_annotater
from torch import nn

import cerebras.pytorch as cstorch
from cerebras.pytorch.core.annotation import AnnotationMode, create_annotation
from cerebras.pytorch.utils.data import RestartableDataLoader

__all__ = ["AnnotationMode", "Input", "Model", "create_annotation"]

WIDTH, LENGTH, CLASSES = 8, 4, 3


class Input(RestartableDataLoader):
    """Batches that depend on their number only."""

    def __init__(self, batch_size: int, batches: int) -> None:
        self.batch_size = batch_size
        self.batches = batches
        self.next_batch = 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.next_batch % self.batches)
            self.next_batch += 1
            rows = torch.randn(self.batch_size, LENGTH, WIDTH, generator=generator)
            yield {"rows": rows, "labels": (rows.sum((1, 2)) > 0).to(torch.int64) + (rows[:, 0, 0] > 1)}
            if self.next_batch % self.batches == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"next_batch": self.next_batch}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        self.next_batch = state_dict["next_batch"]

    def aggregate_state_dict(self, worker_states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"next_batch": max(state["next_batch"] for state in worker_states)}

    def deaggregate_state_dict(self, aggregated_state_dict: dict[str, Any], strict: bool = True) -> dict[str, Any]:
        return aggregated_state_dict


class Model(nn.Module):
    """One block of attention, and an accuracy of evaluations."""

    def __init__(self, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(WIDTH, CLASSES)
        self.accuracy = cstorch.metrics.AccuracyMetric(name="eval/accuracy")

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        shape = (*batch["rows"].shape[:2], self.heads, WIDTH // self.heads)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in self.into(batch["rows"]).chunk(3, -1))
        product = groups_annotater(self.heads)(torch.matmul)
        scores = product(query, key.transpose(-1, -2)) / shape[-1] ** 0.5
        cerebras_pytorch_lib.set_attribute(scores, "scores", True)
        attended = kernel_annotater("attention")(torch.matmul)(scores.softmax(-1), value)
        hidden = self.norm(self.dropout(attended.transpose(1, 2).flatten(2)) + batch["rows"])
        logits = self.out(hidden.mean(1))
        if not self.training:
            self.accuracy(labels=batch["labels"], predictions=logits.argmax(-1))
        return nn.functional.cross_entropy(logits, batch["labels"])
