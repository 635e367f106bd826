"""One process of PyTorch's own data parallel training over gloo: a network that `benchmarks.hosts` trains.

`python -m benchmarks.distributed_training ddp|fsdp NETWORK` with the environment of torchrun. Rank 0 prints the seconds
of a step.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.host_trainings import MEASURED_STEPS, TRAININGS, WARM_STEPS, HostTraining


def main() -> None:
    side, training = sys.argv[1], TRAININGS[sys.argv[2]]
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    model = _distribute(training, side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = training.make_rows(training.rows)
    begin = 0.0
    for step in range(WARM_STEPS + MEASURED_STEPS):
        if step == WARM_STEPS:
            dist.barrier()
            begin = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=training.half):
            loss = training.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.item()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"step_seconds": (time.perf_counter() - begin) / MEASURED_STEPS}), flush=True)
    dist.destroy_process_group()


def _distribute(training: HostTraining, side: str) -> nn.Module:
    """Makes the network for DDP or FSDP2."""
    model = training.make_model()
    if side == "ddp":
        distributed = DistributedDataParallel(model)
        if training.half:
            # Through a function of another name: torch refuses its own hook where there is no CUDA, though it works.
            distributed.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
        return distributed
    half = torch.bfloat16 if training.half else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
    for part in [*training.parts(model), model]:
        fully_shard(part, mp_policy=policy)
    return model


if __name__ == "__main__":
    main()
