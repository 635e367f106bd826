"""Settings of the real system's compiler in a DebugArgs."""

from cerebras_appliance.pb.workflow.appliance.common.common_config_pb2 import DebugArgs

_MAPS: dict[type, str] = {bool: "bools", int: "ints", float: "floats", str: "strings"}


def set_ini(debug_args: DebugArgs, **kwargs: bool | int | float | str) -> None:
    """Sets values in the maps of their types in `debug_args.ini`.

    Args:
        debug_args: The settings.
        **kwargs: The values by name.

    Raises:
        TypeError: A value is no bool, int, float or str.
    """
    for name, value in kwargs.items():
        if type(value) not in _MAPS:
            raise TypeError(f"the setting {name!r} must be a bool, int, float or str, not {value!r}")
        getattr(debug_args.ini, _MAPS[type(value)])[name] = value


def set_default_ini(debug_args: DebugArgs, **kwargs: bool | int | float | str) -> None:
    """Sets values that are not set yet in the maps of their types in `debug_args.ini`.

    Args:
        debug_args: The settings.
        **kwargs: The values by name.

    Raises:
        TypeError: A value is no bool, int, float or str.
    """
    maps = [getattr(debug_args.ini, name) for name in _MAPS.values()]
    set_ini(debug_args, **{name: value for name, value in kwargs.items() if not any(name in each for each in maps)})
