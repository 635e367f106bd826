"""A wafer that the test controls, for a worker, over a real link."""

import queue
import secrets
from typing import Any

import torch
from link_pairs import raise_defect

from waferbox.host.threads import CancellationToken
from waferbox.links.hub import Hub
from waferbox.links.link import Link
from waferbox.links.listener import LinkListener
from waferbox.rpc.server import make_server
from waferbox.runtime.node_job import JobContext
from workers.worker_program import WorkerJob
from wsc.v1 import node_pb2, plan_pb2

ROWS = 8
GROUP = 7


def worker_plan(columns: int, num_csx: int) -> plan_pb2.WorkerPlan:
    local = ROWS // num_csx
    offset = -(-local * columns * 4 // 64) * 64
    x = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, shape=[local, columns])
    y = plan_pb2.TensorType(element_type=plan_pb2.ELEMENT_TYPE_INT64, shape=[local])
    batch = plan_pb2.Group(
        id=GROUP,
        kind=plan_pb2.GROUP_KIND_BATCH,
        members=[
            plan_pb2.GroupMember(value=1, type=x, offset=0),
            plan_pb2.GroupMember(value=2, type=y, offset=offset),
        ],
        nbytes=offset + local * 8,
    )
    return plan_pb2.WorkerPlan(batch=batch, global_rows=ROWS, local_rows=local, micro_batches=1)


class Wafer:
    """A wafer that receives batches, and acknowledges them unless the test says otherwise."""

    def __init__(self, lane: "node_pb2.Lane.ValueType") -> None:
        self.server = make_server()
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.listener = LinkListener(f"127.0.0.1:{port}", raise_defect)
        self.listener.add_to_server(self.server)
        self.server.start()
        self.emitted: queue.Queue[node_pb2.AttachResponse] = queue.Queue()
        self.context = JobContext(
            job="job", node="worker-0", index=0, lane=lane, listener=self.listener, emit=self.emitted.put
        )
        self.hub = Hub()
        self.link: Link | None = None

    def load(self, job: WorkerJob, plan: plan_pb2.WorkerPlan, epoch: int = 1, **fields: Any) -> None:
        token = secrets.token_hex(8)
        pending = self.listener.expect(token, "worker-0")
        spec = node_pb2.LinkSpec(
            token=token,
            peer="wafer-0",
            endpoint=self.listener.endpoint(),
            dial=True,
            purpose=node_pb2.LINK_PURPOSE_WAFER,
        )
        request = node_pb2.Load(epoch=epoch, worker=plan, links=[spec], loader="train", **fields)
        job.load(request, CancellationToken())
        self.link = pending.wait(10)
        self.link.expect({GROUP: plan.batch.nbytes})
        self.hub.add(self.link)
        self.plan = plan

    def receive(self, step: int, *, acknowledge: bool = True) -> list[int]:
        """Receives a step's batch, checks it, and returns its labels."""
        assert self.link is not None
        message = self.hub.receive(self.link, GROUP, step)
        x, y = (
            message.tensor(dtype, tuple(member.type.shape), member.offset)
            for dtype, member in zip((torch.float32, torch.int64), self.plan.batch.members, strict=True)
        )
        assert (x == y.unsqueeze(1)).all()
        labels: list[int] = y.tolist()
        if acknowledge:
            self.link.ack(step)
        return labels

    def response(self) -> node_pb2.AttachResponse:
        """The next one, without that with the digests of the first batch."""
        response = self.emitted.get(timeout=20)
        return self.emitted.get(timeout=20) if response.HasField("input_digests") else response

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.hub.close()
        self.server.stop(0).wait()
        self.listener.close()


def start(job: WorkerJob, num_steps: int, epoch: int = 1, done_steps: int = 0) -> None:
    job.start(node_pb2.Start(epoch=epoch, num_steps=num_steps, done_steps=done_steps))
