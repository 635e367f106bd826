"""The command `waferbox trace`: what every role did, in a few steps of a running job."""

import json
import os
import time
from pathlib import Path
from typing import Annotated

import grpc
import typer

from waferbox.commands.connection import ManagementOption, connect
from waferbox.commands.job_arguments import JobArgument, find_job
from waferbox.commands.job_watch import JobWatch
from waferbox.output.chrome_trace import chrome_trace
from waferbox.output.console import fail, say
from wsc.v1 import observation_pb2


def trace(
    name: JobArgument,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="How many steps.")] = 5,
    out: Annotated[Path, typer.Option("--output", "-o", help="The file.", dir_okay=False)] = Path("trace.json"),
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to wait for these steps.")] = 600.0,
    management: ManagementOption = None,
) -> None:
    """Write a timeline of the next steps of a job: a file for https://ui.perfetto.dev or chrome://tracing."""
    spans: list[observation_pb2.Span] = []
    end = time.monotonic() + seconds
    with connect(management) as cluster:
        job = find_job(cluster.jobs(), name)
        request = observation_pb2.TraceJobRequest(job=job.job, num_steps=steps)

        def begin() -> "grpc.CallIterator[observation_pb2.TraceJobResponse]":
            spans.clear()  # what came of other steps, before management went away
            return cluster.observation.TraceJob(request, timeout=max(0.0, end - time.monotonic()))

        for response in JobWatch(cluster, job).responses(begin):
            spans.extend(response.spans)
    if not spans:
        fail("there is no trace: the job ended before these steps")
    partial = out.with_name(f"{out.name}.partial")
    try:
        partial.write_text(json.dumps(chrome_trace(spans)))
        os.replace(partial, out)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}")
    first, last = min(span.step for span in spans), max(span.step for span in spans)
    nodes = len({span.node for span in spans})
    say(f"{len(spans)} spans of {nodes} nodes, steps {first} to {last}, are in {out}: open it in Perfetto.")
