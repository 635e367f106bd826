"""Traces the models of layer_cases.py by the vendor's client: the text of each, and what its CPU backend makes of it.

python trace_layers.py OUT [NAME...]

Writes for each, in a folder OUT/NAME: step.mlir where the client could lower the step (without a cluster), record.pt
with the first weights, the batches, and the numbers of its CPU backend, and client.txt with what it printed. Two
forked processes for each: a process of the client has one backend.

python trace_layers.py --cluster OUT NAME runs one of them on a cluster, and prints its outputs as a line of JSON.
"""

import json
import os
import pathlib
import sys
import traceback

import numpy as np
import torch
from layer_cases import BATCH, CASES, STEPS, batches, draw
from torch import nn

import cerebras.pytorch as cstorch


class Probe(nn.Module):
    """A model, with weights before it (each element's own) and behind it, so that every gradient counts."""

    def __init__(self, case):
        super().__init__()
        self.inner = case.make()
        scales, features = [], 0
        for shape, dtype in case.inputs:
            if dtype == "float32":
                scales.append(nn.Parameter(torch.empty(shape)))
        self.scales = nn.ParameterList(scales)
        self.eval()
        with torch.no_grad():
            made = self.inner(
                *[
                    torch.from_numpy(array).to(getattr(torch, dtype))
                    for array, (_, dtype) in zip(draw(case, 0), case.inputs, strict=True)
                ]
            )
        features = made.numel() // BATCH if made.dim() and made.shape[0] == BATCH else 0
        self.head = nn.Parameter(torch.empty(features, 3)) if features and case.trains else None
        self.train()

    def forward(self, *inputs):
        scales = iter(self.scales)
        made = self.inner(*[x * next(scales) if x.dtype == torch.float32 else x for x in inputs])
        if self.head is None:
            return made, made.float().mean()
        return made, (made.float().reshape(BATCH, -1) @ self.head).square().mean()


def make(case):
    network = Probe(case)
    draws = np.random.RandomState(1)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            norm = parameter.dim() == 1 and name.endswith("weight")
            spread = 1 / parameter.shape[0] ** 0.5 if name == "head" else 0.4
            values = draws.normal(0, spread, parameter.shape) + (1 if norm or name.startswith("scales") else 0)
            parameter.copy_(torch.from_numpy(np.asarray(values, dtype="f")))
    return network.train(not case.evaluates)


def run(name, folder, kind):
    case = CASES[name]
    network = make(case)
    first = {key: value.detach().clone() for key, value in network.state_dict().items()}
    if kind == "cluster":
        paths = [str(pathlib.Path(__file__).parent)]
        cluster = cstorch.distributed.ClusterConfig(num_csx=1, python_paths=paths)
        backend = cstorch.backend("CSX", artifact_dir=str(folder), cluster_config=cluster)
    elif kind == "csx":
        backend = cstorch.backend("CSX", artifact_dir=str(folder), validate_only=True)
    else:
        backend = cstorch.backend("CPU", artifact_dir=str(folder / "cpu"))
    model = cstorch.compile(network, backend)
    trained = case.trains and any(True for _ in network.parameters())
    optimizer = cstorch.optim.SGD(network.parameters(), lr=0.002) if trained else None
    outputs = []

    @cstorch.trace
    def step(batch):
        made, loss = model(*batch)
        if trained:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return made, loss

    @cstorch.step_closure
    def note(loss):
        outputs.append([loss.detach().clone()])

    @cstorch.step_closure
    def note_both(loss, made):
        outputs.append([loss.detach().clone(), made.detach().clone()])

    loader = cstorch.utils.data.DataLoader(batches, name)
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=1 if kind == "csx" else STEPS):
        made, loss = step(batch)
        if case.shows:
            note_both(loss, made)
        else:
            note(loss)
    if kind == "cluster":
        print(json.dumps([[values.flatten().tolist() for values in step] for step in outputs]))
    if kind == "cpu":
        last = {key: value.detach().clone() for key, value in network.state_dict().items()}
        record = {"first": first, "last": last, "outputs": outputs, "batches": batches(name)}
        torch.save(record, folder / "record.pt")


def in_child(name, folder, kind):
    """Whether it could be done."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return status == 0
    log = os.open(folder / f"{kind}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    code = 1
    try:
        run(name, folder, kind)
        code = 0
    except Exception:  # noqa: BLE001 - whatever it is, it is a result
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    if sys.argv[1] == "--cluster":
        run(sys.argv[3], pathlib.Path(sys.argv[2]), "cluster")
        return
    out, names = pathlib.Path(sys.argv[1]).absolute(), sys.argv[2:] or CASES
    for name in names:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        done = [in_child(name, folder, kind) for kind in ("cpu", "csx")]
        for text in folder.glob("executors/*/cirh.mlir"):
            text.rename(folder / "step.mlir")
        print(name, *done, (folder / "step.mlir").exists(), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
