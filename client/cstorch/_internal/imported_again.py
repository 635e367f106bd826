"""Whether this process only imports a module of the script, which runs in another process.

A module may make the backend, the model and the executor when it is imported. None of it may start or reach a cluster
where another process needs no more of the module than a function.
"""

import multiprocessing

from cstorch._internal import input_settings


def is_imported_again() -> bool:
    """Whether this is the process of an input_fn, or one of its own, or one that multiprocessing is just spawning."""
    return is_for_input() or _is_being_spawned()


def is_for_input() -> bool:
    """Whether this is the process of an input_fn, or one that it has forked or spawned."""
    return input_settings.current() is not None


def _is_being_spawned() -> bool:
    # As multiprocessing finds out that a process is started while the script is imported; there is no public name.
    return getattr(multiprocessing.current_process(), "_inheriting", False)
