"""The releases of torch that Waferbox was tested with, and the private names of torch that it uses.

Imported before all else of cstorch: a release without one of the names is refused with the way out, not by an
AttributeError somewhere in a script.
"""

import functools
import importlib
import warnings
from typing import Final

import torch

from cstorch.errors import CstorchWarning

FIRST: Final = "2.13"
LAST: Final = "2.14"
RANGE: Final = ">=2.13,<2.15"

PRIVATE_NAMES: Final = (
    "torch.Tensor._make_wrapper_subclass",
    "torch._C.DispatchKey.Meta",
    "torch._C.DispatchKeySet",
    "torch._C.TensorBase",
    "torch._C.DisableTorchFunction",
    "torch._C._DisableTorchDispatch",
    "torch._C._VariableFunctions",
    "torch._C._autograd._get_sequence_nr",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._current_autograd_node",
    "torch._C._disabled_torch_function_impl",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._nn._parse_to",
    "torch._C._only_lift_cpu_tensors",
    "torch._C._set_only_lift_cpu_tensors",
    "torch._VF",
    "torch._debug_has_internal_overlap",
    "torch._decomp.decomposition_table",
    "torch._decomp.meta_table",
    "torch._disable_dynamo",
    "torch._disable_functionalization",
    "torch._enable_functionalization",
    "torch._foreach_lerp_",
    "torch._from_functional_tensor",
    "torch._functorch.autograd_function.custom_function_call",
    "torch._higher_order_ops.utils",
    "torch._library.custom_ops.OPDEFS",
    "torch._ops.HigherOrderOperator",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch._register_device_module",
    "torch._sample_dirichlet",
    "torch._standard_gamma",
    "torch._standard_gamma_grad",
    "torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor",
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException",
    "torch._sync",
    "torch._to_functional_tensor",
    "torch.compiler._is_compiling_flag",
    "torch.compiler._is_exporting_flag",
    "torch.jit._script.RecursiveScriptModule",
    "torch.nn.init._no_grad_trunc_normal_",
    "torch.nn.modules.batchnorm._BatchNorm.forward",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.module._global_forward_hooks",
    "torch.nn.modules.module._global_forward_pre_hooks",
    "torch.ops.aten._local_scalar_dense",
    "torch.ops.aten._to_copy",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
    "torch.ops.mkldnn._linear_pointwise.default",
    "torch.overrides._get_current_function_mode_stack",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._pytree.GetAttrKey",
    "torch.utils._pytree.KeyEntry",
    "torch.utils._pytree.KeyPath",
    "torch.utils._pytree.MappingKey",
    "torch.utils._pytree.SequenceKey",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.keystr",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_flatten_with_path",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_leaves_with_path",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_map_with_path",
    "torch.utils._pytree.tree_structure",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils._pytree.treespec_dumps",
    "torch.utils._pytree.treespec_loads",
    "torch.utils.data.DataLoader._get_iterator",
    "torch.utils.data._DatasetKind.Iterable",
    "torch.utils.data._DatasetKind.create_fetcher",
    "torch.utils.data._utils.fetch._IterableDatasetFetcher",
    "torch.utils.data._utils.worker.WorkerInfo",
    "torch.utils.data._utils.worker._generate_state",
    "torch.utils.data._utils.worker._worker_info",
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter",
)


def check(version: str) -> None:
    """Checks a release of torch, which is imported.

    Raises:
        ImportError: a name is missing.
    """
    if missing := [name for name in PRIVATE_NAMES if not _exists(name)]:
        raise ImportError(
            f"torch {version} has no {', '.join(missing)}, which Waferbox uses; it was tested with torch {FIRST} to "
            f'{LAST}: python -m pip install "torch{RANGE}"'
        )
    if not _numbers(FIRST) <= _numbers(version) <= _numbers(LAST):
        warnings.warn(
            f"Waferbox was not tested with torch {version}, but with {FIRST} to {LAST}; where results are wrong or "
            f'errors odd, try: python -m pip install "torch{RANGE}"',
            CstorchWarning,
            stacklevel=2,
        )


def _numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def _exists(name: str) -> bool:
    parts = name.split(".")
    try:
        functools.reduce(getattr, parts[1:], torch)
    except AttributeError:
        try:
            importlib.import_module(name)  # a module that nothing has imported yet
        except ImportError:
            return False
    return True


check(torch.__version__)
