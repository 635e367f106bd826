"""Whether steps are compiled for mixed precision, and in which half.

A worker tells its child process, which runs the input_fn, what the script has chosen, by environment variables.
"""

import os
from dataclasses import dataclass
from typing import Final, Literal

import torch

from cstorch._internal.execution import current_execution
from cstorch.errors import ConfigurationError, UsageError

HalfName = Literal["float16", "bfloat16", "cbfloat16"]

# cbfloat16 exists on wafers only: tensors of the script's own are float16 instead.
_DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "cbfloat16": torch.float16}


@dataclass(slots=True)
class _Settings:
    half: str
    enabled: bool


_settings = _Settings(
    half=os.environ.get("WAFERBOX_HALF_TYPE", "float16"), enabled="WAFERBOX_MIXED_PRECISION" in os.environ
)


def set_half_dtype(value: HalfName | torch.dtype) -> torch.dtype:
    """Chooses the half of mixed precision, float16 at first, and returns its torch dtype (float16 for cbfloat16).

    Raises:
        ConfigurationError: it is none.
        UsageError: inside the loop of an executor.
    """
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if name not in _DTYPES:
        raise ConfigurationError(f"{value!r} is no half precision: use one of {', '.join(_DTYPES)}")
    _check_outside_loop()
    _settings.half = name
    return _DTYPES[name]


def get_half_dtype() -> torch.dtype:
    """The torch dtype of the half; float16 for cbfloat16."""
    return _DTYPES[_settings.half]


def get_half_dtype_str() -> str:
    """The name of the half."""
    return _settings.half


def get_floating_point_dtype(default: torch.dtype = torch.float32) -> torch.dtype:
    """The half's torch dtype if steps are compiled for mixed precision, or else the default."""
    return get_half_dtype() if mixed_precision() else default


def get_floating_point_dtype_str(default: str = "float32") -> str:
    """The half's name if steps are compiled for mixed precision, or else the default."""
    return get_half_dtype_str() if mixed_precision() else default


def is_cbfloat16_tensor(tensor: torch.Tensor) -> bool:
    """Whether a float16 tensor stands for one of cbfloat16: whether that is the half."""
    return _settings.half == "cbfloat16" and tensor.dtype is torch.float16


def enable_mixed_precision(enable: bool = True) -> bool:
    """Steps that are compiled from now on compute in mixed precision, or in float32 throughout. Returns `enable`.

    Raises:
        UsageError: inside the loop of an executor.
    """
    _check_outside_loop()
    _settings.enabled = enable
    return enable


def mixed_precision() -> bool:
    """Whether steps are compiled for mixed precision."""
    return _settings.enabled


def _check_outside_loop() -> None:
    if current_execution() is not None:
        raise UsageError(
            "the step is compiled once: choose its precision before the loop of an executor, not inside it"
        )
