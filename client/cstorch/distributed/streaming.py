"""The number of this process among the input workers, for use in an input_fn.

On the client and on the CPU, where no input_fn runs for a worker, the results are those of a lone process that streams
nothing.
"""

import mmap

from cstorch._internal import input_settings

# Whether this process has read its share of the batches, its rank, and its ordinal. It is shared memory, as torch
# DataLoaders fork processes that may read them.
_asked = mmap.mmap(-1, 3)
_SHARE, _RANK, _ORDINAL = range(3)


def is_streamer() -> bool:
    """Whether this process streams input to a wafer.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    return input_settings.current() is not None


def num_streamers() -> int:
    """Returns the number of processes that stream input, over all wafers; 0 on the client.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    _asked[_SHARE] = True
    settings = input_settings.current()
    return 0 if settings is None else settings.num_streamers


def get_streaming_rank() -> int:
    """Returns the number of this process among all that stream; 0 on the client.

    An input_fn that calls it is taken to shard: its batches are this worker's own, and are not dealt out among workers.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    _asked[_SHARE] = _asked[_RANK] = True
    return _rank()


def rank_was_asked() -> bool:
    """Whether this process, or one that was forked from it, has read its number among the streamers.

    The ordinal alone is not enough, as scripts log it; with the number of tasks it is a rank.
    """
    return bool(_asked[_RANK] or (_asked[_ORDINAL] and _asked[_SHARE]))


def share_was_asked() -> bool:
    """Whether it has read that number, or anything else from which it can compute its share of the batch."""
    return bool(_asked[_SHARE])


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """Returns the number of rows of the global batch that a process is to yield: its wafer's share; on the client all.

    Args:
        effective_batch_size: The rows of the global batch.
        global_rank: The number of a streamer; None: this process.

    Raises:
        ValueError: There are fewer rows than systems, or there is no such streamer.

    Example:
        In an input_fn::

            batch_size = cstorch.distributed.get_streaming_batch_size(64)
            return torch.utils.data.DataLoader(dataset, batch_size=batch_size)

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    if global_rank is not None and not 0 <= global_rank < max(1, num_streamers()):
        raise ValueError(f"there is no streamer {global_rank}: there are {num_streamers()}")
    wafer = streaming_wafer() if global_rank is None else global_rank // num_workers_per_csx()
    if effective_batch_size < num_csx():
        raise ValueError(f"a batch of {effective_batch_size} rows cannot be spread over {num_csx()} systems")
    share, left_over = divmod(effective_batch_size, num_csx())
    return share + (1 if wafer < left_over else 0)


def num_csx() -> int:
    """Returns the number of systems that the streamers feed; 1 on the client."""
    _asked[_SHARE] = True
    settings = input_settings.current()
    return 1 if settings is None else settings.num_csx


def num_workers_per_csx() -> int:
    """Returns the number of streamers of one system; 1 on the client."""
    return max(1, num_streamers() // num_csx())


def streaming_wafer() -> int:
    """Returns the number of the system that this process feeds; 0 on the client."""
    _asked[_SHARE] = True
    settings = input_settings.current()
    return 0 if settings is None else settings.wafer


def num_tasks() -> int:
    """Returns the number of processes of this role: all streamers in a worker, else 1.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    return num_streamers() or 1


def get_ordinal() -> int:
    """Returns the number of this process among those of its role.

    An input_fn that reads this and `num_tasks` is taken to shard, as by `get_streaming_rank`.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    _asked[_ORDINAL] = True
    return _rank()


def is_master_ordinal(local: bool = False) -> bool:
    """Whether this process is the first of its role.

    Args:
        local: Whether only the processes of the container count, in which every process here is alone.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    return local or _rank() == 0


def num_receivers() -> int:
    """Returns the number of processes that receive output: 1, the client; in a worker 0.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    return 0 if is_streamer() else 1


def is_receiver() -> bool:
    """Whether this process receives output.

    Reference: release 2.10, `cerebras.pytorch.distributed`.
    """
    return not is_streamer()


def _rank() -> int:
    settings = input_settings.current()
    return 0 if settings is None else settings.rank
