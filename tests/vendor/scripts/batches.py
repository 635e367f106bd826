"""The batches of train.py. A module of its own: dill does not write all of a class of the script itself."""

import numpy as np
import torch
from networks import TOKENS, VOCABULARY


def draw(kind, draws):
    """Input and labels of a batch of 16."""
    if kind == "text":
        tokens = draws.randint(0, VOCABULARY, (16, TOKENS + 1)).astype("i4")
        return tokens[:, :-1], tokens[:, 1:]
    x = draws.normal(0, 1, (16, 8) if kind == "vectors" else (16, 1, 8, 8)).astype("f")
    return x, x.reshape(16, -1)[:, :4].argmax(1).astype("i4")


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, kind, failing):
        self.kind, self.failing = kind, failing

    def __iter__(self):
        draws = np.random.RandomState(7)
        for number in range(64):
            if self.failing and number == 2:
                raise OSError("the third batch cannot be read")
            yield tuple(map(torch.from_numpy, draw(self.kind, draws)))


class Restartable:
    """Batches that can be gone on with: how many have been drawn is all that there is to say."""

    def __init__(self, kind):
        self.kind, self.count = kind, 0

    def __iter__(self):
        while True:
            draws = np.random.RandomState(self.count)
            self.count += 1
            yield tuple(map(torch.from_numpy, draw(self.kind, draws)))

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state, strict=True):
        self.count = state["count"]

    def aggregate_state_dict(self, states):
        return {"counts": [state["count"] for state in states]}

    def deaggregate_state_dict(self, state, strict=True):
        return {"count": state["counts"][0]}


def input_fn(kind, failing):
    return torch.utils.data.DataLoader(Batches(kind, failing), batch_size=None)


def restartable_input_fn(kind):
    return Restartable(kind)
