"""docker-compose.yml on a real Docker engine: the digits train as on an embedded cluster, and a job outlives restarts
of all services, and the death of the process of each.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "fc_digits" / "train.py"
PATIENT = Path(__file__).parent / "patient.py"
VENDOR_TRAIN = ROOT / "tests" / "vendor" / "scripts" / "train.py"
PORT = "19000"
BUILD_SECONDS = 1200.0
UP_SECONDS = 180.0
SCRIPT_SECONDS = 180.0
VENDOR_PYTHON = os.environ.get("WAFERBOX_VENDOR_PYTHON", "")
SERVICES = ("management", "ingress", "memoryx", "swarmx", "wafer", "worker")


def docker_is_there() -> bool:
    if shutil.which("docker") is None:
        return False
    answers = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=20)
    engine = subprocess.run(["docker", "info"], capture_output=True, timeout=20)
    return answers.returncode == 0 and engine.returncode == 0


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(BUILD_SECONDS + UP_SECONDS),
    pytest.mark.skipif(not docker_is_there(), reason="no Docker engine with compose answers"),
]


def compose(*arguments: str, seconds: float = 60.0, more: Sequence[str] = ()) -> str:
    """What a command of the project printed. more: files besides docker-compose.yml."""
    variables = {**os.environ, "WAFERBOX_PORT": PORT, "WAFERBOX_MOUNT": str(ROOT), "PWD": str(ROOT)}
    command = ["docker", "compose", "--project-name", "waferbox-test"]
    for file in ("docker-compose.yml", *more):
        command += ["--file", str(ROOT / file)]
    done = subprocess.run([*command, *arguments], env=variables, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def token() -> str:
    """The owner's, as the cluster's own command prints it."""
    return compose("exec", "-T", "management", "python", "-m", "waferbox", "token").strip()


def environment(management: str | None, cache: Path) -> dict[str, str]:
    own = {"WAFERBOX_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    address = {} if management is None else {"WAFERBOX_MANAGEMENT": management, "WAFERBOX_TOKEN": token()}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("WAFERBOX_") or name == "WAFERBOX_TLS_DIR"
    }
    return {**inherited, **own, **address}


@pytest.fixture(scope="module")
def management() -> Iterator[str]:
    """The way into a cluster of containers: 2 of each role."""
    compose("up", "--detach", "--build", "--scale", "wafer=2", "--scale", "worker=2", seconds=BUILD_SECONDS)
    address = f"127.0.0.1:{PORT}"
    try:
        wait_for_nodes(address)
        yield address
    finally:
        everything = ["deploy/vendor-client.yml"]
        compose("down", "--volumes", "--remove-orphans", "--timeout", "5", seconds=UP_SECONDS, more=everything)
    for kind in ("container", "volume", "network"):
        more = ["--all"] if kind == "container" else []
        found = subprocess.run(
            ["docker", kind, "ls", "--quiet", "--filter", "label=com.docker.compose.project=waferbox-test", *more],
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert found.stdout == "", f"a {kind} is left"


def wait_for_nodes(address: str) -> None:
    """Until all are there and free."""
    deadline = time.monotonic() + UP_SECONDS
    while len(re.findall(r"\bfree\b", waferbox("status", address))) < 8:
        assert time.monotonic() < deadline, compose("logs", "--tail", "50")
        time.sleep(1)


def waferbox(command: str, address: str) -> str:
    """What a command printed; nothing where the cluster does not answer."""
    words = [sys.executable, "-m", "waferbox", *command.split(), "--management", address]
    shown = {**os.environ, "WAFERBOX_TOKEN": token()}
    return subprocess.run(words, env=shown, capture_output=True, text=True, timeout=30).stdout


def losses(management: str | None, folder: Path) -> list[str]:
    arguments = ["--num-steps", "100", "--checkpoint-steps", "50", "--model-dir", str(folder / "model")]
    data = ["--data", str(ROOT / "data" / "digits.pt")]
    script = subprocess.run(
        [sys.executable, str(TRAIN), *arguments, *data],
        env=environment(management, folder / "cache"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SCRIPT_SECONDS,
    )
    assert script.returncode == 0, script.stderr
    assert (folder / "model" / "checkpoint_100.mdl").exists()
    return re.findall(
        r"(?:Train|Eval) Device=CSX, Step=\d+, Loss=[\d.]+|Accuracy on held-out digits: [\d.]+", script.stderr
    )


def test_the_digits_train_to_the_same_losses_as_on_an_embedded_cluster(management: str, tmp_path: Path) -> None:
    (tmp_path / "containers").mkdir()
    (tmp_path / "embedded").mkdir()
    in_containers = losses(management, tmp_path / "containers")
    assert len(in_containers) == 2 + 5 + 1
    assert in_containers == losses(None, tmp_path / "embedded")


def test_the_containers_see_each_other_s_sockets(management: str) -> None:
    assert len(compose("exec", "-T", "wafer", "ls", "/run/waferbox").split()) >= 8
    assert "take gRPC" not in compose("logs")


@pytest.fixture(scope="module")
def undisturbed(management: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints where nothing happens."""
    return train(management, tmp_path_factory.mktemp("undisturbed"), lambda: None)


