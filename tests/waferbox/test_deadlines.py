"""The waiting side waits longer than the working side takes. Each row names both sides."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml

from waferbox import deadlines, settings
from waferbox.deadlines import (
    ATTACHMENT,
    COORDINATION,
    END,
    FORK_SERVER,
    JOB_CREATION,
    KEEPALIVE,
    LINKS,
    QUERIES,
    REGISTRATION,
    START,
    STATE_TRANSFER,
    VENDOR_CLIENT,
)

ROOT = Path(__file__).parents[2]
HANG_SECONDS = settings.HANG_SECONDS.default
HEARTBEAT = REGISTRATION.lease / REGISTRATION.heartbeats_per_lease
# From the death of a peer until its other side gives it up.
GIVEN_UP = settings.KEEPALIVE_SECONDS.default * (1 + KEEPALIVE.answers_per_interval)
VENDOR_BEAT = 10.0  # of the vendor's client, which is not ours
CLUSTER_END = END.jobs + FORK_SERVER.close  # one after the other, in Cluster.close
COMPOSE_GRACE = 12.0  # stop_grace_period of docker-compose.yml


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Two sides of a wait, in seconds. fails: why the waiting side is meant to give up first."""

    what: str
    waiting: float
    working: float
    fails: str = ""


WAITS: Sequence[Wait] = (
    # Registration
    Wait(what="lease: management / heartbeat: node", waiting=REGISTRATION.lease, working=2 * HEARTBEAT),
    Wait(what="lease / first heartbeat", waiting=REGISTRATION.lease, working=REGISTRATION.first_heartbeat),
    Wait(what="launcher ends a silent node / lease", waiting=HANG_SECONDS / 3, working=REGISTRATION.lease),
    Wait(
        what="nodes kept for jobs / a coordinator notices that management died and connects again",
        waiting=REGISTRATION.return_to_job,
        working=GIVEN_UP + COORDINATION.retry,
    ),
    Wait(what="missing nodes / a node registers again", waiting=REGISTRATION.missing_nodes, working=REGISTRATION.retry),
    Wait(
        what="lost nodes / a node notices that its connection broke, and registers again",
        waiting=REGISTRATION.lost_nodes,
        working=GIVEN_UP + REGISTRATION.retry,
    ),
    # Queries
    Wait(what="launcher's ListNodes / hold", waiting=QUERIES.nodes, working=QUERIES.nodes_wait),
    Wait(what="longest hold / script's GetJob hold", waiting=QUERIES.longest_wait, working=COORDINATION.another_wait),
    Wait(what="longest hold / cause of the end", waiting=QUERIES.longest_wait, working=END.cause),
    Wait(what="command: job unknown / coordinator's retry", waiting=QUERIES.job_unknown, working=GIVEN_UP),
    # A new job
    Wait(
        what="script: CreateJob / management: coordinator's hello",
        waiting=JOB_CREATION.create,
        working=JOB_CREATION.ingress_return + JOB_CREATION.coordinator,
    ),
    Wait(
        what="script: CreateJob / management: fork server starts the coordinator, and its hello",
        waiting=JOB_CREATION.create,
        working=JOB_CREATION.ingress_return + FORK_SERVER.start + JOB_CREATION.coordinator,
    ),
    Wait(what="management: hello / coordinator: hello", waiting=JOB_CREATION.coordinator, working=JOB_CREATION.hello),
    Wait(
        what="coordinator: session / script: first connection",
        waiting=JOB_CREATION.session,
        working=JOB_CREATION.first_replaced,
    ),
    Wait(
        what="script: Shards / coordinator: Load",
        waiting=JOB_CREATION.prepare,
        working=ATTACHMENT.load,
    ),
    # Another coordinator
    Wait(
        what="script: another coordinator / management: fork server and hello",
        waiting=COORDINATION.another,
        working=COORDINATION.spawn + COORDINATION.hello,
    ),
    Wait(
        what="script: another coordinator / management: coordinator returns",
        waiting=COORDINATION.another,
        working=COORDINATION.coordinator_return,
    ),
    Wait(
        what="script: another coordinator / management: ingress returns, and hello",
        waiting=COORDINATION.another,
        working=COORDINATION.ingress_return + COORDINATION.hello,
    ),
    Wait(
        what="record kept / script: another coordinator",
        waiting=COORDINATION.left,
        working=COORDINATION.another,
    ),
    Wait(
        what="coordinator: session of a script that was cut off / end of the old process",
        waiting=COORDINATION.session_return,
        working=COORDINATION.orphaned,
    ),
    Wait(
        what="management: coordinator returns / it notices that management died",
        waiting=COORDINATION.coordinator_return,
        working=GIVEN_UP + COORDINATION.retry,
    ),
    Wait(
        what="coordinator: end of an orphan / ingress stops it",
        waiting=COORDINATION.orphaned,
        working=COORDINATION.ingress_dying + COORDINATION.listens + END.coordinator,
    ),
    # Nodes
    Wait(what="coordinator: attach / node: job before", waiting=ATTACHMENT.attach, working=ATTACHMENT.previous_job),
    Wait(what="node: job before / old coordinator: detach", waiting=ATTACHMENT.previous_job, working=ATTACHMENT.detach),
    Wait(
        what="node: job before / node: execution stops",
        waiting=ATTACHMENT.previous_job,
        working=HANG_SECONDS,
        fails="meant: a node in a long kernel of the job before counts as lost; the next job does not wait for it",
    ),
    Wait(what="coordinator: load / node: links", waiting=ATTACHMENT.load, working=LINKS.open),
    Wait(what="coordinator: stop / node: hung stop", waiting=ATTACHMENT.stop, working=ATTACHMENT.hung_stop),
    Wait(
        what="coordinator: stop / node: execution stops",
        waiting=ATTACHMENT.stop,
        working=HANG_SECONDS,
        fails="meant: recovery replaces a node in a longer kernel, and does not wait for it as long as for a hang",
    ),
    Wait(
        what="coordinator: execution that was left / stop",
        waiting=ATTACHMENT.left_execution,
        working=ATTACHMENT.stop,
    ),
    Wait(what="node: close / node: hung stop", waiting=ATTACHMENT.close, working=ATTACHMENT.hung_stop),
    # Links
    Wait(what="listener: unclaimed / dialer", waiting=LINKS.unclaimed, working=LINKS.open),
    Wait(what="node: links / handshake", waiting=LINKS.open, working=LINKS.handshake),
    Wait(
        what="state keeper: link / script: dial",
        waiting=STATE_TRANSFER.link,
        working=STATE_TRANSFER.open,
    ),
    # Failures and ends
    Wait(
        what="script: verdict / coordinator: stop, after a lost link",
        waiting=END.verdict,
        working=ATTACHMENT.stop,
        fails="meant: nodes answer at once unless one hangs as well; the script then reports the call that broke",
    ),
    Wait(
        what="script: session opened / coordinator: session",
        waiting=JOB_CREATION.opened,
        working=JOB_CREATION.session,
    ),
    Wait(what="coordinator: report / script: management is away", waiting=END.report, working=COORDINATION.script_away),
    Wait(
        what="management: coordinator ends / its detach and its report",
        waiting=END.coordinator,
        working=ATTACHMENT.detach + END.report_present,
    ),
    Wait(
        what="management: coordinator ends / all that it does",
        waiting=END.coordinator,
        working=ATTACHMENT.detach + END.report_present + END.last_messages,
        fails="meant: its nodes are free by then, and the script gets the end of its job from management",
    ),
    Wait(what="launcher: jobs / management: coordinators", waiting=END.jobs, working=END.coordinator),
    Wait(what="owner: fork server / kill of its processes", waiting=FORK_SERVER.close, working=FORK_SERVER.kill),
    Wait(
        what="script: own cluster's end / cluster's end",
        waiting=END.embedded,
        working=CLUSTER_END,
    ),
    Wait(
        what="command: cluster's end / cluster's end",
        waiting=END.launched,
        working=CLUSTER_END,
    ),
    Wait(
        what="waferbox down / cluster's end",
        waiting=END.down,
        working=CLUSTER_END,
    ),
    Wait(what="compose / management's end", waiting=COMPOSE_GRACE, working=END.coordinator + END.server_grace),
    Wait(
        what="compose / node's end",
        waiting=COMPOSE_GRACE,
        working=ATTACHMENT.close + END.server_grace,
    ),
    Wait(
        what="fork server: kill / node's end",
        waiting=FORK_SERVER.kill,
        working=ATTACHMENT.close + END.server_grace,
        fails="meant: a node of a local cluster gets 3 s, since its files survive a kill",
    ),
    # Start
    Wait(
        what="script: own cluster / management and nodes",
        waiting=START.embedded,
        working=START.management + START.nodes,
    ),
    Wait(what="kubernetes: probe / fork server", waiting=START.probe, working=FORK_SERVER.start),
    Wait(what="launcher: nodes / registration", waiting=START.nodes, working=REGISTRATION.retry + JOB_CREATION.hello),
    Wait(what="ray: end / fork server: kill", waiting=START.ray_end, working=FORK_SERVER.kill),
    Wait(
        what="ray: other nodes / Ray notices a lost host, and finds room",
        waiting=START.ray_replacement,
        working=60.0 + START.ray_room,
    ),
    # The vendor's client
    Wait(what="gateway: beat / client: beat", waiting=VENDOR_CLIENT.beat, working=2 * VENDOR_BEAT),
    Wait(what="gateway: idle / longest poll", waiting=VENDOR_CLIENT.idle, working=VENDOR_CLIENT.longest_poll),
)


@pytest.mark.parametrize("wait", [wait for wait in WAITS if not wait.fails], ids=lambda wait: wait.what)
def test_the_waiting_side_waits_longer(wait: Wait) -> None:
    assert wait.waiting > wait.working


@pytest.mark.parametrize("wait", [wait for wait in WAITS if wait.fails], ids=lambda wait: wait.what)
def test_a_known_exception_is_one_still(wait: Wait) -> None:
    assert wait.waiting <= wait.working, "it holds now: remove `fails`"


def test_the_grace_of_compose_is_as_said_here() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {service["stop_grace_period"] for service in services.values() if "stop_grace_period" in service} == {
        f"{COMPOSE_GRACE:g}s"
    }


def test_every_time_is_described_and_positive() -> None:
    conversations = [value for value in vars(deadlines).values() if type(value).__name__.endswith("Deadlines")]
    assert len(conversations) == 14
    for conversation in conversations:
        for field in fields(conversation):
            assert f"    {field.name}: " in (type(conversation).__doc__ or ""), field.name
            assert getattr(conversation, field.name) > 0
