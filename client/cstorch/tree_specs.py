"""torch's TreeSpec, as scripts of public releases change it: `dataclasses.replace(spec, children_specs=...)`.

In torch 2.4 its fields had the names of its constructor's parameters, and `replace` gives each field to the constructor
by name. In newer versions they have not, and it would fail.
"""

from typing import Any

from torch.utils import _pytree

_ABSENT = object()
_init = _pytree.TreeSpec.__init__


def _accept_fields(
    self: _pytree.TreeSpec,
    type: Any,
    context: Any = _ABSENT,
    children_specs: Any = _ABSENT,
    *,
    _context: Any = None,
    _children: Any = None,
) -> None:
    _init(
        self,
        type,
        _context if context is _ABSENT else context,
        _children if children_specs is _ABSENT else children_specs,
    )


def accept_fields() -> None:
    """Lets TreeSpec's constructor take its fields by their names, too."""
    _pytree.TreeSpec.__init__ = _accept_fields  # type: ignore[method-assign]
