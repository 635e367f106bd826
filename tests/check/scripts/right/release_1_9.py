"""As scripts of release 1.9 are written: configure, compile_step, a device called `xla`, an iterated loader."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras_pytorch.experimental as cstorch

cstorch.configure(model_dir="model_dir", checkpoint_steps=3, num_csx=1, seed=19)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
compiled = cstorch.compile(model, backend="wse_ws")
assert all(parameter.device.type == "xla" for parameter in model.parameters())
optimizer = cstorch.optim.configure_optimizer(optimizer_type="SGD", params=model.parameters(), lr=0.1, momentum=0.9)


def input_fn(batch_size):
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), batch_size, drop_last=True)


@cstorch.compile_step
def training_step(batch):
    features, labels = batch
    offsets = torch.arange(4, device=features.device) + torch.ones(4, device="xla")
    loss = F.cross_entropy(compiled(features) * offsets, labels)
    cstorch.amp.optimizer_step(loss, optimizer, max_gradient_norm=1.0)
    return loss


@cstorch.step_closure
def report(loss):
    print("loss", loss.item())


for batch in cstorch.utils.data.DataLoader(input_fn, batch_size=16, num_steps=4):
    report(training_step(batch))
