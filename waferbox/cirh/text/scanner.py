"""Tokens of CIRH text. Text from the wire may be hostile, so every length is bounded here."""

import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from waferbox.cirh import CirhError, TextError

T = TypeVar("T")

MAXIMUM_TEXT = 1 << 28
MAXIMUM_TOKEN = 1024
MAXIMUM_STRING = 1 << 16
MAXIMUM_ITEMS = 1 << 18
# Possessive quantifiers, since backtracking would take unbounded time and memory.
_TOKEN = re.compile(
    r"""(?:\s++|//[^\n]*+)*+(?:
    (?P<value>%[A-Za-z0-9_$.-]++(?:[:\#]\d++)?)
    |(?P<type>(?:tensor|vector)<[0-9x]*+[a-z0-9]++>)
    |(?P<number>-?(?:0[xX][0-9a-fA-F]++|\d++(?:\.\d*+)?(?:[eE][+-]?\d++)?))
    |(?P<string>"(?:[^"\\\n]++|\\[^\n])*+")
    |(?P<word>[A-Za-z_][A-Za-z0-9_$.]*+)
    |(?P<arrow>->)
    |(?P<alias>\#[A-Za-z0-9_]++)
    |(?P<symbol>@[A-Za-z0-9_$.-]++)
    |(?P<mark>[(){}\[\]<>=,:])
    |(?P<end>\Z)
    )""",
    re.X,
)
_ESCAPE = re.compile(r"\\(?:([0-9A-Fa-f]{2})|([nt\"\\]))")
_SHORT = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


def unescape(token: str) -> str:
    """The text of a string token. Escaped bytes are UTF-8."""
    text = token[1:-1]
    if "\\" not in text:
        return text

    def replace(match: re.Match[str]) -> str:
        return chr(int(match[1], 16)) if match[1] else _SHORT[match[2]]

    # Bytes become latin-1 characters, and then all of them UTF-8: characters above 0xFF were never escaped.
    pieces = _ESCAPE.sub(replace, text)
    try:
        return pieces.encode("latin-1").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return pieces


class Scanner:
    """A position in text: the current token (`kind`, `token`), and methods that step over it."""

    def __init__(self, text: str) -> None:
        if len(text) > MAXIMUM_TEXT:
            raise CirhError(f"the module's text has {len(text)} characters; at most {MAXIMUM_TEXT} are read")
        self._text = text
        self._end = 0
        self._start = 0
        self.kind = ""
        self.token = ""
        # Only a dense constant may hold a longer string.
        self.longest_string = MAXIMUM_STRING
        self.advance()

    def fail(self, message: str) -> NoReturn:
        """Refuses the text at the current token."""
        line = self._text.count("\n", 0, self._start) + 1
        raise TextError(f"line {line}: {message} at {self.token[:60]!r}")

    def advance(self) -> None:
        match = _TOKEN.match(self._text, self._end)
        if match is None:
            self._start, self.token = self._end, self._text[self._end : self._end + 20].strip()
            self.fail("unexpected character")
        kind = match.lastgroup
        assert kind is not None
        self.kind = kind
        self._start, self._end = match.span(kind)
        length = self._end - self._start
        if length > MAXIMUM_TOKEN and (kind != "string" or length > self.longest_string):
            self.token = self._text[self._start : self._start + 60]
            self.fail(f"a {kind} of {length} characters")
        self.token = match.group(kind)

    def accept(self, token: str) -> bool:
        """Steps over the current token if it is this mark or word; returns whether it was."""
        if self.token == token and self.kind != "string":
            self.advance()
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.fail(f"expected {token!r}")

    def take(self, kind: str) -> str:
        """Steps over a token of this kind and returns it."""
        if self.kind != kind:
            self.fail(f"expected a {kind}")
        token = self.token
        self.advance()
        return token

    def items(self, close: str, item: Callable[[], T]) -> list[T]:
        """Comma-separated items up to the closing mark."""
        found: list[T] = []
        if self.accept(close):
            return found
        while True:
            found.append(item())
            if len(found) > MAXIMUM_ITEMS:
                self.fail("too many items")
            if self.accept(close):
                return found
            self.expect(",")

    def text_here(self, pattern: re.Pattern[str]) -> str:
        """The text of a pattern that begins with the current token; empty if there is none."""
        match = pattern.match(self._text, self._start)
        return "" if match is None else match[0]

    def step_over(self, text: str) -> None:
        """Steps over a text that begins with the current token, and that ends where a token does."""
        self._end = self._start + len(text)
        self.advance()

    def body_until(self, close: str, limit: int) -> str:
        """The raw text from the current token up to a mark, which becomes the current token."""
        at = self._text.find(close, self._start, self._start + limit)
        if at < 0:
            self.fail(f"no {close!r} within {limit} characters")
        text = self._text[self._start : at]
        self._end = at
        self.advance()
        return text
