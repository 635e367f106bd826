"""The main loop of an input_fn's process: it builds the loader, and fills slots until the worker closes the socket."""

import argparse
import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence

from .batch_digest import UNKNOWN
from .batches import Ring, Selection, endless
from .confinement import confine
from .failures import USER_ERRORS, InputFailure, names_killed_process, summary, user_traceback
from .loader import Position, build, resume
from .messages import Channel, Failed, Fill, Filled, Load, Prepare, WorkerEnded
from .temporary_folder import remove_abandoned_folders, use_own_folder


def serve(channel: Channel) -> None:
    """Builds the loader, then fills slots without end. The next batch is made before it is requested."""
    prepare, (builder_file, arguments_file) = channel.receive(Prepare)
    with open(arguments_file, "rb") as file:
        sys.argv = json.load(file)
    with open(builder_file, "rb") as file:
        loader, source = build(prepare, file.read())
    load, (ring_file, *states_files) = channel.receive(Load)
    ring = Ring(ring_file, load.layout)
    num_skipped = first_step = 0
    if states_files:
        first_step = load.done_steps
        with open(states_files[0], "rb") as file:
            resume(loader, file.read(), is_vendors=prepare.vendor_builder)
    else:
        num_skipped = load.done_steps // prepare.settings.num_workers
    position = Position(loader, channel, prepare, load.state_steps, first_step)
    # A pass may have no batch for this worker: if its batches are dealt out, or if it is resumed at its end.
    passes = endless(loader, prepare.settings.num_workers)
    selection = Selection(prepare, load.layout, source, begins=not load.done_steps)
    batches = selection.own(passes, position, num_skipped)
    while True:
        try:
            tensors = next(batches)
        except InputFailure as failure:
            _fail_when_requested(channel, failure, position)
        except USER_ERRORS as error:
            _fail_when_requested(channel, _failure(f"the input_fn {source}", error), position)
        fill, _ = channel.receive(Fill)
        position.state_steps, position.recovery_step = list(fill.state_steps), fill.recovery_step
        ring.write(fill.slot, tensors)
        first = tuple(part.hex() for part in selection.first_batch)
        channel.send(Filled(slot=fill.slot, digests=tuple(selection.digests), first_batch=first))
        selection.digests, selection.first_batch = [], UNKNOWN


def _failure(source: str, error: BaseException) -> InputFailure:
    message = f"the loader of {source} raised {summary(error)}"
    killed = names_killed_process(error)
    if killed:
        message += "; a process of the loader was killed, perhaps for want of memory"
    return InputFailure(message, user_traceback(error), killed=killed)


def _fail_when_requested(channel: Channel, failure: InputFailure, position: Position) -> None:
    # The batch may never be requested, as the steps may be over. If a state is due, the worker waits for it already.
    position.send_no_recovery_state()
    if not position.state_steps:
        channel.receive(Fill)
    raise failure


def redirect(output: int) -> None:
    """Replaces standard output and error with a descriptor, and sends each line when it is printed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the interpreter's own
    os.close(output)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m waferbox.input_process")
    parser.add_argument("--socket", type=int, required=True, metavar="FD", help="the socket to the worker")
    parser.add_argument("--output", type=int, required=True, metavar="FD", help="the output of the user's code")
    parser.add_argument("--user", default="", metavar="NAME", help="become this user; default: the worker's")
    arguments = parser.parse_args(argv)
    redirect(arguments.output)
    with contextlib.suppress(OSError):
        # As in waferbox.launch.process, which a foreign interpreter does not have.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    confine([arguments.socket], arguments.user)
    remove_abandoned_folders()
    use_own_folder()
    with socket.socket(fileno=arguments.socket) as connection, contextlib.suppress(WorkerEnded):
        channel = Channel(connection)
        try:
            try:
                serve(channel)
            except RuntimeError as error:
                if not names_killed_process(error):
                    raise
                raise _failure("the input_fn", error) from error
        except InputFailure as failure:
            channel.send(Failed(message=str(failure), traceback=failure.trace, killed=failure.killed))
            channel.wait_for_end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
