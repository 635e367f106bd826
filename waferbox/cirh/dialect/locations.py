"""The locations of operations: their sources in the form of xDSL."""

from functools import lru_cache

from xdsl.dialects.builtin import (
    CallSiteLoc,
    FileLineColLoc,
    IntAttr,
    LocationAttr,
    NameLoc,
    StringAttr,
    UnknownLoc,
)
from xdsl.ir import Attribute, Operation

from waferbox.cirh.dialect.source import Source

UNKNOWN = UnknownLoc()
_PHASES = ("fwd", "bwd", "metric")
# Folders whose files never have the user's line.
_LIBRARIES = ("torch/", "cerebras/", "cstorch/")


@lru_cache(maxsize=1 << 16)
def location(source: Source) -> LocationAttr:
    """The location of an operation from a source: loc("fc1.bwd/aten::addmm"("train.py":53:0))."""
    if source == Source():
        return UNKNOWN
    phase = "bwd" if source.backward else "metric" if source.metric else "fwd"
    name = f"{source.module}.{phase}/{source.op}"
    line = FileLineColLoc(StringAttr(source.file), IntAttr(source.line), IntAttr(0)) if source.file else UNKNOWN
    return NameLoc(StringAttr(name), line)


def _frames(location: LocationAttr) -> list[FileLineColLoc]:
    """The lines of a location, the innermost first."""
    found: list[FileLineColLoc] = []
    stack: list[Attribute] = [location]
    while stack:
        item = stack.pop()
        if isinstance(item, FileLineColLoc):
            found.append(item)
        elif isinstance(item, NameLoc):
            stack.append(item.location)
        elif isinstance(item, CallSiteLoc):
            stack += (item.caller, item.callee)
    return found


@lru_cache(maxsize=1 << 16)
def source_of_location(location: LocationAttr) -> Source:
    """The source in a location, with the innermost line outside the libraries, or else the innermost line."""
    module = op = phase = ""
    if isinstance(location, NameLoc):
        module, _, op = location.desc.data.rpartition("/")
        outer, _, phase = module.rpartition(".")
        if phase in _PHASES:
            module = outer
    frames = _frames(location)
    frame = next((f for f in frames if not f.filename.data.startswith(_LIBRARIES)), frames[0] if frames else None)
    file, line = (frame.filename.data, frame.line.data) if frame else ("", 0)
    return Source(module=module, backward=phase == "bwd", metric=phase == "metric", op=op, file=file, line=line)


def source_of(op: Operation) -> Source:
    """The source of an operation."""
    return source_of_location(op.location)
