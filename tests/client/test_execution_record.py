"""The record of an execution in the artifact folder: what it is, for people and commands that look for it."""

import re
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch
from waferbox.execution_folders import Stage, find_executions


def samples() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4)


def test_training_and_evaluation(tmp_path: Path) -> None:
    backend = cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True)
    with backend.device:
        model = nn.Linear(4, 3)
    compiled = cstorch.compile(model, backend)
    optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)

    @cstorch.trace
    def training_step(batch: list[torch.Tensor]) -> torch.Tensor:
        loss = compiled(batch[0]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @cstorch.trace
    def eval_step(batch: list[torch.Tensor]) -> torch.Tensor:
        return compiled(batch[0]).sum()

    for step in (training_step, eval_step):
        model.train(step is training_step)
        executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(samples), num_steps=1)
        for batch in executor:
            step(batch)
    training, evaluation = (each.record for each in find_executions(tmp_path))
    assert training is not None
    assert evaluation is not None
    assert (training.stage, evaluation.stage) == (Stage.TRAIN, Stage.EVAL)
    assert (training.model, training.steps, training.rows, training.num_csx) == ("Linear", 1, 4, 1)
    assert re.fullmatch(r"training_step \(\S*test_execution_record.py:\d+\)", training.function)
    assert re.fullmatch(r"samples \(\S*test_execution_record.py:\d+\) of TensorDataset", training.loader)
    assert (training.half, training.plan) == ("", "")
