"""`python -m waferbox.rpc.health_check host:port`: exits with 0 if the process at that address serves."""

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from waferbox import deadlines
from waferbox.rpc.address import split_address
from waferbox.rpc.server import make_channel


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m waferbox.rpc.health_check", description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    address = parser.parse_args(argv).address
    try:
        split_address(address)
    except ValueError as error:
        parser.error(str(error))
    with make_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=deadlines.QUERIES.health).status
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            print(f"{address} does not answer: {error.details()}", file=sys.stderr)
            return 1
    if status != health_pb2.HealthCheckResponse.SERVING:
        print(f"{address} does not serve", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
