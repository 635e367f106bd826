"""Pickling what the workers run, so that their tracebacks show the lines of the user's own files."""

import io
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

import cloudpickle


def dumps(recipe: object) -> bytes:
    """As cloudpickle does it; loaded by cloudpickle. Raises what it raises for what cannot be pickled."""
    with io.BytesIO() as file:
        _Pickler(file).dump(recipe)
        return file.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """From 3.1.3 on cloudpickle writes another file name, without which no line can be shown."""
    make, arguments = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    written = make(*arguments).co_filename
    return make, tuple(code.co_filename if argument == written else argument for argument in arguments)


class _Pickler(cloudpickle.CloudPickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.CloudPickler.dispatch_table)
