"""How many calls without a valid token come from where: who sends many is answered shortly, and logged once a minute.

A valid token is never refused for what others at the same address do.
"""

import logging
import threading
import time
from collections import OrderedDict
from typing import Final

MAX_ADDRESSES: Final = 1024  # that are kept in mind
WINDOW_SECONDS: Final = 60.0
MAX_IN_WINDOW: Final = 30

logger = logging.getLogger(__name__)


class WrongTokens:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()  # by address: begin of the window, count

    def is_too_many(self, peer: str) -> bool:
        """Counts a call that gRPC says came from this peer; whether there were too many of late."""
        address = peer.rpartition(":")[0]
        now = time.monotonic()
        with self._lock:
            begin, count = self._seen.pop(address, (now, 0))
            if now - begin > WINDOW_SECONDS:
                begin, count = now, 0
            self._seen[address] = (begin, count + 1)
            if len(self._seen) > MAX_ADDRESSES:
                self._seen.popitem(last=False)
        if count == 0:
            logger.warning("a call from %s bore no token of this cluster, and was refused", address or peer)
        return count >= MAX_IN_WINDOW
