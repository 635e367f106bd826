"""Several hosts on one machine: network namespaces on a bridge, each behind a link of a given rate. Needs root."""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

BURST: Final = "256kb"
LATENCY: Final = "50ms"
COMMAND_SECONDS: Final = 20.0


class NoNetwork(RuntimeError):
    """Namespaces cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A namespace with one link; or, without a name, where we are."""

    namespace: str
    address: str  # without a port
    switch: str = ""  # the namespace of what it is plugged into
    port: str = ""  # there

    def command(self, *words: str) -> list[str]:
        """What runs a command on the host."""
        return ["ip", "netns", "exec", self.namespace, *words] if self.namespace else [*words]

    def sent_bytes(self) -> int:
        """What has left the host over its link."""
        path = "/sys/class/net/uplink/statistics/tx_bytes"
        done = subprocess.run(
            self.command("cat", path), capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
        )
        return int(done.stdout)

    def cut_off(self) -> None:
        """Frames from and to the host are lost from now on, without a word to anybody."""
        self._set_port("0")  # disabled

    def reconnect(self) -> None:
        """As before cut_off."""
        self._set_port("3")  # forwarding

    def _set_port(self, state: str) -> None:
        _run("ip", "netns", "exec", self.switch, "bridge", "link", "set", "dev", self.port, "state", state)


HERE: Final = Host(namespace="", address="127.0.0.1")


@contextlib.contextmanager
def hosts(count: int, rate: str, last_sends: str = "") -> Iterator[list[Host]]:
    """So many hosts that reach each other; nothing of them is left afterwards.

    Args:
        rate: of each link in each direction, as tc has it: "1gbit".
        last_sends: the rate at which the last host sends, if that is another.

    Raises:
        NoNetwork: the machine does not let us.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        raise NoNetwork("network namespaces need root, ip and tc")
    mark = secrets.token_hex(2)
    switch = f"wb{mark}switch"
    made = [
        Host(namespace=f"wb{mark}host{number}", address=f"10.77.0.{number}", switch=switch, port=f"port{number}")
        for number in range(1, count + 1)
    ]
    with contextlib.ExitStack() as stack:
        try:
            for namespace in (switch, *(host.namespace for host in made)):
                _run("ip", "netns", "add", namespace)
                stack.callback(_run, "ip", "netns", "del", namespace)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge0", "up")
            for host in made:
                sending_rate = last_sends if last_sends and host is made[-1] else rate
                _plug_in(host, sending_rate, rate)
        except subprocess.CalledProcessError as error:
            raise NoNetwork(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        yield made


def _plug_in(host: Host, sending_rate: str, receiving_rate: str) -> None:
    """Shaped in both directions: what the host sends, and what the switch sends to it."""
    switch, port = host.switch, host.port
    _run("ip", "link", "add", "uplink", "netns", host.namespace, "type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
    _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "uplink")
    _run("ip", "-n", host.namespace, "link", "set", "uplink", "up")
    for namespace, device, shaped in ((host.namespace, "uplink", sending_rate), (switch, port, receiving_rate)):
        shape = ("root", "tbf", "rate", shaped, "burst", BURST, "latency", LATENCY)
        _run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *shape)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_SECONDS)
