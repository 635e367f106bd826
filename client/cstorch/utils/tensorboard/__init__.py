"""Summaries as event files, which TensorBoard shows."""

from cstorch.utils.tensorboard.reader import SummaryReader
from cstorch.utils.tensorboard.tensor_files import TensorDescriptor
from cstorch.utils.tensorboard.writer import SummaryWriter

__all__ = ["SummaryReader", "SummaryWriter", "TensorDescriptor"]
