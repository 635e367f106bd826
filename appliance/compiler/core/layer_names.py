"""The name of the layer that an operation belongs to."""

import re

_UP_TO_INDEX = re.compile(r"(.*?(?:^|\.)\d+)(?:\.|$)")
# Without a list in the path: as deep as this.
_DEPTH = 2


def layer_of(module_path: str) -> str:
    """The layer of a module path; "" for operations outside all modules."""
    indexed = _UP_TO_INDEX.match(module_path)
    return indexed.group(1) if indexed else ".".join(module_path.split(".")[:_DEPTH])
