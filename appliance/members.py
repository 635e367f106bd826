"""What the nodes of each role are called: as members of a job, in messages, and as commands."""

from waferbox.roles import role_name
from wsc.v1 import node_pb2

PACKAGES = {
    node_pb2.ROLE_WAFER: "wafer",
    node_pb2.ROLE_WORKER: "workers",
    node_pb2.ROLE_MEMORYX: "memoryx",
    node_pb2.ROLE_SWARMX: "swarmx",
    node_pb2.ROLE_INGRESS: "appliance.ingress",
}
_NOUNS = {
    node_pb2.ROLE_WAFER: "wafer",
    node_pb2.ROLE_WORKER: "input worker",
    node_pb2.ROLE_MEMORYX: "MemoryX node",
    node_pb2.ROLE_SWARMX: "SwarmX node",
}


def member_name(role: "node_pb2.Role.ValueType", index: int) -> str:
    """The name in a job of its node with this index among those of the role, such as "wafer-0"."""
    return f"{role_name(role)}-{index}"


def counted(count: int, role: "node_pb2.Role.ValueType") -> str:
    """Such as "2 input workers"."""
    return f"{count} {_NOUNS[role]}{'' if count == 1 else 's'}"


def member_index(name: str) -> int:
    """The index of which member_name has made a name."""
    return int(name.rpartition("-")[2])
