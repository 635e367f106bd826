"""A small model that compares all samples with all samples."""

from typing import Any

import torch
from compiled_steps import BATCH
from torch import nn
from torch.nn import functional as F

IMAGE, TEXT, SPACE = 6, 4, 5


class Towers(nn.Module):
    """Images and texts in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(IMAGE, SPACE), nn.Linear(TEXT, SPACE)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.images(images), dim=-1), F.normalize(self.texts(texts), dim=-1)


def clip(model: Any, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Each image is to find its text, and each text its image."""
    of_images, of_texts = model(images, texts)
    scores = of_texts @ of_images.t() * model.scale.exp()
    labels = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, IMAGE), torch.randn(BATCH, TEXT)
