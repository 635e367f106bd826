"""The errors of this package."""


class CirhError(ValueError):
    """A module, an operation or its text is wrong. The message begins with the source location where one is known."""


class TextError(CirhError):
    """Text is wrong. The message begins with its line."""
