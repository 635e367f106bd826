"""Records what the vendor's client and the gateway say to each other, as data for tests/vendor_gateway.

python tests/vendor/record.py --listen 127.0.0.1:9002 --gateway 127.0.0.1:9001 FILE

A client that calls the one is served by the other. The file is gzipped JSON: a list of calls in the order of their
begin, each with its method, authority, metadata of the client, and the bytes of its requests and responses in base64.
Of requests it has what the gateway reads, without folders of the machine, and without the pickled input function.
"""

import argparse
import base64
import gzip
import json
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory

from vendor_gateway.calls import authority_of
from vendor_wire import appliance_pb2, control_pb2, management_pb2  # noqa: F401 - control's descriptors

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
KEPT = ("client-build-version", "client-semantic-version", "workflow-id")


class Recorder(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def __init__(self, gateway: str) -> None:
        self.calls: list[dict[str, Any]] = []
        self._gateway = gateway
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        method = handler_call_details.method
        metadata = [entry for entry in handler_call_details.invocation_metadata if entry[0] in KEPT]

        def hand_on(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call: dict[str, Any] = {"method": method, "authority": authority_of(context), "metadata": metadata}
            call |= {"requests": [], "responses": []}
            with self._lock:
                self.calls.append(call)
                channel = self._channels.get(call["authority"])
                if channel is None:
                    options = [*UNLIMITED, ("grpc.default_authority", call["authority"])]
                    channel = self._channels[call["authority"]] = grpc.insecure_channel(self._gateway, options=options)

            def noted() -> Iterator[bytes]:
                for request in requests:
                    call["requests"].append(request)
                    yield request

            stub = channel.stream_stream(method, None, None)
            try:
                for response in stub(noted(), metadata=metadata):
                    call["responses"].append(base64.b64encode(response).decode())
                    yield response
            except grpc.RpcError as error:
                call["error"] = [error.code().name, error.details()]
                context.abort(error.code(), error.details() or "")

        return grpc.stream_stream_rpc_method_handler(hand_on)


def stripped(method: str, request: bytes) -> bytes:
    """A request without what the gateway does not read, or what says where it was made."""
    service, _, name = method.removeprefix("/").rpartition("/")
    described = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name]
    message: Any = message_factory.GetMessageClass(described.input_type)()
    message.ParseFromString(request)
    message.DiscardUnknownFields()
    if isinstance(message, appliance_pb2.CompileRequest):
        message.cirh = re.sub(r'"/[^"]*/', '"', message.cirh)
    if isinstance(message, appliance_pb2.RunRequest):
        message.dataloader.builder = message.dataloader.arguments = ""
    if isinstance(message, management_pb2.ExecuteJobRequest):
        del message.python_paths[:], message.mount_dirs[:]
    return bytes(message.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    recorder = Recorder(options.gateway)
    server = grpc.server(ThreadPoolExecutor(256), options=UNLIMITED)
    server.add_generic_rpc_handlers((recorder,))
    server.add_insecure_port(options.listen)
    server.start()
    print("records", flush=True)
    signal.sigwait([signal.SIGINT, signal.SIGTERM])
    for call in recorder.calls:
        call["requests"] = [base64.b64encode(stripped(call["method"], each)).decode() for each in call["requests"]]
    with gzip.open(options.file, "wt", compresslevel=9) as file:
        json.dump(recorder.calls, file)
    server.stop(0)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    main()
