"""The notebook in examples/notebook, on a cluster of its own: as it is, interrupted, and with its kernel restarted."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from cluster_rig import PATIENCE_SECONDS, Surroundings, wait_for
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "digits.ipynb"

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture
def surroundings(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    return Surroundings(tmp_path / "notebook", cache)


def environment(surroundings: Surroundings) -> dict[str, str]:
    """The environment of a kernel."""
    folders = {name: str(surroundings.folder / name) for name in ("IPYTHONDIR", "MPLCONFIGDIR")}
    return surroundings.variables(**folders, JUPYTER_PLATFORM_DIRS="1")


def sources() -> dict[str, str]:
    """The code of each cell, by its id."""
    return {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"}


def test_it_is_committed_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.outputs, cell.execution_count) for cell in cells] == [([], None)] * len(cells)
    assert all(not cell.metadata for cell in notebook.cells)
    assert "version" not in notebook.metadata.language_info  # it is that of the last kernel


def test_it_runs_from_top_to_bottom(surroundings: Surroundings) -> None:
    notebook = nbformat.read(NOTEBOOK, 4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(surroundings.folder)}})
    client.execute(env=environment(surroundings))
    cells = {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}

    def data(name: str, kind: str) -> str:
        (found,) = [output.data[kind] for output in cells[name].outputs if kind in output.get("data", ())]
        return str(found)

    def printed(name: str) -> str:
        return "".join(output.text for output in cells[name].outputs if output.get("name") == "stdout")

    assert data("loss", "image/png")
    report = data("report", "text/html")
    assert report.startswith("<iframe")
    assert "Compile report" in report
    assert 1 < int(printed("train").split()[-2]) < 1000
    assert float(printed("evaluate").split()[-1]) > 0.9
    assert printed("release") == ""
    surroundings.assert_nothing_left()


class Kernel:
    """A kernel, and what it prints. A context, which ends it."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.manager = KernelManager()
        self.manager.start_kernel(cwd=str(surroundings.folder), env=environment(surroundings))
        self._client = self.manager.blocking_client()
        self._client.start_channels()

    def run(self, source: str, on_text: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
        """Runs a cell, and returns the kernel's reply. on_text: gets all text of the cell so far, when it has more."""
        texts: list[str] = []

        def add(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                texts.append(message["content"]["text"])
                on_text("".join(texts))

        self._client.wait_for_ready(timeout=PATIENCE_SECONDS)
        reply = self._client.execute_interactive(source, timeout=PATIENCE_SECONDS, output_hook=add)
        return {**reply["content"], "text": "".join(texts)}

    def value(self, expression: str) -> str:
        """The text of an expression's value."""
        reply = self.run(f"print({expression})")
        assert reply["status"] == "ok", reply
        return str(reply["text"]).strip()

    def close(self) -> None:
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def kernel(surroundings: Surroundings) -> Iterator[Kernel]:
    kernel = Kernel(surroundings)
    yield kernel
    kernel.close()
    surroundings.assert_nothing_left()


# The loop of the notebook without its end; it prints once steps have been done.
LONG_LOOP = """
executor = cstorch.utils.data.DataExecutor(loader, num_steps=100000)
for batch in executor:
    note(training_step(batch))
    if len(losses) == 4:
        print("four losses or more")
"""


def test_cells_run_twice_in_any_order_and_are_interrupted(kernel: Kernel, surroundings: Surroundings) -> None:
    code = sources()
    for name in ("backend", "backend", "data"):
        assert kernel.run(code[name])["status"] == "ok"
    early = kernel.run(code["train"])  # before the model is made
    assert (early["ename"], early["evalue"]) == ("NameError", "name 'note' is not defined")
    assert kernel.run(code["model"])["status"] == "ok"
    assert kernel.run(code["model"])["status"] == "ok"
    assert kernel.run("loader = cstorch.utils.data.DataLoader(digits, True, 64)")["status"] == "ok"

    # The stop button, in the middle of a loop.
    stops: list[str] = []

    def stop(text: str) -> None:
        if "four losses" in text and not stops:
            stops.append(text)
            kernel.manager.interrupt_kernel()

    reply = kernel.run(LONG_LOOP, on_text=stop)
    assert reply["ename"] == "KeyboardInterrupt"
    assert not any("cstorch/" in line for line in reply["traceback"]), "frames of the library"
    done = int(kernel.value("len(losses)"))
    assert 4 <= done < 100000
    # The interrupt may come in the closure of a step, before it has appended the loss.
    left = re.search(r"The loop was left after step (\d+) of 100000", reply["text"])
    assert left is not None, reply["text"]
    assert int(left[1]) in (done, done + 1)

    # Training goes on from there, also after the nodes are returned; a checkpoint is loaded between two loops.
    assert kernel.run(code["continue"])["status"] == "ok"
    assert kernel.value("len(losses)") == str(done + 100)
    for name in ("save", "release", "save", "evaluate", "evaluate"):
        reply = kernel.run(code[name])
        assert reply["status"] == "ok", (name, reply)
    assert float(reply["text"].split()[-1]) > 0.9

    # Other settings need another backend.
    reply = kernel.run(code["backend"].replace("num_csx=2", "num_csx=1"))
    assert "cstorch.close_backend()" in reply["evalue"]

    # A restart kills the kernel where it is; the cluster ends with it.
    provisioner = kernel.manager.provisioner
    assert isinstance(provisioner, LocalProvisioner)
    started = [process for process in surroundings.processes() if process.pid != provisioner.pid]
    assert len(started) > 4
    kernel.manager.restart_kernel(now=True)
    wait_for(lambda: not any(map(psutil.Process.is_running, started)), explain=lambda: f"still there: {started}")
    assert kernel.run(code["backend"])["status"] == "ok"
