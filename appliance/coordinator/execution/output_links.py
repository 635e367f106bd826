"""The links on which a coordinator receives the outputs of an epoch."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from appliance.coordinator.execution.results import OutputCallbacks, Results
from waferbox import deadlines
from waferbox.links.link import Link
from waferbox.links.listener import LinkListener
from waferbox.runtime.schedule import StepSchedule
from wsc.v1 import coordinator_pb2, node_pb2, plan_pb2

# --- What an epoch requires, which a simulation replaces --------------------------------------------------------------


class Outputs(Protocol):
    """The outputs of an epoch; see Results."""

    def start(self) -> None: ...

    def take(self) -> coordinator_pb2.OutputBatch | None: ...

    def consumed(self, step: int) -> None: ...

    async def close(self) -> None: ...


class ExpectedLinks(Protocol):
    """The links of one epoch, which its nodes will open."""

    async def open(self, plan: plan_pb2.Plan, schedule: StepSchedule, callbacks: OutputCallbacks) -> Outputs:
        """Waits for the links, and returns the outputs, which own them; see Results. Raises LinkLost."""

    def close(self) -> None:
        """Expects the links no longer; no effect after open."""


class OutputLinks(Protocol):
    """The links of a coordinator."""

    def endpoint(self) -> node_pb2.LinkEndpoint:
        """Returns the address at which nodes open the links."""

    def expect(self, specs: Sequence[node_pb2.LinkSpec]) -> ExpectedLinks:
        """Expects these links."""


# --- Links between processes ------------------------------------------------------------------------------------------


class _ExpectedLinks:
    def __init__(self, listener: LinkListener, specs: Sequence[node_pb2.LinkSpec]) -> None:
        self._pending = {spec.purpose: listener.expect(spec.token, spec.peer) for spec in specs}

    async def open(self, plan: plan_pb2.Plan, schedule: StepSchedule, callbacks: OutputCallbacks) -> Results:
        links: dict[int, Link] = {}
        try:
            for purpose, one in self._pending.items():
                # A node that has loaded has opened its links, so that these waits are short.
                links[purpose] = await asyncio.to_thread(one.wait, deadlines.LINKS.coordinator)
            results = Results(plan, schedule, links, callbacks)
        except BaseException:
            for link in links.values():
                link.close()
            raise
        self._pending.clear()
        return results

    def close(self) -> None:
        for one in self._pending.values():
            one.close()


class ListenedLinks:
    """The links of a coordinator that is a process."""

    def __init__(self, listener: LinkListener) -> None:
        self._listener = listener

    def endpoint(self) -> node_pb2.LinkEndpoint:
        return self._listener.endpoint()

    def expect(self, specs: Sequence[node_pb2.LinkSpec]) -> ExpectedLinks:
        return _ExpectedLinks(self._listener, specs)
