"""Does what cannot be traced, in several lines: unsupported operations, values that are read, tensors of the CPU."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cerebras.pytorch as cstorch

torch.manual_seed(0)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)
class_weights = torch.tensor([1.0, 2.0, 3.0, 4.0])


def input_fn():
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    return DataLoader(dataset, batch_size=16, drop_last=True)


@cstorch.trace
def training_step(batch):
    features, labels = batch
    logits = compiled(features) * class_weights  # fault: a tensor of the CPU
    kept = labels != 3
    loss = F.cross_entropy(logits[kept], labels[kept])  # fault: a shape that depends on values
    mantissas, _ = torch.frexp(model[0].weight)  # fault: an operation that the wafer does not have
    spectrum = torch.fft.rfft(features).abs()  # fault: complex numbers
    loss = loss + 0.01 * mantissas.max() + spectrum.mean()
    optimizer.zero_grad()
    if loss > 10:  # fault: a value that is read
        loss = loss / 10
    loss.backward()
    optimizer.step()
    counts = torch.histogram(features, 4).hist  # fault: another operation that the wafer does not have
    print("loss", loss.item())  # fault: a value that is read
    return loss, counts


executor = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(input_fn), num_steps=4)
for batch in executor:
    training_step(batch)
