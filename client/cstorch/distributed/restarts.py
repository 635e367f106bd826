"""How often a job goes on after something of the cluster has died."""

import os
from typing import Final

from cstorch import backends
from cstorch.errors import ConfigurationError

RESTARTS_VARIABLE: Final = "WAFERBOX_MAX_NUM_RESTARTS"
DEFAULT_MAX_NUM_RESTARTS: Final = 3
MOST_RESTARTS: Final = 1_000_000


def max_num_restarts() -> int:
    """What the flag says, or else the environment variable, or else 3. 0: a death ends the job.

    Raises:
        ConfigurationError: the variable is no such number.
    """
    number = backends.csx.cluster.max_num_restarts
    if number is not None:
        return int(number)
    text = os.environ.get(RESTARTS_VARIABLE) or str(DEFAULT_MAX_NUM_RESTARTS)
    if not text.isascii() or not text.isdigit() or int(text) > MOST_RESTARTS:
        raise ConfigurationError(
            f"the environment variable {RESTARTS_VARIABLE} must be a number from 0 to {MOST_RESTARTS}, not {text!r}"
        )
    return int(text)
