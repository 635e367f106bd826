"""Loggers that are named after classes."""

import logging


def named_class_logger(name: str) -> type["ClassLogger"]:
    """A base class whose `logger` has this name."""
    return type("NamedClassLogger", (ClassLogger,), {"logger": property(lambda self: logging.getLogger(name))})


class ClassLogger:
    """A class whose `logger` is named after its module and itself."""

    @property
    def logger(self) -> logging.Logger:
        return logging.getLogger(f"{type(self).__module__}.{type(self).__qualname__}")
