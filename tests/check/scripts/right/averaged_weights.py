"""An exponential average of the weights, which the step updates without gradients."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, features):
        return self.student(features), self.teacher(features)

    @torch.no_grad()
    def update(self):
        rate = torch.cos(torch.tensor(self.updates, dtype=torch.float32) / 10) / 10  # torch warns of the copy
        self.updates += 1
        for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.mul_(1 - rate).add_(new * rate)


torch.manual_seed(16)
backend = cstorch.backend("CSX")
with backend.device:
    model = Averaged()
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.student.parameters(), lr=0.1, momentum=0.9)


def input_fn():
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), 16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    logits, targets = compiled(features)
    distillation = F.kl_div(logits.log_softmax(-1), targets.softmax(-1), reduction="batchmean")
    loss = F.cross_entropy(logits, labels) + distillation
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.update()
    return loss


loader = cstorch.utils.data.DataLoader(input_fn)
last_step = cstorch.utils.data.Schedule([cstorch.utils.data.Schedule.Range(4, 5)])  # which a check may not run
for _ in range(2):
    for batch in cstorch.utils.data.DataExecutor(loader, num_steps=5, checkpoint_steps=last_step):
        training_step(batch)
    with torch.no_grad():
        for weight in model.student.parameters():
            weight.mul_(0.9)
