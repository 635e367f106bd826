"""A channel that another thread has closed."""

import grpc
import pytest
from tokens_shown import token

from waferbox.rpc.server import make_channel
from waferbox.security.tokens import Kind
from wsc.v1 import coordinator_pb2, coordinator_pb2_grpc


def test_a_call_on_a_closed_channel_is_an_error_and_no_crash() -> None:
    channel: grpc.Channel = make_channel("127.0.0.1:1", token(Kind.NODE))
    stub = coordinator_pb2_grpc.CoordinatorStub(channel)
    channel.close()
    with pytest.raises(ValueError, match="closed"):
        stub.Shards(coordinator_pb2.ShardsRequest(), timeout=1.0)
    with pytest.raises(ValueError, match="closed"):
        stub.Shards.future(coordinator_pb2.ShardsRequest(), timeout=1.0)
