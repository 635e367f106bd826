"""The SummaryWriter: torch's, which also keeps tensors."""

from pathlib import Path
from typing import Any

import torch
from torch.utils import tensorboard

from cstorch.utils.tensorboard import tensor_files


class SummaryWriter(tensorboard.SummaryWriter):
    """Writes event files. Call its methods in step closures, where tensors have values.

    Args:
        *args, **kwargs: as for torch.utils.tensorboard.SummaryWriter; the first is log_dir.
        base_step: what the first step of an execution is called by `summarize_scalar` and `summarize_tensor`.

    cs_events_dir: the folder, in log_dir, that takes the tensors.
    """

    def __init__(self, *args: Any, base_step: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base_step = base_step
        self.cs_events_dir = tensor_files.make_folder(Path(self.log_dir))

    def add_tensor(  # type: ignore[override]  # the real API's, not torch's
        self, name: str, tensor: torch.Tensor, step: int
    ) -> None:
        """Saves a whole tensor, for `SummaryReader.read_tensor`.

        Raises:
            ConfigurationError: the name leads out of log_dir, or the step is negative.
        """
        tensor_files.write(self.cs_events_dir, name, tensor, step)
