"""The cluster of `waferbox run`: commands find it by its name, and show its page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

# What a user does at another terminal while a script runs.
SCRIPT = """
import os, re, signal, subprocess, sys, urllib.request

def command(*words):
    done = subprocess.run([sys.executable, "-m", "waferbox", *words], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr

own = os.environ.pop("WAFERBOX_MANAGEMENT")
(row,) = [line.split() for line in command("get", "clusters").splitlines() if own in line]
assert row[:3] == ["train", "waferbox", "run"], row
(page,) = [word for word in row if word.startswith("http")]
assert "No job runs." in urllib.request.urlopen(page, timeout=30).read().decode()
for words in ([], ["--management", "train"]):
    assert own in command("status", *words)
assert "'trian' is neither host:port nor the name of a cluster of this machine" in command(
    "status", "--management", "trian"
).replace("│", "").replace("\\n", " ").replace("  ", " ")
assert "no cluster of `waferbox up` runs on this machine" in command("down")  # that of a script is not meant
assert command("page") == f"The cluster at {own}:  {page}\\n"  # which the cluster serves already

with subprocess.Popen(
    [sys.executable, "-m", "waferbox", "page", "--port", "0"], stdout=subprocess.PIPE, text=True
) as process:
    shown = process.stdout.readline()
    url = re.search(r"http://127\\.0\\.0\\.1:\\d+/", shown)[0]
    assert url != page
    assert "No job runs." in urllib.request.urlopen(url, timeout=30).read().decode()
    with urllib.request.urlopen(f"{url}events", timeout=30) as events:
        assert b"begin" in b"".join(events.readline() for _ in range(3))
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
print("all is well")
"""


def test_commands_find_the_cluster_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "WAFERBOX_CACHE": str(tmp_path / "cache")}
    environment["COLUMNS"] = "200"
    command = [sys.executable, "-m", "waferbox", "run", "--page", str(tmp_path / "train.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "To look at it:  http://127.0.0.1:" in done.stdout
    assert done.stdout.endswith("all is well\n")
    assert not (tmp_path / "waferbox").exists()
