"""The process of one job's coordinator, started by management or an ingress."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from appliance.coordinator.compilation import cached_compiler
from appliance.coordinator.process_host import ProcessHost
from appliance.coordinator.record import JobRecord, RecordFolder, record_folder
from appliance.coordinator.serving import CutOff, Event, serve_job
from appliance.coordinator.settings import CUT_OFF_STATUS, END_SIGNAL, CoordinatorSettings, read_settings
from waferbox.host.clock import Clock
from waferbox.host.event_loop import SteadyClock, SteadyEventLoop
from waferbox.host.memory import collect_seldom
from waferbox.launch.installation import begin_process
from waferbox.launch.process import FIRST_FD, let_wafers_compute
from waferbox.runtime.logs import set_up_logging

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves one job until it is over."""
    set_up_logging()
    let_wafers_compute()
    collect_seldom()
    settings = read_settings(FIRST_FD)
    if settings.may_restart:
        # A SIGTERM or SIGINT of this process alone is a death like others: who ends the job does so through management.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        clock = SteadyClock()
        with asyncio.Runner(loop_factory=lambda: SteadyEventLoop(clock)) as runner:
            return runner.run(_serve(settings, clock))
    except CutOff:
        logger.warning("the script was cut off: another coordinator waits for it")
        logging.shutdown()
        os._exit(CUT_OFF_STATUS)  # ends all threads at once, as a crash would


async def _serve(settings: CoordinatorSettings, clock: Clock) -> int:
    events: asyncio.Queue[Event] = asyncio.Queue()
    for number in (END_SIGNAL,) if settings.may_restart else (END_SIGNAL, signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, events.put_nowait, Event.TERMINATE)
    host = ProcessHost(settings, clock)
    try:
        compile_step = cached_compiler(settings.cache, settings.cache_root)
        record = JobRecord(RecordFolder(record_folder(settings.cache_root, settings.job)))
        return await serve_job(settings, compile_step, events, host, record)
    finally:
        host.close()


if __name__ == "__main__":
    begin_process()
    sys.exit(main())
