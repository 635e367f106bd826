"""The settings of the worker for whose wafer this process makes batches, as its input_fn reads them."""

import functools

from waferbox import settings
from waferbox.input_process.messages import InputSettings, decode_as


def current() -> InputSettings | None:
    """Returns the settings of this process's worker; None on the client and on the CPU."""
    text = settings.INPUT.get()
    return _parse(text) if text else None


@functools.lru_cache(maxsize=1)
def _parse(text: str) -> InputSettings:
    return decode_as(InputSettings, text.encode())
