"""The seconds of a step of a small model on a cluster: run by `python -m benchmarks.prediction`, alone it computes.

python -m benchmarks.prediction_training --model fc|gpt|wide --wafers N --folder FOLDER
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

STEPS: Final = 40
WARM_STEPS: Final = 10


def network(model: str) -> Any:
    """The model, its loss, and a batch of one wafer."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from benchmarks.gpt import GPT, GPTSettings, token_loss

    match model:
        case "fc":
            layers = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
            return layers, F.cross_entropy, (torch.randn(64, 784), torch.zeros(64, dtype=torch.int64))
        case "wide":
            wide = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())))
            return wide, F.mse_loss, (torch.randn(32, 1024), torch.randn(32, 1024))
        case _:
            settings = GPTSettings(vocabulary=1024, width=256, layers=4, heads=4, sequence=64)
            tokens = torch.randint(settings.vocabulary, (4, settings.sequence))
            return GPT(settings), token_loss, (tokens, tokens)


def train(model: str, wafers: int, folder: Path) -> None:
    """The script: prints the seconds of a step."""
    import cerebras.pytorch as cstorch

    config = cstorch.distributed.ClusterConfig(num_csx=wafers)
    backend = cstorch.backend("CSX", artifact_dir=folder / "artifacts", cluster_config=config)
    with backend.device:
        net, loss_of, batch = network(model)
    compiled = cstorch.compile(net, backend)
    optimizer = cstorch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    times: list[float] = []

    @cstorch.trace
    def training_step(batch: Any) -> Any:
        loss = loss_of(compiled(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    @cstorch.step_closure
    def keep(loss: Any) -> None:
        loss.item()
        times.append(time.perf_counter())

    loader = cstorch.utils.data.DataLoader(make_input, model, wafers)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=STEPS):
        keep(training_step(batch))
    print(json.dumps({"step_seconds": (times[-1] - times[WARM_STEPS - 1]) / (STEPS - WARM_STEPS)}))


def make_input(model: str, wafers: int) -> Any:
    """The same batch again and again."""
    import torch
    from torch.utils.data import DataLoader

    _, _, parts = network(model)
    batch = tuple(torch.cat([part] * wafers) for part in parts)

    return DataLoader([batch] * STEPS, batch_size=None)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="fc")
    parser.add_argument("--wafers", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    train(options.model, options.wafers, options.folder)


if __name__ == "__main__":
    main()
