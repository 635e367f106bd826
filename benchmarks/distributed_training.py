"""One process of PyTorch's own data parallel training over gloo: the network that `benchmarks.hosts` trains.

`python -m benchmarks.distributed_training ddp|fsdp` with the environment of torchrun. Rank 0 prints the seconds of a
step.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hosts import BATCH, MEASURED_STEPS, WARM_STEPS, WIDTH, make_layers


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    model: nn.Module = make_layers()
    if sys.argv[1] == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, WIDTH)
    begin = 0.0
    for step in range(WARM_STEPS + MEASURED_STEPS):
        if step == WARM_STEPS:
            dist.barrier()
            begin = time.perf_counter()
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        loss.item()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"step_seconds": (time.perf_counter() - begin) / MEASURED_STEPS}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
