"""The cluster, and the number of this process among the input workers, for use in an input_fn."""

from cstorch.distributed import cluster_resolver
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.distributed.cluster_resolver import BaseServiceResolver, TaskRole, service_resolver
from cstorch.distributed.streaming import (
    get_ordinal,
    get_streaming_batch_size,
    get_streaming_rank,
    is_master_ordinal,
    is_receiver,
    is_streamer,
    num_receivers,
    num_streamers,
    num_tasks,
)
from cstorch.distributed.streaming import get_ordinal as get_rank
from cstorch.distributed.streaming import num_tasks as get_world_size
from cstorch.distributed.worker import WORKER_CACHE_ROOT, hit_worker_cache_limit
from cstorch.distributed.worker_state import WorkerState, get_worker_state

__all__ = [
    "WORKER_CACHE_ROOT",
    "BaseServiceResolver",
    "ClusterConfig",
    "TaskRole",
    "WorkerState",
    "cluster_resolver",
    "get_ordinal",
    "get_rank",
    "get_streaming_batch_size",
    "get_streaming_rank",
    "get_worker_state",
    "get_world_size",
    "hit_worker_cache_limit",
    "is_master_ordinal",
    "is_receiver",
    "is_streamer",
    "num_receivers",
    "num_streamers",
    "num_tasks",
    "service_resolver",
]
