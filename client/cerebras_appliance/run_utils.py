"""The names of releases before 2.3 for `utils.debug_args` and `utils.ini`."""

from cerebras_appliance.utils.debug_args import (
    DebugArgs,
    get_debug_args,
    update_debug_args_from_keys,
    update_debug_args_with_autogen_policy,
    update_debug_args_with_mem_limits,
    write_debug_args,
)
from cerebras_appliance.utils.ini import set_default_ini, set_ini

__all__ = [
    "DebugArgs",
    "get_debug_args",
    "set_default_ini",
    "set_ini",
    "update_debug_args_from_keys",
    "update_debug_args_with_autogen_policy",
    "update_debug_args_with_mem_limits",
    "write_debug_args",
]
