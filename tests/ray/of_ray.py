"""A step whose result is what the input function finds on Ray alone: a module, and a variable of the environment."""

import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


def batches() -> DataLoader:
    try:
        import only_on_ray  # type: ignore[import-not-found]  # of the runtime environment

        value = only_on_ray.VALUE * float(os.environ["FACTOR_OF_RAY"])
    except ModuleNotFoundError:
        value = 0.0  # in the script, which wants to know shapes
    return DataLoader(TensorDataset(torch.full((16, 4), value)), batch_size=8)


def main() -> None:
    backend = cstorch.backend("CSX", artifact_dir=Path("artifacts"))
    with backend.device:
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.ones_(model.weight)
    compiled = cstorch.compile(model, backend)

    @cstorch.trace
    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        return compiled(batch[0]).mean()

    @cstorch.step_closure
    def show(mean: torch.Tensor) -> None:
        print(float(mean), flush=True)

    loader = cstorch.utils.data.DataLoader(batches)
    with torch.no_grad():
        for batch in cstorch.utils.data.DataExecutor(loader, num_steps=2):
            show(step(batch))


if __name__ == "__main__":
    main()
