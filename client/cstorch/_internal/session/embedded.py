"""The embedded cluster: child processes of a script that names no management address."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from cstorch._internal.artifacts import make_artifact_dir
from cstorch._internal.check.private_files import process_folder
from cstorch._internal.log import logged_if_slow
from cstorch.distributed.cluster_config import ClusterConfig, check_address
from cstorch.errors import ClusterError, ConfigurationError
from waferbox import deadlines, settings
from waferbox.host.descriptors import readable
from waferbox.host.process_limits import failed_start
from waferbox.launch.installation import python_command
from waferbox.launch.local_clusters import name_of_script
from waferbox.launch.stop_signals import signal_name
from waferbox.limits import MAX_NODES

logger = logging.getLogger("cstorch.cluster")

LOG = "embedded_cluster.log"
MODULE = "waferbox.cluster.embedded"
_LINE_BYTES = 4096
_LOG_TAIL_BYTES = 4000


def shards_for(limit: int, num_cores: int) -> int:
    """Returns the number of MemoryX shards of an embedded cluster.

    Args:
        limit: max_wgt_servers; 0 for the default.
        num_cores: The cores that this machine has for the cluster.
    """
    # One shard is enough on one host. More use more cores, which the wafers and workers need as well; a configuration
    # that was written for a large cluster may allow dozens.
    return min(limit or 1, max(2, num_cores // 2))


class EmbeddedCluster:
    """The process that starts and owns the processes of a cluster for this script.

    The process is in a session of its own, so that Ctrl-C on the terminal reaches the script only. It ends with its
    standard input, and so with the script, however the script ends. `management` is thread-safe, and `stop` ends it.

    Args:
        config: The number of wafers, workers and shards.
        log: The file that gets the cluster's log.

    Raises:
        ClusterError: The process could not be started.
        ConfigurationError: The cluster would have too many workers for one machine.
        SettingError: An environment variable has a wrong text.
    """

    def __init__(self, config: ClusterConfig, log: Path) -> None:
        workers = config.num_csx * config.num_workers_per_csx
        if workers > MAX_NODES:
            raise ConfigurationError(
                f"num_csx={config.num_csx} and num_workers_per_csx={config.num_workers_per_csx} ask for {workers} "
                f"input workers, and a script's own cluster has at most {MAX_NODES}: lower one of them"
            )
        settings.check()  # else a process of the cluster would end, with the reason in its log
        make_artifact_dir(log.parent)
        self.log = log
        self._management: str | None = None
        self._reading = threading.Lock()
        command = [
            *python_command(MODULE),
            *("--wafers", str(config.num_csx)),
            *("--memoryx", str(shards_for(config.max_wgt_servers, len(os.sched_getaffinity(0))))),
            *("--workers", str(workers)),
            *("--name", name_of_script((sys.argv or [""])[0])),
        ]
        logger.info("No management address is set: starting an embedded cluster (its log: %s)", log)
        # Only the script itself is checked, not the process of its input_fn.
        environment = {name: value for name, value in os.environ.items() if name != settings.CHECK.name}
        with log.open("ab") as errors:
            self._log_begin = errors.tell()  # clusters of earlier scripts have written to it
            try:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=process_folder() or log.parent,  # torch does not start in a folder that has been removed
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                raise ClusterError(f"the embedded cluster could not be started: {failed_start(error)}") from error

    @property
    def process_id(self) -> int:
        """The identifier of the process that owns the cluster."""
        return self._process.pid

    def management(self) -> str:
        """Returns the management address, once all nodes are registered.

        Raises:
            ClusterError: The cluster did not start, or has ended; the message has the end of its log.
        """
        with self._reading:
            if self._process.poll() is not None and self._management is not None:
                raise ClusterError(f"the embedded cluster has ended{self._signal()}{self._log_tail()}")
            if self._management is None:
                try:
                    described = json.loads(self._first_line())
                    self._management = check_address(described["management"], "the embedded cluster's address")
                except (ValueError, KeyError, TypeError) as error:
                    raise ClusterError(f"the embedded cluster printed no address: {error}") from error
            return self._management

    def _first_line(self) -> bytes:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        deadline = time.monotonic() + deadlines.START.embedded
        line = b""
        while not line.endswith(b"\n") and len(line) < _LINE_BYTES:
            left = deadline - time.monotonic()
            if left <= 0 or not readable([output], left):
                raise ClusterError(
                    f"the embedded cluster did not start within {deadlines.START.embedded:.0f} s{self._log_tail()}"
                )
            some = os.read(output, _LINE_BYTES)
            if not some:
                raise ClusterError(f"the embedded cluster ended while it started{self._signal()}{self._log_tail()}")
            line += some
        return line

    def _signal(self) -> str:
        """Returns the signal that has ended the process, which its log does not have; empty: none has."""
        try:
            status = self._process.wait(deadlines.END.embedded)
        except subprocess.TimeoutExpired:
            return ""
        return f", by {signal_name(-status)}" if status < 0 else ""

    def _log_tail(self) -> str:
        tail = self.log.read_bytes()[self._log_begin :][-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return f"; its log {self.log} ends with:\n{tail}" if tail else f"; its log {self.log} is empty"

    def stop(self) -> None:
        """Ends the cluster and waits for the end of its processes; makes a wait for its address fail."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            with logged_if_slow("Ending the embedded cluster"):
                process.wait(deadlines.END.embedded)
        except subprocess.TimeoutExpired:
            # Not a warning: the script has no further use for the cluster.
            logger.debug("the embedded cluster has not ended within %g s: killing it", deadlines.END.embedded)
            os.killpg(process.pid, signal.SIGKILL)  # the group that start_new_session made
            try:
                process.wait(deadlines.END.embedded)
            except subprocess.TimeoutExpired:
                logger.error("the embedded cluster (pid %d) is still there after SIGKILL", process.pid)
        with self._reading:
            process.stdout.close()
