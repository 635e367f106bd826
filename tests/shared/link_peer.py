"""`python link_peer.py ENDPOINT TOKEN LANE`: a process that dials a link, sends a group, and receives one.

ENDPOINT is a LinkEndpoint, as JSON. The process prints facts about the link, or the error, as JSON.
"""

import json
import os
import sys

from google.protobuf.json_format import Parse
from link_pairs import DEADLINE_SECONDS, filled

from waferbox.links.dialling import dial
from waferbox.links.hub import Hub
from waferbox.links.link import LinkLost
from wsc.v1 import node_pb2

GROUP, NBYTES = 7, 3 * 1024 * 1024


def main(endpoint: str, token: str, lane: str) -> dict[str, object]:
    facts: dict[str, object] = {"pid": os.getpid(), "network": os.stat("/proc/self/ns/net").st_ino}
    try:
        link = dial(
            Parse(endpoint, node_pb2.LinkEndpoint()),
            token,
            name="listener",
            own_name="dialler",
            lane=node_pb2.Lane.Value(lane),
            deadline_seconds=DEADLINE_SECONDS,
        )
    except LinkLost as error:
        return {**facts, "error": str(error)}
    hub = Hub()
    hub.add(link)
    payload = filled(NBYTES)
    hub.send(link, GROUP, 1, payload)
    message = hub.receive(link, GROUP, 2)
    facts |= {"lane": link.lane, "equal": message.view == payload.view, "shared": message.memory is not None}
    hub.send(link, GROUP, 3, payload)  # The other end waits for this group before it closes the link.
    hub.close()
    link.close()
    return facts


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
