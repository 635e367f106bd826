"""The modes of a run."""

TRAIN = "train"
EVAL = "eval"
TRAIN_AND_EVAL = "train_and_eval"
INFERENCE = "inference"
EVAL_ALL = "eval_all"


def get_modes() -> tuple[str, ...]:
    """All of them."""
    return TRAIN, EVAL, TRAIN_AND_EVAL, INFERENCE, EVAL_ALL


def is_valid(mode: str) -> bool:
    """Whether it is one of them."""
    return mode in get_modes()
