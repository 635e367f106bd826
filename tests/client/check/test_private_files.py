"""The files of a checked script: it finds what it has written, and those of the user stay as they are."""

import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import torch

from cstorch._internal.check.private_files import PrivateFiles

OPERATIONS = Path(__file__).parent / "file_operations.py"


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def in_process(*command: str, temporary: Path) -> None:
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert list(temporary.iterdir()) == []


def test_files_of_the_user_stay_as_they_are(tmp_path: Path) -> None:
    user, record = tmp_path / "user", tmp_path / "record"
    for name, text in {"losses.csv": "1\n", "data/a": "a", "data/sub/b": "b", "kept/file": ""}.items():
        (user / name).parent.mkdir(parents=True, exist_ok=True)
        (user / name).write_text(text)
    torch.save(torch.ones(3), user / "weights.pt")
    before = contents(user)
    in_process(str(OPERATIONS), str(user), str(record), temporary=tmp_path / "temporary")
    assert contents(user) == before
    own = record / "files" / user.relative_to("/")
    assert (own / "out/run/config.json").read_text() == "{}"


def test_object_that_is_read_with_the_files(tmp_path: Path) -> None:
    root = tmp_path / "record" / "files"
    own = root / tmp_path.relative_to("/") / "index"
    own.parent.mkdir(parents=True)
    own.write_text("7")

    def read(path: Path = tmp_path / "index") -> None:
        assert path.read_text() == "7"

    pickled = tmp_path / "pickled"
    pickled.write_bytes(cloudpickle.dumps({"files": PrivateFiles(root), "read": read}))
    code = f"import pickle; pickle.load(open({str(pickled)!r}, 'rb'))['read']()"
    in_process("-c", code, temporary=tmp_path / "temporary")
    assert not (tmp_path / "index").exists()