def train(management: str, folder: Path, harm: Callable[[], None]) -> str:
    """What the script prints; the harm is done while it waits."""
    script = subprocess.Popen(
        [sys.executable, str(PATIENT), str(folder / "artifacts")],
        env=environment(management, folder / "cache"),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    before = ""
    try:
        assert script.stdout is not None
        for line in script.stdout:
            before += line
            if line.startswith("step 10:"):
                break
        harm()
        output, errors = script.communicate("\n", timeout=SCRIPT_SECONDS)
    finally:
        script.kill()
        script.wait()
    assert script.returncode == 0, errors + compose("logs", "--tail", "100")
    return before + output


def kill_process_of(service: str) -> None:
    """The one that the container runs: Docker starts again what dies by itself, but not what it was told to kill."""
    container = compose("ps", "--quiet", service).split()[0]
    inspected = ["docker", "inspect", "--format", "{{.State.Pid}}", container]
    init = subprocess.run(inspected, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    for child in Path(f"/proc/{init}/task/{init}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("services", [*([service] for service in SERVICES), SERVICES], ids=[*SERVICES, "all"])
def test_a_job_goes_on_when_services_are_restarted(
    management: str, undisturbed: str, tmp_path: Path, services: Sequence[str]
) -> None:
    assert train(management, tmp_path, lambda: restart(services)) == undisturbed


def restart(services: Sequence[str]) -> None:
    compose("restart", *services, seconds=UP_SECONDS)


@pytest.mark.parametrize("service", SERVICES)
def test_a_job_goes_on_when_the_process_of_a_container_dies(
    management: str, undisturbed: str, tmp_path: Path, service: str
) -> None:
    assert train(management, tmp_path, lambda: kill_process_of(service)) == undisturbed


@pytest.mark.skipif(not VENDOR_PYTHON, reason="no environment of the vendor's client: `make vendor-test`")
@pytest.mark.timeout(2 * BUILD_SECONDS)
def test_the_vendors_own_client_trains_as_on_its_cpu_backend(management: str, tmp_path: Path) -> None:
    overlay = ["deploy/vendor-client.yml"]
    compose("up", "--detach", "--scale", "wafer=2", "--scale", "worker=2", seconds=BUILD_SECONDS, more=overlay)
    wait_for_nodes(management)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("WAFERBOX_", "PYTHON"))}
    config = {
        "CSCONFIG_PATH": str(ROOT / "deploy" / "vendor-client.json"),
        "PATH": f"{Path(VENDOR_PYTHON).parent}:{os.environ['PATH']}",
    }
    found = {}
    for backend in ("cpu", "csx"):
        script = [VENDOR_PYTHON, VENDOR_TRAIN, backend, tmp_path / backend, "vectors", "adamw"]
        done = subprocess.run(script, env={**inherited, **config}, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr + compose("logs", "--tail", "100")
        found[backend] = json.loads(next(line for line in done.stdout.splitlines()[::-1] if line.startswith("{")))
    losses = [[loss for _, loss, _ in found[backend]["log"]] for backend in ("cpu", "csx")]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)


def test_a_job_trains_over_tls(
    management: str, undisturbed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compose("up", "--detach", "--scale", "wafer=2", "--scale", "worker=2", seconds=UP_SECONDS, more=["deploy/tls.yml"])
    for file in ("authority.pem", "client.pem"):
        compose("cp", f"management:/var/lib/waferbox-secret/tls/{file}", str(tmp_path))
    assert waferbox("status", management) == ""
    monkeypatch.setenv("WAFERBOX_TLS_DIR", str(tmp_path))
    wait_for_nodes(management)
    assert train(management, tmp_path, lambda: None) == undisturbed
