"""Trains a network, evaluates it, and trains on, by the vendor's client: with checkpoints, whose weights it sums up.

python train.py csx|cpu OUT NETWORK OPTIMIZER [--csx N] [--steps N] [--failing] [--half] [--overflow]

Prints a line of JSON.
"""

import argparse
import json
import pathlib

import networks
import torch
import torch.nn.functional as F
from batches import input_fn

import cerebras.pytorch as cstorch

parser = argparse.ArgumentParser()
parser.add_argument("backend")
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("network")
parser.add_argument("optimizer")
parser.add_argument("--csx", type=int, default=1)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--failing", action="store_true")
parser.add_argument("--half", action="store_true")
parser.add_argument("--overflow", action="store_true")
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
if options.backend == "csx":
    paths = [str(pathlib.Path(__file__).parent)]
    cluster = cstorch.distributed.ClusterConfig(num_csx=options.csx, python_paths=paths, job_labels=["test=live"])
    backend = cstorch.backend("CSX", artifact_dir=str(options.out), cluster_config=cluster)
else:
    backend = cstorch.backend("CPU", artifact_dir=str(options.out))
cstorch.amp.enable_mixed_precision(options.half and options.backend == "csx")

network = networks.make(options.network)
first = {name: float(value.double().abs().sum()) for name, value in network.state_dict().items()}
model = cstorch.compile(network, backend)
scheduler = scaler = None
if options.optimizer == "sgd":
    optimizer = cstorch.optim.SGD(network.parameters(), lr=0.1)
else:
    optimizer = cstorch.optim.AdamW(network.parameters(), lr=0.01, weight_decay=0.1)
    warm = cstorch.optim.lr_scheduler.LinearLR(optimizer, 0.0, 0.02, 3)
    decay = cstorch.optim.lr_scheduler.CosineDecayLR(optimizer, 0.02, 0.0, 4)
    scheduler = cstorch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], milestones=[3])
if options.half and options.backend == "csx":
    largest = 2.0 ** (60 if options.overflow else 15)
    scaler = cstorch.amp.GradScaler("dynamic", init_scale=largest, max_loss_scale=largest)
accuracy = cstorch.metrics.AccuracyMetric("accuracy")
log, files = [], []


def loss_of(logits, labels):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long())


@cstorch.trace
def train(batch):
    loss = loss_of(model(batch[0]), batch[1])
    optimizer.zero_grad()
    if scaler is not None:
        cstorch.amp.optimizer_step(loss, optimizer, scaler)
    else:
        loss.backward()
        optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss


@cstorch.trace
@torch.no_grad()
def evaluate(batch):
    logits = model(batch[0])
    accuracy(labels=batch[1], predictions=logits.argmax(-1).int())
    return loss_of(logits, batch[1])


@cstorch.step_closure
def note(kind, loss):
    log.append([kind, float(loss), float(accuracy) if kind == "eval" else None])
    print(f"{kind}: {float(loss)}", flush=True)


@cstorch.checkpoint_closure
def save():
    files.append(options.out / f"{len(files)}.mdl")  # the client writes over no file
    cstorch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, files[-1])


def run(kind, step, steps, checkpoint_steps=0):
    network.train(kind == "train")
    loader = cstorch.utils.data.DataLoader(input_fn, options.network, options.failing)
    executor = cstorch.utils.data.DataExecutor(loader, num_steps=steps, checkpoint_steps=checkpoint_steps)
    for batch in executor:
        note(kind, step(batch))
        save()


run("train", train, options.steps, checkpoint_steps=max(2, options.steps // 2))
run("eval", evaluate, 2)
run("train", train, options.steps, checkpoint_steps=options.steps)
saved = cstorch.load(files[-1], map_location="cpu")["model"]
weights = {name: float(value.double().abs().sum()) for name, value in saved.items()}
print(json.dumps({"log": log, "weights": weights, "first": first}))
