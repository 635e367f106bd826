"""The tokens by which a coordinator shows a node that management gave it to the coordinator's job."""

import time

from interconnect.security.own_tokens import cluster_secret
from interconnect.security.tokens import Kind
from wsc.v1 import management_pb2


def with_lease(node: management_pb2.NodeInfo, job: str) -> management_pb2.NodeInfo:
    """The same node, with the token of a lease that is later than all before."""
    leased = management_pb2.NodeInfo()
    leased.CopyFrom(node)
    leased.lease = cluster_secret().token(Kind.LEASE, job, node.instance, str(time.time_ns()))
    return leased
