"""What roles are called."""

from wsc.v1 import node_pb2


def role_name(role: "node_pb2.Role.ValueType") -> str:
    """Such as "wafer"."""
    return node_pb2.Role.Name(role).removeprefix("ROLE_").lower()
