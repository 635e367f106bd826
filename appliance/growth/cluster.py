"""What the roles of a simulated cluster share: links, frames on their way, and counts of what has arrived.

All wafers do the same at the same time, so one stands for all, and one SwarmX node for each level of the tree: a
thousand wafers cost no more than a few. Where a node has several children, what it sends to them leaves one behind the
other, and the one that stands for them is the last.
"""

from collections import defaultdict
from collections.abc import Callable

from appliance.growth.costs import Costs
from appliance.growth.events import Clock, Count, Line
from appliance.growth.rates import Rates
from appliance.growth.tree import Level
from wsc.v1 import plan_pb2


class Host:
    """One role with a link and a thread."""

    def __init__(self, name: str, rates: Rates) -> None:
        self.name = name
        self.outgoing = Line(rates.link_bytes_per_second)
        self.incoming = Line(rates.link_bytes_per_second)
        self.busy_seconds = 0.0  # of its thread

    def work(self, seconds: float) -> float:
        """To be yielded: the thread is busy for so long."""
        self.busy_seconds += seconds
        return seconds


class Cluster:
    """A plan on its roles."""

    def __init__(self, plan: plan_pb2.Plan, costs: Costs, rates: Rates, levels: tuple[Level, ...]) -> None:
        self.plan = plan
        self.costs = costs
        self.rates = rates
        self.levels = levels  # from the root
        self.clock = Clock()
        self.wafer = Host("wafer", rates)
        self.shards = [Host(f"memoryx-{part.shard}", rates) for part in plan.memoryx]
        self.nodes = [Host(f"swarmx level {depth}", rates) for depth in range(len(levels))]
        self._arrived: dict[tuple[str, int], Count] = defaultdict(lambda: Count(self.clock))
        self.credit = [Count(self.clock) for _ in plan.memoryx]  # weights groups that all wafers have taken
        self.step_ends: list[float] = []  # of the wafers

    def arrived(self, host: Host, group: int) -> Count:
        """How many frames of a group have come to a host."""
        return self._arrived[host.name, group]

    def carry(
        self,
        sender: Host,
        receiver: Host,
        nbytes: int,
        arrive: Callable[[], None],
        *,
        copies: int = 1,
        senders: int = 1,
    ) -> None:
        """A frame, now. The receiver is called when its last byte is there.

        copies: to as many receivers of this kind. senders: as many of this kind send theirs to the one receiver.
        """
        start, sent = sender.outgoing.reserve(self.clock.now, copies * nbytes)

        def enter() -> None:
            _, taken = receiver.incoming.reserve(self.clock.now, senders * nbytes)
            self.clock.at(max(sent, taken) + self.rates.latency_seconds, arrive)

        self.clock.at(start, enter)
