"""The SummaryWriter: torch's, with tensors."""

from pathlib import Path
from typing import Any

import torch
from torch.utils import tensorboard

from cstorch._internal.imported_again import is_imported_again
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
        # Where only a module of the script is imported, the writer that it makes has no files before its first event.
        self._may_make_files = not is_imported_again()
        super().__init__(*args, **kwargs)
        self.base_step = base_step
        self.cs_events_dir = tensor_files.new_folder(Path(self.log_dir))
        if self._may_make_files:
            tensor_files.make_folder(self.cs_events_dir)
        self._may_make_files = True

    def _get_file_writer(self) -> Any:
        return super()._get_file_writer() if self._may_make_files else None  # type: ignore[no-untyped-call]

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
