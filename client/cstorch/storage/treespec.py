"""The tree of a checkpoint, from the text in the file; what the text names is not imported."""

import json
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from cstorch.errors import CheckpointError

# Nodes that are made of nothing but the file's own numbers and strings.
_PLAIN = frozenset({None, "builtins.dict", "builtins.list", "builtins.tuple", "collections.OrderedDict", "torch.Size"})
_NAMED = frozenset({"collections.namedtuple", "collections.deque"})
_FACTORIES = frozenset({"list", "dict", "set", "tuple", "int", "float", "str", "bool"})


def read_treespec(text: str, path: Path) -> pytree.TreeSpec:
    """The tree that `torch.utils._pytree.treespec_dumps` wrote into the file at `path`.

    Raises:
        CheckpointError: it has a node of a type that is not known here.
        ValueError, TypeError, KeyError, IndexError: the text is damaged.
    """
    _check(json.loads(text)[1], path)
    try:
        return pytree.treespec_loads(text)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path} holds a tree with a type that this process does not know: {error}. Register it before you load, "
            "as in the script that saved it"
        ) from None


def _check(node: dict[str, Any], path: Path) -> None:
    """torch imports what a context names as an enum, or as the factory of a defaultdict."""
    kind, context = node["type"], node["context"]
    if kind == "collections.defaultdict":
        factory = (context["default_factory_module"], context["default_factory_name"])
        is_known = factory[0] == "builtins" and factory[1] in _FACTORIES
        context = context["dict_context"]
    else:
        is_known = kind in _PLAIN or kind in _NAMED
    if not is_known or "__enum__" in json.dumps(context):
        raise CheckpointError(f"{path} holds a tree with a node of type {kind}, which is not loaded")
    for child in node["children_spec"]:
        _check(child, path)
