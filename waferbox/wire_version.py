"""The version by which the processes of a cluster and its clients recognise each other."""

import hashlib
from typing import Final

from waferbox import __version__
from wsc.v1 import (
    coordinator_pb2,
    ingress_pb2,
    initialisation_pb2,
    management_pb2,
    node_pb2,
    observation_pb2,
    plan_pb2,
    record_pb2,
)

# Raised by a change of what processes send each other that no message of proto/wsc/v1 shows: the recipe of an input_fn,
# the meaning of a field.
REVISION: Final = 1

PROTOCOLS: Final = (
    coordinator_pb2,
    ingress_pb2,
    initialisation_pb2,
    management_pb2,
    node_pb2,
    observation_pb2,
    plan_pb2,
    record_pb2,
)

_DIGITS: Final = 8


def _fingerprint() -> str:
    digest = hashlib.sha256(str(REVISION).encode())
    for protocol in PROTOCOLS:
        digest.update(protocol.DESCRIPTOR.serialized_pb)
    return digest.hexdigest()[:_DIGITS]


# Releases differ in the first part, states of the development between two releases only in the second.
WIRE_VERSION: Final = f"{__version__}+{_fingerprint()}"

MISMATCH_REMEDY: Final = (
    "install the same Waferbox for the script and for all processes of the cluster, then start the cluster again"
)
