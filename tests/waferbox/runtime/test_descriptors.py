"""Waiting for descriptors."""

import fcntl
import os
import resource

from waferbox.host.descriptors import readable


def test_only_those_that_can_be_read() -> None:
    quiet, ready = os.pipe(), os.pipe()
    try:
        os.write(ready[1], b"x")
        assert readable([quiet[0], ready[0]], None) == {ready[0]}
        assert readable([quiet[0]], 0.0) == set()
    finally:
        for descriptor in (*quiet, *ready):
            os.close(descriptor)


def test_end_of_a_pipe_counts() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        assert readable([file], None) == {reader}


def test_numbers_above_1023() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    reader, writer = os.pipe()
    try:
        high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 2000)
        os.write(writer, b"x")
        assert readable([high], None) == {high}
        os.close(high)
    finally:
        os.close(reader)
        os.close(writer)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
