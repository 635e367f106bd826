"""What users read about the jobs that hold nodes for which another waits."""

import time
from collections.abc import Iterable
from typing import Final

from waferbox.settings import IDLE_SECONDS
from wsc.v1 import management_pb2

_UNTIL: Final = f", and gives them back by backend.release(), at its script's end, or after {IDLE_SECONDS.name}"


def holders_text(holders: Iterable[management_pb2.Holder]) -> str:
    """Describes holders: "job-1f2e is ada's, and has nodes since 14:05; it has been idle since 14:20, and ...".

    Times are local, with a date if it is not that of today. Empty without holders.
    """
    return "; ".join(
        f"{holder.job} is {holder.user or 'nobody'}'s, and has nodes since {_clock_text(holder.since)}"
        + (f"; it has been idle since {_clock_text(holder.idle_since)}{_UNTIL}" if holder.idle_since else "")
        for holder in holders
        if holder.since
    )


def _clock_text(seconds: float) -> str:
    moment = time.localtime(seconds)
    is_today = moment[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if is_today else "%Y-%m-%d %H:%M", moment)
