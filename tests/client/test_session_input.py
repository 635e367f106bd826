"""The Python that workers get from the script's."""

import site
import sys
import sysconfig
from pathlib import Path

import pytest

from cstorch._internal.session.execution.input import _search_paths, prepared_input
from cstorch.distributed.cluster_config import ClusterConfig


def test_own_folders_keep_their_places_before_and_after_the_interpreter() -> None:
    library, packages = sysconfig.get_path("stdlib"), site.getsitepackages()[0]
    paths = ["", "/usr/src/app", library, f"{library}/lib-dynload", packages, "/opt/appended", f"{packages}/egg"]
    assert _search_paths(paths) == ([str(Path.cwd()), "/usr/src/app"], ["/opt/appended"], paths[2:])
    assert _search_paths(["/usr/src/app"]) == (["/usr/src/app"], [], [])


def test_an_environment_within_the_project_does_not_hide_the_project() -> None:
    project = str(Path(sys.prefix).parent)
    packages = sysconfig.get_path("purelib")
    assert _search_paths([project, packages]) == ([project], [], [packages])


def test_the_interpreter_has_nothing_of_its_own_among_them() -> None:
    version = "{}{}".format(*sys.version_info)
    library = sysconfig.get_path("stdlib")
    paths = [f"{sys.base_prefix}/{sys.platlibdir}/python{version}.zip", library]
    assert _search_paths(paths) == ([], [], paths)


def test_a_folder_that_a_package_has_put_before_all_changes_no_order() -> None:
    package = f"{sysconfig.get_path('purelib')}/ray/thirdparty_files"
    paths = [package, "/usr/src/app", sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/opt/appended"]
    before, after, same = _search_paths(paths)
    assert before == [str(Path(package).resolve()), "/usr/src/app"]
    assert after == ["/opt/appended"]
    assert same == paths[2:]


def test_the_arguments_of_the_script_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "f\u00fcr \udcff"])
    request = prepared_input(b"", ClusterConfig(), tmp_path)
    assert list(request.script_arguments) == [b"train.py", b"--name", b"f\xc3\xbcr \xff"]
