"""The management process with its page: there when it is asked for, and no reason to stay."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.__main__ import main

pytestmark = pytest.mark.cluster

START_SECONDS = 60.0
END_SECONDS = 10.0


@pytest.fixture
def management(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, and its page's URL."""
    reader, writer = os.pipe()
    options = ["--listen", "127.0.0.1:0", "--page", "127.0.0.1:0", "--cache-root", str(tmp_path)]
    with open(reader, encoding="utf-8") as announcement:
        process = subprocess.Popen(
            [sys.executable, "-m", "appliance", *options, "--announce-fd", str(writer)],
            pass_fds=[writer],
            stderr=subprocess.PIPE,
        )
        os.close(writer)
        try:
            yield process, json.loads(announcement.readline())["page"]
        finally:
            process.kill()
            process.communicate(timeout=END_SECONDS)


def test_it_shows_the_real_cluster_and_ends_with_it(management: tuple[subprocess.Popen[bytes], str]) -> None:
    process, url = management
    with urllib.request.urlopen(url, timeout=START_SECONDS) as answer:
        assert "No job runs." in answer.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}jobs/job-x", timeout=START_SECONDS)
    with urllib.request.urlopen(f"{url}events", timeout=START_SECONDS) as events:
        assert b"begin" in b"".join(events.readline() for _ in range(3))
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)  # while somebody is looking
        assert process.wait(END_SECONDS) == 0
        assert time.monotonic() - began < 5.0
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_an_address_that_is_taken_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["--listen", "127.0.0.1:0", "--page", address, "--cache-root", str(tmp_path)]) == 1
    assert f"the page cannot listen at {address}" in caplog.text
