"""A SwarmX node's part of a job: its parts of the trees, whose frames it handles as they arrive."""

import time
from collections.abc import Mapping

from swarmx.tree_part import Handlers, TreePart
from waferbox.links.hub import Hub
from waferbox.links.link import Link, Message
from waferbox.runtime.node_job import LinkKey
from waferbox.runtime.progress import Progress, Recorder, group_label
from waferbox.runtime.role_job import RoleJob
from waferbox.runtime.schedule import StepSchedule
from waferbox.runtime.swarmx_trees import tree_of
from wsc.v1 import node_pb2


class SwarmXProgram:
    """The node's parts of all trees of one epoch. Used by the thread of the steps.

    The node handles frames as they arrive, and waits for none in particular. Only the coordinator's window, which
    bounds how far the cluster runs ahead of the client, delays it.
    """

    def __init__(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> None:
        self._hub = hub
        self.progress = Progress("reduce")
        self._labels = {group.id: group_label(group) for group in request.swarmx.groups}
        self._handlers = Handlers()
        self._parts = [self._part(tree, request, links) for tree in self._trees_of(request)]
        self._above = {link for part in self._parts for link in part.above}
        for link in links.values():
            link.expect(self._handlers.sizes(link))
            link.pass_chunks(self._handlers.by_chunk(link))

    def run(self, schedule: StepSchedule) -> Mapping[str, float]:
        """Handles frames until all groups of the epoch are forwarded or joined."""
        handlers, hub, now = self._handlers, self._hub, time.perf_counter
        handlers.left = sum(
            part.every_step * schedule.num_steps + part.output_steps_only * schedule.num_output_steps
            for part in self._parts
        )
        for part in self._parts:
            part.begin(schedule.outputs_leave, schedule.run_ahead_steps)
        progress, in_all = self.progress, max(1, handlers.left)
        begin = done = now()
        try:
            while handlers.left:
                message = hub.wait()
                received = now()
                handlers.handle(message)
                progress.wait += received - done
                waited, done = done, now()
                progress.total = done - begin
                progress.step = schedule.global_step(schedule.num_steps * (in_all - handlers.left) // in_all)
                if progress.recorder is not None:
                    self._record(progress.recorder, schedule, message, waited, received, done)
        finally:
            progress.end_trace()
        return progress.seconds()

    def interrupt(self) -> None:
        """Has no effect: all waits are the hub's."""

    def close(self) -> None:
        self._handlers.clear()
        for part in self._parts:
            part.close()

    @staticmethod
    def _trees_of(request: node_pb2.Load) -> list[int]:
        """Returns the numbers of the trees that the node is in."""
        return sorted({spec.tree for spec in request.links if spec.purpose == node_pb2.LINK_PURPOSE_CHILD})

    def _part(self, tree: int, request: node_pb2.Load, links: Mapping[LinkKey, Link]) -> TreePart:
        children = sorted(
            (spec for spec in request.links if spec.purpose == node_pb2.LINK_PURPOSE_CHILD and spec.tree == tree),
            key=lambda spec: spec.index,
        )
        parent = links.get((node_pb2.LINK_PURPOSE_PARENT, tree))
        shards = {index: link for (purpose, index), link in links.items() if purpose == node_pb2.LINK_PURPOSE_SHARD}
        is_root = parent is None
        return TreePart(
            plan=request.swarmx,
            groups=[group for group in request.swarmx.groups if tree_of(group, request.trees) == tree],
            children=[links[spec.purpose, spec.index] for spec in children],
            wafers_below=[max(1, spec.num_wafers) for spec in children],
            first_wafer=children[0].first_wafer,
            parent=parent,
            shards=shards if is_root else {},  # a node is the root of one tree at most
            coordinator=links.get((node_pb2.LINK_PURPOSE_COORDINATOR, 0)) if is_root else None,
            hub=self._hub,
            handlers=self._handlers,
        )

    def _record(
        self,
        recorder: Recorder,
        schedule: StepSchedule,
        message: Message,
        waited: float,
        received: float,
        done: float,
    ) -> None:
        label = self._labels.get(message.group)
        if label is not None:  # Counts of taken and released groups have no label.
            step = schedule.global_step(message.step)
            what = "broadcast" if message.link in self._above else "reduce"
            recorder.add("wait", label, step, waited, received)
            recorder.add(what, label, step, received, done, group=message.group, source=message.link.name)
        if self.progress.step >= recorder.end:
            self.progress.end_trace()


class SwarmXJob(RoleJob):
    """A job on a SwarmX node, which keeps nothing between executions."""

    def compile(self, request: node_pb2.Load, hub: Hub, links: Mapping[LinkKey, Link]) -> SwarmXProgram:
        return SwarmXProgram(request, hub, links)
