"""The SummaryWriter: torch's, with tensors."""

from pathlib import Path
from typing import Any

import torch
from torch.utils import tensorboard

from cstorch.utils.tensorboard import tensor_files


class SummaryWriter(tensorboard.SummaryWriter):
    """Writes event files. Call its methods in step closures, where tensors have values.

    `cs_events_dir` is the folder in `log_dir` that takes the tensors.

    Args:
        *args: The arguments of torch.utils.tensorboard.SummaryWriter, of which the first is `log_dir`.
        base_step: The number of an execution's first step in `summarize_scalar` and `summarize_tensor`.
        **kwargs: The arguments of torch.utils.tensorboard.SummaryWriter.

    Reference: release 2.10, `cerebras.pytorch.utils.tensorboard`.
    """

    def __init__(self, *args: Any, base_step: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base_step = base_step
        self.cs_events_dir = tensor_files.make_folder(Path(self.log_dir))

    def add_tensor(  # type: ignore[override]  # the real API's, not torch's
        self, name: str, tensor: torch.Tensor, step: int
    ) -> None:
        """Saves a whole tensor, for `SummaryReader.read_tensor`.

        Args:
            name: The name, a path below `log_dir` such as "layer/weight".
            tensor: The tensor.
            step: The step, not negative.

        Raises:
            ConfigurationError: The name leads out of `log_dir`, or the step is negative.
        """
        tensor_files.write(self.cs_events_dir, name, tensor, step)
