"""The modes of a run."""

TRAIN = "train"
EVAL = "eval"
TRAIN_AND_EVAL = "train_and_eval"
INFERENCE = "inference"
EVAL_ALL = "eval_all"


def get_modes() -> tuple[str, ...]:
    """Returns the names of all modes."""
    return TRAIN, EVAL, TRAIN_AND_EVAL, INFERENCE, EVAL_ALL


def is_valid(mode: str) -> bool:
    """Whether a name is that of a mode.

    Args:
        mode: The name.
    """
    return mode in get_modes()
