"""Small models of images and of tables: a perceptron, a residual network, a vision transformer, a recommender."""

import torch
from compiled_steps import BATCH
from torch import nn
from torch.nn import functional as F


class Perceptron(nn.Sequential):
    """Images of 3 x 12 x 12 to scores of 5 classes."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(432, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))


class Residual(nn.Module):
    """Two convolutions with batch norm around a way past them, which is projected where the size changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.past: nn.Module = nn.Identity()
        if stride != 1:
            self.past = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.past(x))


class ResNet(nn.Module):
    """Images of 3 x 12 x 12 to scores of 5 classes."""

    def __init__(self, dropout: float | None = None) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.layers = nn.ModuleList([Residual(4, 4, 1), Residual(4, 6, 2)])
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.groups = nn.GroupNorm(3, 6)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.average = nn.AvgPool2d(2)
        self.dropout = nn.Identity() if dropout is None else nn.Dropout(dropout)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        x = F.relu(self.groups(self.depthwise(x)))
        return self.head(self.dropout(self.average(self.pool(x)).flatten(1)))


class Attention(nn.Module):
    """Written out with products and softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        # Softmax takes no notice of a bias of keys: its gradient would be rounding noise, which Adam makes large.
        self.key = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape

        def split(projection: nn.Linear) -> torch.Tensor:
            return projection(x).view(batch, length, self.heads, -1).transpose(1, 2)

        query, key, value = split(self.query), split(self.key), split(self.value)
        weights = torch.softmax(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5, -1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images of 3 x 12 x 12, in patches of 4 x 4, to scores of 5 classes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 10, width))
        self.layers = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class DLRM(nn.Module):
    """Dense features and bags of categories; every pair of their vectors interacts; scores of 5 classes."""

    pairs: torch.Tensor

    def __init__(self, sizes: tuple[int, ...] = (11, 7, 5), width: int = 4) -> None:
        super().__init__()
        modes = zip(sizes, ("sum", "mean", "max"), strict=True)
        self.sizes = sizes
        self.tables = nn.ModuleList([nn.EmbeddingBag(size, width, mode=mode) for size, mode in modes])
        self.single = nn.Embedding(6, width, padding_idx=0)
        self.bottom = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, width))
        count = len(sizes) + 2
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)
        self.top = nn.Sequential(nn.Linear(width + count * (count - 1) // 2, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        bags = [table(categories[:, :3] % size) for table, size in zip(self.tables, self.sizes, strict=True)]
        vectors = torch.stack([bottom, *bags, self.single(categories[:, 3] % 6)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = self.pairs
        return self.top(torch.cat([bottom, products[:, rows, columns]], 1))


def images(steps: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(BATCH, 3, 12, 12, dtype=torch.float64), _labels()) for _ in range(steps)]


def clicks(steps: int = 2) -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    return [
        ((torch.randn(BATCH, 9, dtype=torch.float64), torch.randint(100, (BATCH, 4))), _labels()) for _ in range(steps)
    ]


def _labels() -> torch.Tensor:
    return torch.randint(5, (BATCH,))
