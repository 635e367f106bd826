"""As scripts of release 2.1 are written: cerebras_pytorch, CSConfig, learning rates in torch's way."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras_pytorch as cstorch

torch.manual_seed(18)
backend = cstorch.backend("CSX", artifact_dir="model_dir")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, batch):
        features, _ = batch
        return F.log_softmax(self.fc2(F.relu(self.fc1(features))), dim=1)


with backend.device:
    model = Net()
loss_fn = nn.NLLLoss()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.configure_optimizer(optimizer_type="SGD", params=model.parameters(), lr=0.01, momentum=0.9)
scheduler = cstorch.optim.configure_lr_scheduler(
    optimizer, {"scheduler": "Linear", "initial_learning_rate": 0.01, "end_learning_rate": 0.001, "total_iters": 10}
)


def input_fn(batch_size):
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)


@cstorch.trace
def training_step(batch):
    _, labels = batch
    loss = loss_fn(compiled(batch), labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss


@cstorch.step_closure
def log_loss(loss):
    print("loss", loss.item(), "at step", executor.user_iteration)


loader = cstorch.utils.data.DataLoader(input_fn, 16)
config = cstorch.utils.CSConfig(num_csx=1)
executor = cstorch.utils.data.DataExecutor(loader, num_steps=5, checkpoint_steps=5, cs_config=config)
for batch in executor:
    log_loss(training_step(batch))
