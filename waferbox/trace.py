"""The command `waferbox trace`: what every role did, in a few steps of a running job."""

import json
import os
from pathlib import Path
from typing import Annotated, Never

import grpc
import typer

from interconnect.server import make_channel
from waferbox.chrome_trace import chrome_trace
from waferbox.records import records
from wsc.v1 import observation_pb2, observation_pb2_grpc


def trace(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job that runs.")],
    steps: Annotated[int, typer.Option(min=1, max=1000, help="How many steps.")] = 5,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file.", dir_okay=False)] = Path("trace.json"),
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to wait for these steps.")] = 600.0,
    management: Annotated[
        str | None,
        typer.Option(envvar="WAFERBOX_MANAGEMENT", metavar="HOST:PORT", help="The management service."),
    ] = None,
) -> None:
    """Write a timeline of the next steps of a job: a file for https://ui.perfetto.dev or chrome://tracing."""
    with make_channel(management or _only_cluster()) as channel:
        request = observation_pb2.TraceJobRequest(job=job, num_steps=steps)
        responses = observation_pb2_grpc.ObservationStub(channel).TraceJob(request, timeout=seconds)
        try:
            spans = [span for response in responses for span in response.spans]
        except grpc.RpcError as error:
            _fail(f"there is no trace: {error.details() if isinstance(error, grpc.Call) else error}")
    if not spans:
        _fail("there is no trace: the job ended before these steps")
    partial = output.with_name(f"{output.name}.partial")
    try:
        partial.write_text(json.dumps(chrome_trace(spans)))
        os.replace(partial, output)
    except OSError as error:
        _fail(f"{output} cannot be written: {error.strerror}")
    first, last = min(span.step for span in spans), max(span.step for span in spans)
    nodes = len({span.node for span in spans})
    typer.echo(f"{len(spans)} spans of {nodes} nodes, steps {first} to {last}, are in {output}: open it in Perfetto.")


def _only_cluster() -> str:
    known = records()
    if len(known) != 1:
        _fail(f"{len(known)} clusters were started here: say which is meant with --management HOST:PORT")
    return known[0].management


def _fail(message: str) -> Never:
    typer.echo(f"waferbox: {message}", err=True)
    raise typer.Exit(1)
