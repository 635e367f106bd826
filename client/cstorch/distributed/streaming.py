"""Where this process stands among the input workers: `is_streamer` and its relatives, for use in an input_fn.

A worker of the cluster tells its child process, which runs the input_fn, by environment variables; everywhere else, on
the client and on the CPU, the answers are those of a lone process that streams nothing.
"""

import mmap
import os

# Whether this process, or one that was forked from it as torch DataLoaders do, has asked for its share of the batches,
# for its rank, and for its ordinal.
_asked = mmap.mmap(-1, 3)
_SHARE, _RANK, _ORDINAL = range(3)


def is_streamer() -> bool:
    """Whether this process streams input to a wafer."""
    return "WAFERBOX_STREAMER_RANK" in os.environ


def num_streamers() -> int:
    """How many processes stream input, over all wafers; 0 on the client."""
    _asked[_SHARE] = True
    return int(os.environ.get("WAFERBOX_STREAMER_COUNT", "0"))


def get_streaming_rank() -> int:
    """The number of this process among all that stream; 0 on the client.

    An input_fn that asks is taken to shard: its batches are this worker's own, and are not dealt out among workers.
    """
    _asked[_SHARE] = _asked[_RANK] = True
    return int(os.environ.get("WAFERBOX_STREAMER_RANK", "0"))


def rank_was_asked() -> bool:
    """Whether this process, or one that was forked from it, has asked which of the streamers it is.

    An ordinal alone is asked for in logs, too: with the number of tasks it is a rank.
    """
    return bool(_asked[_RANK] or (_asked[_ORDINAL] and _asked[_SHARE]))


def share_was_asked() -> bool:
    """Whether it has asked for that, or for anything else from which it can know its share of the batch."""
    return bool(_asked[_SHARE])


def get_streaming_batch_size(effective_batch_size: int, global_rank: int | None = None) -> int:
    """The rows of the global batch that a process is to yield: its wafer's share; on the client all.

    Args:
        effective_batch_size: rows of the global batch.
        global_rank: the number of another streamer; by default it is this process.

    Raises:
        ValueError: there are fewer rows than systems, or no such streamer.
    """
    if global_rank is not None and not 0 <= global_rank < max(1, num_streamers()):
        raise ValueError(f"there is no streamer {global_rank}: there are {num_streamers()}")
    wafer = streaming_wafer() if global_rank is None else global_rank // num_workers_per_csx()
    if effective_batch_size < num_csx():
        raise ValueError(f"a batch of {effective_batch_size} rows cannot be spread over {num_csx()} systems")
    share, left_over = divmod(effective_batch_size, num_csx())
    return share + (1 if wafer < left_over else 0)


def num_csx() -> int:
    """The systems that the streamers feed; 1 on the client."""
    _asked[_SHARE] = True
    return int(os.environ.get("WAFERBOX_STREAMER_NUM_CSX", "1"))


def num_workers_per_csx() -> int:
    """The streamers of one system; 1 on the client."""
    return max(1, num_streamers() // num_csx())


def streaming_wafer() -> int:
    """The number of the system that this process feeds; 0 on the client."""
    _asked[_SHARE] = True
    return int(os.environ.get("WAFERBOX_STREAMER_WAFER", "0"))


def num_tasks() -> int:
    """How many processes do what this one does: all streamers in a worker, else 1."""
    return num_streamers() or 1


def get_ordinal() -> int:
    """The number of this process among those that do what it does.

    An input_fn that asks for this and for their number is taken to shard, as by `get_streaming_rank`.
    """
    _asked[_ORDINAL] = True
    return int(os.environ.get("WAFERBOX_STREAMER_RANK", "0"))


def is_master_ordinal(local: bool = False) -> bool:
    """Whether this is the first of them. local: no difference here, every process is alone in its container."""
    return local or int(os.environ.get("WAFERBOX_STREAMER_RANK", "0")) == 0


def num_receivers() -> int:
    """How many processes receive output: the client alone; in a worker 0."""
    return 0 if is_streamer() else 1


def is_receiver() -> bool:
    """Whether this process receives output."""
    return not is_streamer()
