"""The modes of a run."""

TRAIN = "train"
EVAL = "eval"
TRAIN_AND_EVAL = "train_and_eval"


def get_modes() -> list[str]:
    """All of them."""
    return [TRAIN, EVAL, TRAIN_AND_EVAL]


def is_valid(mode: str) -> bool:
    """Whether it is one of them."""
    return mode in get_modes()
