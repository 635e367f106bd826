"""How long the processes of Waferbox wait for each other, one class for each conversation. All times are in seconds.

The waiting side must wait longer than the working side takes; otherwise it gives up before the answer comes.
tests/waferbox/test_deadlines.py compares the two sides of each wait. Times that concern one module alone, such as the
pause between two polls, are constants of that module; times that users set are in waferbox/settings.py.

A module reads a time at the moment of its use, as `deadlines.LINKS.open`, so that a test can replace `deadlines.LINKS`.
The classes have no comparison and no repr: every process pays at its start for the methods that a dataclass generates.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RegistrationDeadlines:
    """A node and the management service.

    lease: from the last heartbeat of a node until management considers it lost.
    heartbeats_per_lease: the number of heartbeats that a node sends in that time.
    first_heartbeat: from one message of a node to the next, until management has sent the lease.
    retry: between attempts of a node to reach management.
    missing_nodes: how long a job waits for nodes that the cluster does not have, before it is refused.
    lost_nodes: the same after the loss of a node, or the start of management: nodes may register again, whose end of a
        broken connection may notice the break only after the keepalive.
    return_to_job: how long a restarted management service keeps nodes for jobs whose coordinators have not connected.
    """

    lease: float = 5.0
    heartbeats_per_lease: int = 4
    first_heartbeat: float = 1.0
    retry: float = 0.5
    missing_nodes: float = 5.0
    lost_nodes: float = 20.0
    return_to_job: float = 10.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class KeepaliveDeadlines:
    """Two ends of a gRPC connection; `waferbox.settings.KEEPALIVE_SECONDS` is the time of silence before a ping.

    answers_per_interval: the time in which a ping must be answered, as a multiple of that time (a number).
    suspended: how long a server for scripts waits for the answer of a script, which may be in a debugger.
    vanished: how long it waits for an acknowledgement of the script's host, which a suspended script does not prevent.
    """

    answers_per_interval: float = 5 / 3
    suspended: float = 3600.0
    vanished: float = 60.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QueryDeadlines:
    """A query to management or to a health service.

    longest_wait: how long management holds a ListNodes or GetJob call at most.
    command: a call of a command.
    completion: a call of the shell's completion.
    supervision: a call by which a launcher checks that its processes are nodes.
    nodes: a ListNodes call of a launcher that waits for its nodes.
    nodes_wait: how long management may hold that call.
    ingress: a call by which the ingress gets the addresses of a cluster.
    health: a call of the health check.
    history: until a command has received all that is kept of a job.
    management_away: how long a command that follows a job waits for an absent management service.
    job_unknown: how long such a command waits until a restarted management service has the job.
    """

    longest_wait: float = 10.0
    command: float = 4.0
    completion: float = 1.0
    supervision: float = 2.0
    nodes: float = 10.0
    nodes_wait: float = 0.5
    ingress: float = 2.0
    health: float = 3.0
    history: float = 30.0
    management_away: float = 60.0
    job_unknown: float = 20.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JobCreationDeadlines:
    """A script, management, and the coordinator of a new job.

    connect: the connection of a script to management or to a coordinator.
    silent: how much longer a script waits for a management service that listens and does not answer.
    create: the script's call CreateJob, for which management starts a coordinator process.
    coordinator: until a new coordinator has connected to management.
    ingress_return: until an ingress that passed the call on has connected to management again.
    hello: until the first message of a stream between coordinator and management has come, on both sides.
    session: until the script has opened its session with the first coordinator.
    opened: until the coordinator has answered the script's session. A coordinator may be stopped, and continue.
    first_replaced: how long a script looks for a replacement of the first coordinator before it has reached any.
    compile: the script's call Compile.
    prepare: the script's calls PrepareInput and Shards; they may wait for a Load.
    """

    connect: float = 4.0
    silent: float = 30.0
    create: float = 120.0
    coordinator: float = 50.0
    ingress_return: float = 3.0
    hello: float = 20.0
    session: float = 10.0
    opened: float = 60.0
    first_replaced: float = 8.0
    compile: float = 3600.0
    prepare: float = 2400.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CoordinationDeadlines:
    """A coordinator that is replaced or cut off: management, the script and the ingress.

    retry: between attempts of a coordinator to reach management.
    management_away: how long a job that waits for nodes waits for management.
    spawn: until a fork server that died is replaced.
    hello: until a coordinator that runs has connected to management again; then it is killed, as it hangs.
    coordinator_return: until a coordinator whose process management does not know has connected again.
    ingress_return: until an ingress that died has been restarted, to run its coordinators again.
    losses: the time in which more coordinators of a job may not die than it may restart.
    another: how long a script waits for another coordinator.
    another_wait: how long management may hold one call by which the script asks for it.
    another_answer: how much longer the script waits for the answer to that call.
    script_away: how long management may be absent meanwhile, unless its cluster is known to have ended: containers are
        restarted after up to half a minute.
    session_return: until a script that was cut off has opened its session again.
    left: from the death of a coordinator until its script has given up the job.
    orphaned: until a coordinator has ended whose ingress died, or whose script was cut off.
    together: in which all streams of a broken connection end.
    ingress_dying: from the end of the first connection of a dying ingress to the end of its last.
    listens: the connection that checks whether an ingress still listens.
    """

    retry: float = 0.5
    management_away: float = 60.0
    spawn: float = 10.0
    hello: float = 30.0
    coordinator_return: float = 10.0
    ingress_return: float = 60.0
    losses: float = 60.0
    another: float = 120.0
    another_wait: float = 1.0
    another_answer: float = 1.0
    script_away: float = 60.0
    session_return: float = 20.0
    left: float = 150.0
    orphaned: float = 10.0
    together: float = 0.5
    ingress_dying: float = 0.5
    listens: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AttachmentDeadlines:
    """A coordinator and the nodes of its job. `waferbox.settings.HANG_SECONDS` limits what a node does in between.

    attach: until all nodes have answered Attach.
    previous_job: how long a node waits for the end of its previous job, before it refuses the next. The end joins
        threads and, at worst, waits for a link.
    load: until all nodes have loaded the plan; a wafer may have many kernels to compile.
    stop: until all nodes have stopped an execution.
    left_execution: until the nodes have stopped an execution that the script left, when the next begins.
    hung_stop: how long a hanging execution may take to stop.
    detach: until all nodes have dropped the job.
    close: how long a node that ends waits until its job is dropped.
    """

    attach: float = 15.0
    previous_job: float = 5.0
    load: float = 1800.0
    stop: float = 15.0
    left_execution: float = 20.0
    hung_stop: float = 2.0
    detach: float = 4.0
    close: float = 10.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LinkDeadlines:
    """The two ends of a link.

    open: until a node has opened all links of a Load; all nodes of a job open theirs at about the same time.
    coordinator: until a link to the coordinator is open, after its node has loaded.
    handshake: until a caller has sent its handshake.
    unclaimed: how long a listener keeps a caller that is not awaited yet.
    close: how long a closing gRPC link waits for its peer to take what was sent.
    """

    open: float = 20.0
    coordinator: float = 20.0
    handshake: float = 5.0
    unclaimed: float = 30.0
    close: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StateTransferDeadlines:
    """A script and the state keepers of its job.

    open: the call OpenState, and then the dialling of the link.
    link: until the link of the script has reached the state keeper.
    transfer: a call that writes, reads or initialises states.
    stage: the call StageStates.
    reason: until a call has ended whose link broke, which gives the reason.
    close: until the connection of a script is closed.
    """

    open: float = 10.0
    link: float = 15.0
    transfer: float = 600.0
    stage: float = 600.0
    reason: float = 1.0
    close: float = 5.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RecoveryDeadlines:
    """A job after a death; `waferbox.settings.REPLACEMENT_SECONDS` limits the wait for other nodes.

    launcher: how long a launcher may take to start a node again, before the job reports that it waits for one, and
        takes a MemoryX node on another host.
    one_restart: the time in which several lost nodes count as one restart.
    fewer_wafers: the call by which a job gives nodes back, to continue with fewer wafers.
    point_lead: for the command to keep a recovery point to reach all nodes.
    copy: a copy of a recovery point to another host, without the time for its bytes; a slower source hangs.
    """

    launcher: float = 3.0
    one_restart: float = 10.0
    fewer_wafers: float = 60.0
    point_lead: float = 0.5
    copy: float = 60.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EndDeadlines:
    """The end of a job, or of a cluster: the script, the coordinator, management, and the launcher.

    cancel: the script's calls CancelJob and SetPriority.
    finish: the script's call Finish.
    cause: how long management may hold a GetJob call until the job's end is reported.
    cause_answer: how much longer the script waits for the answer.
    verdict: how long a script waits for the coordinator's cause of a failure.
    last_messages: for the coordinator's last messages to reach the script.
    report: how long a coordinator whose job has ended waits for management, to report the end: longer than a script
        waits for management, to get the cause.
    report_present: the same, where the job was ended from outside and management is there.
    coordinator: until a terminated coordinator has released its nodes.
    signal: until an ingress has passed a signal on to a coordinator.
    jobs: how long a launcher waits until management has ended all jobs.
    server_grace: for the calls of a server that stops.
    embedded: how long a script waits for the end of its own cluster.
    launched: how long a command waits for the end of a cluster that it started.
    down: how long `waferbox down` waits for the end of a cluster.
    """

    cancel: float = 2.0
    finish: float = 2.0
    cause: float = 1.8
    cause_answer: float = 1.0
    verdict: float = 4.0
    last_messages: float = 2.0
    report: float = 65.0
    report_present: float = 2.0
    coordinator: float = 7.0
    signal: float = 2.0
    jobs: float = 8.0
    server_grace: float = 0.5
    embedded: float = 20.0
    launched: float = 20.0
    down: float = 20.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ForkServerDeadlines:
    """A fork server, its owner, and the processes that request others from it.

    start: until a requested process runs; the fork server may have to import torch from a cold disk first.
    status: until the fork server has passed on the exit status of a process.
    kill: from SIGTERM to SIGKILL of a process.
    close: how long the owner waits for the end of the fork server.
    own_end: from the end of the fork server's socket to that of its process.
    """

    start: float = 60.0
    status: float = 5.0
    kill: float = 3.0
    close: float = 8.0
    own_end: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InputProcessDeadlines:
    """A worker and the process of its input_fn.

    end: from the end of its socket to the exit status of the process.
    group: for the kernel to end the killed processes.
    """

    end: float = 3.0
    group: float = 5.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StartDeadlines:
    """The start of a cluster: the script, the launcher, Ray, Kubernetes.

    management: until management has announced its address.
    nodes: until all nodes have registered.
    vendor_gateway: until the gateway has announced its address.
    embedded: how long a script waits for its own cluster.
    probe: how long Kubernetes waits until a role serves.
    ray_connect: for an answer at the address of a Ray cluster.
    ray_room: for Ray to find room.
    ray_end: for a process on Ray to end.
    ray_replacement: REPLACEMENT_SECONDS of a cluster on Ray, which alone may take a minute to notice a lost host.
    """

    management: float = 60.0
    nodes: float = 60.0
    vendor_gateway: float = 60.0
    embedded: float = 150.0
    probe: float = 120.0
    ray_connect: float = 5.0
    ray_room: float = 60.0
    ray_end: float = 5.0
    ray_replacement: float = 180.0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VendorClientDeadlines:
    """The vendor's client and the gateway.

    longest_poll: how long the gateway holds a polling call at most.
    beat: from the last beat of a client until it is considered gone, while its stream is open; it beats every 10 s.
    gone: the same, after the stream of its beats has broken.
    idle: the same, while it has no live job: it compiles, or builds an image.
    longest_lease: the longest time that a client may request instead of `beat`.
    """

    longest_poll: float = 30.0
    beat: float = 45.0
    gone: float = 6.0
    idle: float = 90.0
    longest_lease: float = 3600.0


REGISTRATION: Final = RegistrationDeadlines()
KEEPALIVE: Final = KeepaliveDeadlines()
QUERIES: Final = QueryDeadlines()
JOB_CREATION: Final = JobCreationDeadlines()
COORDINATION: Final = CoordinationDeadlines()
ATTACHMENT: Final = AttachmentDeadlines()
LINKS: Final = LinkDeadlines()
STATE_TRANSFER: Final = StateTransferDeadlines()
RECOVERY: Final = RecoveryDeadlines()
END: Final = EndDeadlines()
FORK_SERVER: Final = ForkServerDeadlines()
INPUT_PROCESS: Final = InputProcessDeadlines()
START: Final = StartDeadlines()
VENDOR_CLIENT: Final = VendorClientDeadlines()
