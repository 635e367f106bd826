"""A loader that shards by itself and can go back to a position, which checkpoints have."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import cerebras.pytorch as cstorch


class Samples(IterableDataset):
    """Each worker has every n-th sample."""

    def __init__(self):
        self.next = cstorch.distributed.get_streaming_rank()
        self.workers = max(1, cstorch.distributed.num_streamers())

    def __iter__(self):
        while True:
            number = self.next
            self.next += self.workers
            generator = torch.Generator().manual_seed(number)
            yield torch.randn(8, generator=generator), number % 4


class Restartable(DataLoader):
    def state_dict(self):
        return {"samples": cstorch.distributed.get_worker_state().samples_streamed}

    def load_state_dict(self, state):
        self.dataset.next += state["samples"] * self.dataset.workers

    def aggregate_state_dict(self, states):
        return {"samples": sum(state["samples"] for state in states)}

    def deaggregate_state_dict(self, state):
        return {"samples": state["samples"] // self.dataset.workers}


torch.manual_seed(15)
backend = cstorch.backend("CSX")
with backend.device:
    model = nn.Linear(8, 4)
compiled = cstorch.compile(model, backend)
optimizer = cstorch.optim.SGD(model.parameters(), lr=0.1)


def input_fn(batch_size):
    return Restartable(Samples(), batch_size=cstorch.distributed.get_streaming_batch_size(batch_size))


@cstorch.trace
def training_step(batch):
    features, labels = batch
    loss = F.cross_entropy(compiled(features), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


loader = cstorch.utils.data.DataLoader(input_fn, 16)


@cstorch.checkpoint_closure
def save(step):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "input": loader.state_dict()}
    cstorch.save(state, f"checkpoint_{step}.mdl")


executor = cstorch.utils.data.DataExecutor(loader, num_steps=4, checkpoint_steps=2)
for batch in executor:
    training_step(batch)
    save(executor.user_iteration)
