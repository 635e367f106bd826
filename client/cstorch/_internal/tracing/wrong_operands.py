"""The errors for labels, indices and strings that a function of torch cannot take.

torch says what an operation within the function expects; here is said which argument is wrong, and how it is converted.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from cstorch._internal.tracing.provenance import line_of, user_line
from cstorch.errors import CstorchError, TraceError, TraceTypeError

# The argument of each function that must be integers: its position and its name. A name in torch that ends in an
# underscore writes in place.
_INTEGERS: Final[Mapping[str, tuple[int, str]]] = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss"), (1, "target")),
    "ctc_loss": (1, "targets"),
    **dict.fromkeys(("embedding", "embedding_bag", "one_hot"), (0, "input")),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), (2, "index")),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), (2, "index")),
    **dict.fromkeys(("take", "put"), (1, "index")),
    "take_along_dim": (1, "indices"),
    **dict.fromkeys(("__getitem__", "__setitem__"), (1, "index")),
    "index_put": (1, "indices"),
}
# Those that must have the shape of the first argument, and floating point numbers.
_LIKE_INPUT: Final = frozenset(
    {"binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"}
    | {"kl_div", "soft_margin_loss", "poisson_nll_loss", "multilabel_soft_margin_loss"}
)
_OF_CLASSES: Final = frozenset({"cross_entropy", "nll_loss"})
# Those whose argument torch does not check where the values are not known.
_UNCHECKED: Final = frozenset({"index_select", "index_add", "index_copy", "index_fill", "index_reduce"})
_INTEGER_TYPES: Final = (torch.int64, torch.int32)


def check(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks the arguments of a function of torch, as far as torch does not.

    Args:
        function: The function of torch that the script calls.
        args: Its arguments.
        kwargs: Its arguments by name.

    Raises:
        TraceError: An index is no integer.
    """
    name = getattr(function, "__name__", "")
    if name.rstrip("_") in _UNCHECKED and (what := _wrong(name, args, kwargs)):
        raise TraceError(f"At {user_line()} {what}")


def explained(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> TraceError | None:
    """Returns the error to raise in place of what a function of torch has raised; None: it says enough.

    Args:
        function: The function of torch that the script has called.
        args: Its arguments.
        kwargs: Its arguments by name.
        error: What it has raised.
    """
    if isinstance(error, CstorchError):
        return None
    name = getattr(function, "__name__", "")
    what = _wrong(name, args, kwargs)
    return TraceError(f"At {user_line()} {what}\n{error}") if what else None


def _wrong(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns what is wrong with the arguments, and the way out; empty: nothing is known."""
    plain = name if name.startswith("__") else name.rstrip("_")
    if plain in _INTEGERS:
        position, parameter = _INTEGERS[plain]
        given = _argument(args, kwargs, position, parameter)
        scores = _argument(args, kwargs, 0, "input")
        is_of_classes = plain in _OF_CLASSES and isinstance(scores, torch.Tensor) and isinstance(given, torch.Tensor)
        if is_of_classes and (what := _wrong_shape(name, given, scores)):
            return what
        may_be_mask = plain in ("__getitem__", "__setitem__", "index_put")
        for tensor in pytree.tree_leaves(given):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype in _INTEGER_TYPES:
                continue
            if may_be_mask and tensor.dtype in (torch.bool, torch.uint8):
                continue
            return (
                f"`{name}` takes integers as its argument `{parameter}`, {_meaning(plain)}, and is given a tensor of "
                f"{tensor.dtype}. Convert it: `{_word(plain)}.long()`, here or in the input_fn."
            )
    if plain in _LIKE_INPUT:
        scores, target = (_argument(args, kwargs, place, word) for place, word in enumerate(("input", "target")))
        if isinstance(scores, torch.Tensor) and isinstance(target, torch.Tensor):
            return _unlike(name, scores, target)
    return ""


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


def _meaning(function: str) -> str:
    if function in _OF_CLASSES or function.endswith("loss"):
        return "the numbers of classes"
    return "the numbers of rows" if function.startswith("embedding") else "the places of elements"


def _word(function: str) -> str:
    return "labels" if function.endswith(("loss", "entropy")) else "indices"


def _wrong_shape(name: str, labels: torch.Tensor, scores: torch.Tensor) -> str:
    """Returns what is wrong with the shape of labels of classes; empty: it is right, or not known to be wrong."""
    if labels.shape == scores.shape and labels.is_floating_point() and name == "cross_entropy":
        return ""  # probabilities
    wanted = scores.shape[:1] + scores.shape[2:] if scores.dim() > 1 else scores.shape[:0]
    if labels.shape == wanted:
        return ""
    cast = "" if labels.dtype in _INTEGER_TYPES else ".long()"
    if labels.dim() and labels.shape[-1:] == (1,) and labels.shape[:-1] == wanted:
        way_out = f"Leave the last dimension out: `labels.squeeze(-1){cast}`."
    elif labels.shape == scores.shape:
        way_out = "Labels that are one-hot are numbers of classes by `labels.argmax(1)`."
    elif scores.dim() > 2 and labels.shape == scores.shape[:-1]:
        way_out = f"Classes that come last move there by `scores.movedim(-1, 1)`{' and `labels.long()`' * bool(cast)}."
    else:
        way_out = "Give each row of the scores one label."
    return (
        f"`{name}` takes one label for each row of scores, and is given labels (`target`) of the shape "
        f"{tuple(labels.shape)} where scores (`input`) of the shape {tuple(scores.shape)}, whose dimension 1 has the "
        f"classes, need {tuple(wanted)}. {way_out}"
    )


def _unlike(name: str, scores: torch.Tensor, target: torch.Tensor) -> str:
    if scores.shape != target.shape:
        return (
            f"`{name}` compares two tensors of one shape, and is given `input` of the shape {tuple(scores.shape)} and "
            f"`target` of the shape {tuple(target.shape)}. Give the target that shape, as by `labels.unsqueeze(1)` for "
            "one more dimension, or by torch.nn.functional.one_hot for classes."
        )
    if not target.is_floating_point():
        return (
            f"`{name}` takes floating point numbers as its argument `target`, and is given a tensor of {target.dtype}. "
            "Convert it: `labels.float()`, here or in the input_fn."
        )
    return ""


# --- Strings ----------------------------------------------------------------------------------------------------------

_OF_STRINGS: Final = re.compile(r"'(tuple|list|str)'|\b(not|got) (tuple|list|str)\b|, (tuple|list|str)\)")


def strings_explained(batch: Any, error: Exception) -> TraceTypeError | None:
    """Returns the error to raise where a step fails at strings of its batch; None: it fails at something else.

    Args:
        batch: The batch.
        error: What the step has raised.
    """
    if isinstance(error, CstorchError) or not isinstance(error, TypeError | AttributeError | ValueError):
        return None
    leaves, _ = pytree.tree_flatten_with_path(batch)
    strings = [path for path, leaf in leaves if isinstance(leaf, str)]
    if not strings or not _OF_STRINGS.search(str(error)):
        return None
    return TraceTypeError(
        f"At {line_of(error)} the step computes with strings, of which the batch that the input_fn yields has the "
        f"first at {pytree.keystr(strings[0])}: they cannot be sent to wafers. Turn them into a tensor in the "
        f"input_fn, with a number for each (`torch.tensor([names.index(name) for name in given])`).\n{error}"
    )
