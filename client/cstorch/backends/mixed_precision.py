"""Whether steps are compiled for mixed precision, and with which half type.

In the process that runs an input_fn for a worker, the script's choice holds from the start.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch

from cstorch._internal import input_settings
from cstorch.backends.flag import check_outside_loop
from cstorch.errors import ConfigurationError

HalfName = Literal["float16", "bfloat16", "cbfloat16"]

# cbfloat16 exists on wafers only: tensors of the script's own are float16 instead.
_DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "cbfloat16": torch.float16}


@dataclass(slots=True)
class _Settings:
    half: str
    enabled: bool


def _initial_settings() -> _Settings:
    chosen = input_settings.current()
    if chosen is None:
        return _Settings(half="float16", enabled=False)
    return _Settings(half=chosen.half_type or "float16", enabled=chosen.mixed_precision)


_settings = _initial_settings()


def set_half_dtype(value: HalfName | torch.dtype) -> torch.dtype:
    """Chooses the half type of mixed precision, which is float16 at first.

    Args:
        value: "float16", "bfloat16" or "cbfloat16", or a torch dtype.

    Returns:
        The torch dtype of the half type, which is float16 for cbfloat16.

    Raises:
        ConfigurationError: The type is no half type.
        UsageError: It is called inside the loop of an executor.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if name not in _DTYPES:
        raise ConfigurationError(f"{value!r} is no half precision: use one of {', '.join(_DTYPES)}")
    check_outside_loop("choose its precision")
    _settings.half = name
    return _DTYPES[name]


def get_half_dtype() -> torch.dtype:
    """Returns the torch dtype of the half type, which is float16 for cbfloat16.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    return _DTYPES[_settings.half]


def get_half_dtype_str() -> str:
    """Returns the name of the half type.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    return _settings.half


def get_floating_point_dtype(default: torch.dtype = torch.float32) -> torch.dtype:
    """Returns the torch dtype of the half type if steps are compiled for mixed precision, or else the default.

    Args:
        default: The type in full precision.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    return get_half_dtype() if mixed_precision() else default


def get_floating_point_dtype_str(default: str = "float32") -> str:
    """Returns the name of the half type if steps are compiled for mixed precision, or else the default.

    Args:
        default: The name of the type in full precision.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    return get_half_dtype_str() if mixed_precision() else default


def is_cbfloat16_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for one of cbfloat16: it is of float16, and the half type is cbfloat16.

    Args:
        tensor: The tensor.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    return _settings.half == "cbfloat16" and tensor.dtype is torch.float16


def enable_mixed_precision(enable: bool = True) -> bool:
    """Chooses whether the steps that are compiled from now on compute in mixed precision.

    Args:
        enable: True for mixed precision; False for float32 throughout.

    Returns:
        `enable`.

    Raises:
        UsageError: It is called inside the loop of an executor.

    Example:
        Before the model is compiled::

            cstorch.amp.set_half_dtype("bfloat16")
            cstorch.amp.enable_mixed_precision()

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    check_outside_loop("choose its precision")
    _settings.enabled = enable
    return enable


def mixed_precision() -> bool:
    """Whether steps are compiled for mixed precision.

    Reference: release 2.10, `cerebras.pytorch.amp`.
    """
    return _settings.enabled
