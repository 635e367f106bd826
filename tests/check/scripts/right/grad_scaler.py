"""Mixed precision with float16 and a loss scale that is too large in the first steps, and adapts itself."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(6)
cstorch.amp.set_half_dtype("float16")
cstorch.amp.enable_mixed_precision()
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = cstorch.amp.GradScaler(loss_scale="dynamic", init_scale=2.0**40)


def input_fn():
    return DataLoader(TensorDataset(torch.randn(64, 16), torch.randint(4, (64,))), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    cstorch.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=1.0)
    return loss


@cstorch.checkpoint_closure
def save(step):
    states = {"model": model, "optimizer": optimizer, "scaler": scaler}
    cstorch.save({name: state.state_dict() for name, state in states.items()}, f"model_{step}.mdl")


loader = cstorch.utils.data.DataLoader(input_fn)
executor = cstorch.utils.data.DataExecutor(loader, num_steps=6, checkpoint_steps=3)
for batch in executor:
    training_step(batch)
    save(executor.user_iteration)
