"""`import cerebras_pytorch.experimental as cstorch`: releases 1.8 and 1.9 of the API.

1.8: `configure` once, `compile(model, backend="wse_ws")`, `compile_step`, a DataLoader that is iterated itself.
1.9: `backend` and `utils.data.DataExecutor` as in 2.0, with `compile_step` for `trace`. All else is cstorch.
"""

from cerebras_pytorch.experimental import amp, listener, metrics, utils
from cerebras_pytorch.experimental.compiling import compile, compile_step
from cerebras_pytorch.experimental.configuration import configure
from cerebras_pytorch.experimental.summaries import save_summaries, scalar_summary
from cerebras_pytorch.late_backend import backend
from cstorch._internal.generations import inherit
from cstorch.core.closures import summarize_scalar, summarize_tensor
from cstorch.experimental import run_implicit_autoregressive_loop

__all__ = [
    "amp",
    "backend",
    "compile",
    "compile_step",
    "configure",
    "listener",
    "metrics",
    "run_implicit_autoregressive_loop",
    "save_summaries",
    "scalar_summary",
    "summarize_scalar",
    "summarize_tensor",
    "utils",
]

__getattr__ = inherit("cerebras_pytorch.experimental", "cstorch")
