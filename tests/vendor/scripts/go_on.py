"""Trains with a loader that can be resumed, from a checkpoint if there is one, by the vendor's client.

python go_on.py OUT STEPS [--csx N]; saves at the end, as OUT/STEPS.mdl, and prints the losses as a line of JSON.
"""

import argparse
import json
import pathlib

import networks
import torch.nn.functional as F
from batches import restartable_input_fn

import cerebras.pytorch as cstorch

parser = argparse.ArgumentParser()
parser.add_argument("out", type=pathlib.Path)
parser.add_argument("steps", type=int)
parser.add_argument("--csx", type=int, default=1)
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)
cluster = cstorch.distributed.ClusterConfig(num_csx=options.csx, python_paths=[str(pathlib.Path(__file__).parent)])
backend = cstorch.backend("CSX", artifact_dir=str(options.out / "artifacts"), cluster_config=cluster)
network = networks.make("vectors")
model = cstorch.compile(network, backend)
optimizer = cstorch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
loader = cstorch.utils.data.DataLoader(restartable_input_fn, "vectors")
done = sorted(options.out.glob("*.mdl"))
if done:
    state = cstorch.load(done[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
losses = []


@cstorch.trace
def train(batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1].long())
    loss.backward()
    optimizer.step()
    return loss


@cstorch.step_closure
def note(loss):
    losses.append(float(loss))


@cstorch.checkpoint_closure
def save():
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    cstorch.save(state, options.out / f"{options.steps}.mdl")


for batch in cstorch.utils.data.DataExecutor(loader, num_steps=options.steps, checkpoint_steps=options.steps):
    note(train(batch))
    save()
print(json.dumps({"losses": losses}))
