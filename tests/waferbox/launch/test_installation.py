"""A process of the cluster imports its own installation; a user's code finds none of its role packages."""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from waferbox import roles
from waferbox.launch import installation

# Imported instead of a module of the installation, it fails the process.
FOREIGN = 'raise ImportError(f"{__file__} was imported")\n'
# What the process of a role prints, line by line.
ROLE = """
    import os, sys

    def main():
        import cstorch, json, wave, wsc
        import only_users
        print(__file__, cstorch.__file__, wsc.__file__, only_users.__file__, sep="\\n")
        print(sys.argv[1:], os.environ["GRPC_VERBOSITY"])
        return 0
"""
LAYOUTS = {"checkout": {"cstorch": "client", "wsc": "proto"}, "wheel": {"cstorch": "", "wsc": ""}}


def _package(folder: Path, content: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(textwrap.dedent(content))
    return folder


@pytest.fixture(params=LAYOUTS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An installation in which the packages lie as in a checkout, or as in a wheel."""
    root = tmp_path / "installation"
    for package, folder in LAYOUTS[request.param].items():
        _package(root / folder / package)
    _package(root / "memoryx", ROLE)
    shutil.copy(installation.__file__, _package(_package(root / "waferbox") / "launch"))
    (root / "json.py").write_text(FOREIGN)  # the standard library's comes first
    return root


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A user's folder, with modules of the names of ours, and one of its own."""
    folder = tmp_path / "users"
    for name in ("waferbox", "memoryx", "wsc", "cstorch", "client", "proto"):
        _package(folder / name, FOREIGN)
    (folder / "wave.py").write_text(FOREIGN)
    (folder / "only_users.py").write_text("")
    return folder


def _run(command: Sequence[str], folder: Path, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GRPC_VERBOSITY")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        command, cwd=folder, env={**environment, **variables}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_process_imports_its_own_installation(root: Path, users: Path) -> None:
    script = root / "waferbox" / "launch" / "installation.py"
    command = [sys.executable, "-P", str(script), "memoryx", "--shard", "3"]
    role, *packages, own, rest = _run(command, users, PYTHONPATH=str(users))
    assert Path(role) == root / "memoryx" / "__init__.py"
    assert [Path(path).is_relative_to(root) for path in packages] == [True, True]
    assert Path(own) == users / "only_users.py"  # found last, but found
    assert rest == "['--shard', '3'] NONE"


def test_an_operators_choice_of_grpcs_log_stays(root: Path, users: Path) -> None:
    script = root / "waferbox" / "launch" / "installation.py"
    command = [sys.executable, "-P", str(script), "memoryx"]
    assert _run(command, users, PYTHONPATH=str(users), GRPC_VERBOSITY="DEBUG")[-1] == "[] DEBUG"


def test_the_command_of_a_process_searches_neither_its_folder_nor_that_of_the_script(users: Path) -> None:
    assert installation.python_command("memoryx") == [sys.executable, "-P", installation.__file__, "memoryx"]
    command = installation.python_command("waferbox.launch.process")
    with pytest.raises(AssertionError, match=r"usage: waferbox\.launch\.process"):
        _run(command, users, PYTHONPATH=str(users))


def test_no_process_is_started_by_a_search_for_its_module() -> None:
    """`python -m` would find a user's module of the same name: `python_command` is for all processes of ours."""
    root = Path(__file__).parents[3]
    folders = sorted({role.module.partition(".")[0] for role in roles.ROLES} | {"waferbox", "client"})
    sources = [path for folder in folders for path in (root / folder).rglob("*.py")]
    assert len(sources) > 100
    found = {str(path.relative_to(root)) for path in sources if '"-m"' in path.read_text()}
    # `check -m` and `run -m`: the user's module
    assert found == {"waferbox/commands/script_command.py"}


def test_a_users_program_gets_the_environment_of_the_user() -> None:
    assert installation.user_environment({"GRPC_VERBOSITY": "NONE", "HOME": "/"}) == {"HOME": "/"}
    assert installation.user_environment({"GRPC_VERBOSITY": "ERROR"}) == {"GRPC_VERBOSITY": "ERROR"}


def test_folders_of_a_checkout_are_found_by_the_packages_in_them(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()  # of somebody else
    _package(tmp_path / "proto" / "wsc")
    assert installation.roots(str(tmp_path)) == [str(tmp_path), str(tmp_path / "proto")]
    here = Path(__file__).parents[3]
    assert installation.roots(str(here)) == [str(here), str(here / "client"), str(here / "proto")]


def test_an_interpreter_of_another_layout_keeps_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/one", "/other"])
    installation.put_first()
    assert sys.path == ["/one", "/other"]


def test_put_first_may_be_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/users", *sys.path])
    installation.put_first()
    once = list(sys.path)
    assert once.index("/users") > max(map(once.index, installation.roots(str(Path(__file__).parents[3]))))
    installation.put_first()
    assert sys.path == once


@pytest.mark.parametrize(("before", "after"), [("NONE", None), ("DEBUG", "DEBUG")])
def test_a_users_code_finds_no_trace_of_the_role(
    monkeypatch: pytest.MonkeyPatch, before: str, after: str | None
) -> None:
    modules = {**sys.modules, "workers": sys, "workers.child": sys, "workers_of_mine": sys}
    monkeypatch.setattr(sys, "modules", modules)
    monkeypatch.setenv("GRPC_VERBOSITY", before)
    installation.begin_user_code({"workers"})
    assert "workers" not in modules
    assert "workers.child" not in modules
    assert "workers_of_mine" in modules
    assert os.environ.get("GRPC_VERBOSITY") == after


def test_a_script_keeps_grpcs_log_as_it_is(tmp_path: Path) -> None:
    script = """
        import os
        import cerebras.pytorch as cstorch
        import waferbox.rpc.async_server
        cstorch.backend("CSX")
        print(os.environ.get("GRPC_VERBOSITY"))
    """
    assert _run([sys.executable, "-c", textwrap.dedent(script)], tmp_path)[-1] == "None"


def test_processes_are_started_without_the_data_path(tmp_path: Path) -> None:
    script = "import sys, waferbox.launch.fork_server; print([name for name in sys.modules if 'links' in name])"
    assert _run([sys.executable, "-c", script], tmp_path) == ["[]"]


# Prints the variable when gRPC is about to be imported, which reads it then.
WATCH = """
    import os, runpy, sys

    class Watch:
        @staticmethod
        def find_spec(name, path, target=None):
            if name == "grpc":
                print("grpc:", os.environ.get("GRPC_VERBOSITY"), file=sys.stderr, flush=True)
                os._exit(0 if os.environ.get("GRPC_VERBOSITY") == "NONE" else 1)

    sys.meta_path.insert(0, Watch)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.exit("it does not import grpc")
"""


@pytest.mark.parametrize(
    "command",
    [
        ["appliance", "--help"],
        ["appliance.ingress", "--help"],
        ["vendor_gateway", "--help"],
        ["swarmx", "--management", "127.0.0.1:1"],
        ["waferbox", "status"],
    ],
    ids=lambda command: command[0],
)
def test_a_process_begins_before_it_imports_grpc(tmp_path: Path, command: list[str]) -> None:
    _run([sys.executable, "-c", textwrap.dedent(WATCH), *command], tmp_path)
