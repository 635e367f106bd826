"""Calls the user's input_fn, which makes the loader."""

import json
import os
import random
import sys
from typing import Any

from .failures import InputFailure, summary, user_traceback


def build(prepare: dict[str, Any], builder: bytes) -> tuple[Any, str]:
    """Call the user's input_fn, in the state that its random generators had on the client.

    Returns the loader, at the position that the client has loaded, and what the input_fn is called.
    """
    first, last = prepare["python_paths"], prepare["last_python_paths"]
    sys.path[:] = [*first, *(path for path in sys.path if path not in (*first, *last)), *last]
    if os.path.isdir(prepare["working_directory"]):  # it may not exist on another host
        os.chdir(prepare["working_directory"])
    rank = prepare["wafer"] * prepare["num_workers"] + prepare["worker"]
    os.environ["WAFERBOX_STREAMER_RANK"] = str(rank)
    os.environ["WAFERBOX_STREAMER_COUNT"] = str(prepare["num_csx"] * prepare["num_workers"])
    os.environ["WAFERBOX_STREAMER_WAFER"] = str(prepare["wafer"])
    os.environ["WAFERBOX_STREAMER_NUM_CSX"] = str(prepare["num_csx"])
    if prepare["half_type"]:
        os.environ["WAFERBOX_HALF_TYPE"] = prepare["half_type"]
    if prepare["mixed_precision"]:
        os.environ["WAFERBOX_MIXED_PRECISION"] = "1"
    read = _read_vendor_builder if prepare["vendor_builder"] else _read_builder
    try:
        import torch  # noqa: F401 - found in sys.modules by what follows

        recipe = read(builder)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "cloudpickle", "dill"):
            raise InputFailure(f"the input_fn cannot be read here: {summary(error)}", user_traceback(error)) from error
        raise InputFailure(f"the interpreter {sys.executable} has no {error.name}; install it there") from error
    except Exception as error:  # the user's code; it is reported
        raise InputFailure(f"the input_fn raised {summary(error)}", user_traceback(error)) from error
    try:
        if recipe["random_state"] is not None:
            _set_random_state(recipe["random_state"])
        loader = recipe["input_fn"](*recipe["args"], **recipe["kwargs"])
        if (position := recipe["position"]) is not None:
            strict = {} if position["strict"] else {"strict": False}
            loader.load_state_dict(loader.deaggregate_state_dict(position["state"], **strict), **strict)
    except Exception as error:  # the user's code; it is reported
        raise InputFailure(f"the input_fn raised {summary(error)}", user_traceback(error)) from error
    if not hasattr(loader, "__iter__"):
        raise InputFailure(f"the input_fn returned {type(loader).__name__}, which is not an iterable of batches")
    return loader, _source(recipe["input_fn"])


def _read_builder(builder: bytes) -> dict[str, Any]:
    """What a client of ours has sent. Only here is anything of a script's unpickled: this process is the user's."""
    import cloudpickle

    recipe: dict[str, Any] = cloudpickle.loads(builder)
    return recipe


def _read_vendor_builder(builder: bytes) -> dict[str, Any]:
    """What the vendor's client has sent: without the state of its random generators."""
    import dill

    texts = json.loads(builder)
    arguments = dill.loads(bytes.fromhex(texts["arguments"]))  # noqa: S301 - only here, as above
    args, kwargs = arguments if isinstance(arguments, tuple) else ((), arguments)
    input_fn = dill.loads(bytes.fromhex(texts["input_fn"]))  # noqa: S301 - only here, as above
    position = None
    if texts["position"]:
        state, options = dill.loads(bytes.fromhex(texts["position"]))  # noqa: S301 - only here, as above
        position = {"state": state, "strict": options.get("strict", True)}
    return {"random_state": None, "input_fn": input_fn, "args": args, "kwargs": kwargs, "position": position}


def _source(function: Any) -> str:
    """A function's name, file and line, as far as it has them."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _set_random_state(state: dict[str, Any]) -> None:
    torch = sys.modules["torch"]
    torch.set_rng_state(torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8))
    random.setstate(state["python"])
    sys.modules["numpy"].random.set_state(state["numpy"])  # imported with the state, an array
