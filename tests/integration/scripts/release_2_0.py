"""A script of release 2.0: trains, then evaluates, with summaries; the writer prints them."""

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras_pytorch as cstorch

STEPS = 6


class PrintingWriter:
    """Instead of TensorBoard's."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        print(f"{name}: {value!r} {step}", flush=True)


def input_fn(rows: int) -> DataLoader[Any]:
    features = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(features, (features[:, 0] > 0).long()), batch_size=8)


def main() -> None:
    backend = cstorch.backend(sys.argv[1], artifact_dir="artifacts")
    cstorch.manual_seed(0)
    with backend.device:
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.configure_optimizer("SGD", model.parameters(), lr=0.1, momentum=0.9)
    cs_config = cstorch.utils.CSConfig(num_csx=2)

    @cstorch.trace  # type: ignore[untyped-decorator]  # the names of this release have no types
    def training_step(batch: list[torch.Tensor]) -> None:
        loss = nn.functional.cross_entropy(compiled(batch[0]), batch[1])
        cstorch.summarize_scalar("loss", loss)
        cstorch.amp.optimizer_step(loss, optimizer, None, max_gradient_value=0.5)

    loader = cstorch.utils.data.DataLoader(input_fn, 8 * STEPS)
    writer = PrintingWriter()
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS, cs_config=cs_config, writer=writer):
        training_step(batch)

    @cstorch.trace  # type: ignore[untyped-decorator]  # the names of this release have no types
    def evaluation_step(batch: list[torch.Tensor]) -> None:
        cstorch.summarize_scalar("mean", compiled(batch[0]).mean())

    model.eval()
    for batch in cstorch.utils.data.DataExecutor(loader, cs_config=cs_config, writer=writer):
        evaluation_step(batch)


if __name__ == "__main__":
    main()
