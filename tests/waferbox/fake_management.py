"""A management service in this process, with the jobs and nodes of a test, that records the requests for changes."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from wsc.v1 import management_pb2, management_pb2_grpc, node_pb2, observation_pb2, observation_pb2_grpc

PHASE = management_pb2.JobPhase.Value


def node(index: int, role: "node_pb2.Role.ValueType", job: str = "", member: str = "") -> management_pb2.NodeInfo:
    return management_pb2.NodeInfo(
        node_id=f"n{index}",
        role=role,
        address=f"127.0.0.1:{7000 + index}",
        host="earth",
        process_id=100 + index,
        job=job,
        lease_left_seconds=4.5,
        version="1.0",
        member=member,
        metrics=f"127.0.0.1:{8000 + index}",
    )


def job(name: str, phase: str, **fields: Any) -> management_pb2.JobInfo:
    return management_pb2.JobInfo(
        job=name,
        phase=PHASE(f"JOB_PHASE_{phase}"),
        user="ada",
        host="earth",
        priority=2,
        num_csx=1,
        created=1e9,
        **fields,
    )


def log(node: str, message: str, level: int = 20) -> observation_pb2.JobEvent:
    record = observation_pb2.LogRecord(node=node, time=1e9, level=level, logger=node, message=message)
    return observation_pb2.JobEvent(log=record)


@dataclass
class FakeManagement(
    management_pb2_grpc.ManagementServicer,
    observation_pb2_grpc.ObservationServicer,
):
    """Both services of the management port."""

    # No test calls these, which the stubs call abstract.
    Register = management_pb2_grpc.ManagementServicer.Register
    CreateJob = management_pb2_grpc.ManagementServicer.CreateJob
    Coordinate = management_pb2_grpc.ManagementServicer.Coordinate
    AdoptJob = management_pb2_grpc.ManagementServicer.AdoptJob
    Shutdown = management_pb2_grpc.ManagementServicer.Shutdown
    TraceJob = observation_pb2_grpc.ObservationServicer.TraceJob

    jobs: list[management_pb2.JobInfo] = field(default_factory=list)
    nodes: list[management_pb2.NodeInfo] = field(default_factory=list)
    events: list[observation_pb2.JobEvent] = field(default_factory=list)  # the events of every job
    requested: list[object] = field(default_factory=list)  # the requests for changes
    over: threading.Event = field(default_factory=threading.Event)  # set when followed jobs have ended
    address: str = ""

    def serve(self) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(8))
        management_pb2_grpc.add_ManagementServicer_to_server(self, server)
        observation_pb2_grpc.add_ObservationServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        return server

    def find(self, name: str) -> management_pb2.JobInfo:
        (found,) = (job for job in self.jobs if job.job == name)
        return found

    def ListJobs(
        self, request: management_pb2.ListJobsRequest, context: grpc.ServicerContext
    ) -> management_pb2.ListJobsResponse:
        return management_pb2.ListJobsResponse(jobs=self.jobs)

    def ListNodes(
        self, request: management_pb2.ListNodesRequest, context: grpc.ServicerContext
    ) -> management_pb2.ListNodesResponse:
        return management_pb2.ListNodesResponse(nodes=self.nodes, metrics="127.0.0.1:9999")

    def GetJob(
        self, request: management_pb2.GetJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.GetJobResponse:
        return management_pb2.GetJobResponse(job=self.find(request.job))

    def CancelJob(
        self, request: management_pb2.CancelJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.CancelJobResponse:
        self.requested.append(request)
        return management_pb2.CancelJobResponse()

    def SetPriority(
        self, request: management_pb2.SetPriorityRequest, context: grpc.ServicerContext
    ) -> management_pb2.SetPriorityResponse:
        found = self.find(request.job)
        if not found.queue_position:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{found.job} has ended")
        found.priority = request.priority
        return management_pb2.SetPriorityResponse()

    def LabelJob(
        self, request: management_pb2.LabelJobRequest, context: grpc.ServicerContext
    ) -> management_pb2.LabelJobResponse:
        if any(" " in label for label in request.add):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a label has no spaces")
        self.requested.append(request)
        return management_pb2.LabelJobResponse(labels=request.add)

    def WatchJob(
        self, request: observation_pb2.WatchJobRequest, context: grpc.ServicerContext
    ) -> Iterator[observation_pb2.JobEvents]:
        for event in self.events:
            if event.WhichOneof("kind") in request.kinds:
                yield observation_pb2.JobEvents(events=[event])
        if request.follow:
            context.add_callback(self.over.set)
            self.over.wait(30.0)
