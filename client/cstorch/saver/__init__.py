"""Checkpoints as objects: PyTorchH5Saver, and of releases 1.8 and 1.9 CerebrasStateDict and CheckpointReader."""

from cstorch.saver.pt_h5_saver import CerebrasStateDict, CheckpointReader, PyTorchH5Saver

__all__ = ["CerebrasStateDict", "CheckpointReader", "PyTorchH5Saver"]
