"""Checkpoints as objects of releases 2.0 and 2.1: `PyTorchH5Saver`."""

from cerebras_pytorch.saver.pt_h5_saver import PyTorchH5Saver

__all__ = ["PyTorchH5Saver"]
