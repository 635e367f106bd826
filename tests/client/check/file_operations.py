"""Works with files as scripts do, with files of its own: `file_operations.py USER_FOLDER RECORD_FOLDER`."""

import contextlib
import glob
import json
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from os import listdir
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import cstorch
from cstorch._internal.check.private_files import PrivateFiles

user, record = map(Path, sys.argv[1:])
os.chdir(user)
PrivateFiles(record / "files").install()

# New files and folders.
os.makedirs("out/run")
Path("out/run/config.json").write_text("{}")
assert json.loads((user / "out/run/config.json").read_text()) == {}
assert listdir("out") == [path.name for path in Path("out").iterdir()] == ["run"]
os.symlink("run", "out/latest")
assert Path("out/latest/config.json").exists()
with pytest.raises(FileExistsError):
    os.mkdir("out")
with pytest.raises(FileNotFoundError):
    Path("none/file").write_text("")
os.chdir("out/run")
Path("here").touch()
assert os.listdir("../../kept") == ["file"]
assert Path("../../losses.csv").exists()
assert os.getcwd() == os.fsdecode(os.getcwdb()) == str(user / "out/run")
assert Path("here").absolute() == Path("here").resolve() == user / "out/run/here"
assert Path.cwd().is_relative_to(user)
cstorch.save({"step": 4, "x": torch.ones(2)}, "step.mdl")
with h5py.File("data.h5", "w") as file:
    file["x"] = [1]
torch.save(torch.ones(2), "x.pt")
save_file({"x": torch.ones(2)}, "x.safetensors")
for current in (user / "out/run", user / "out", user):
    os.chdir(current)
    checkpoint = os.path.relpath(user / "out/run/step.mdl")
    for name in (checkpoint, os.path.abspath(checkpoint)):
        loaded = cstorch.load(name)
        assert loaded["step"] == 4
        assert loaded["x"].sum() == 2
    run = Path(os.path.relpath(user / "out/run"))
    assert h5py.is_hdf5(run / "data.h5")
    with h5py.File(run / "data.h5") as file:
        assert file["x"][0] == 1
    assert torch.load(run / "x.pt", mmap=True).sum() == 2
    assert cstorch.load(run / "x.pt").sum() == 2
    assert cstorch.load(run / "x.safetensors")["x"].sum() == 2
    with open(run / "x.pt", "rb") as file:
        assert torch.load(file).sum() == 2
for name in ("step.mdl", "data.h5", "x.pt", "x.safetensors"):
    os.remove(f"out/run/{name}")
with contextlib.chdir("out/run"), contextlib.chdir(user):
    assert Path("losses.csv").exists()
with contextlib.chdir("out/run"):
    code = (
        "import pathlib; from cstorch._internal.check.private_files import PrivateFiles; "
        f"PrivateFiles(pathlib.Path({str(record / 'files')!r})).install(); "
        "assert pathlib.Path('../../losses.csv').read_text() == '1\\n'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # another process of the script
assert os.getcwd() == str(user)
descriptor = os.open("out/run", os.O_RDONLY)
os.fchdir(descriptor)
os.close(descriptor)
assert Path("here").exists()
assert Path("../../losses.csv").exists()
os.chdir(user)
assert os.getcwd() == str(user)
assert sorted(os.listdir("out/run")) == ["config.json", "here"]
handler = logging.FileHandler("out/run/log")
logging.getLogger().addHandler(handler)
logging.error("a line")
assert "a line" in Path("out/run/log").read_text()
descriptor = os.open("out", os.O_RDONLY)
assert sorted(os.listdir(descriptor)) == ["latest", "run"]
assert os.stat("run", dir_fd=descriptor).st_ino == os.stat("out/run").st_ino

# Paths of the script's own files, as functions return them.
own = record / "files" / user.relative_to("/")
(own / "kept").mkdir(exist_ok=True)
assert (own / "losses.csv").read_text() == "1\n"
assert sorted(entry.name for entry in os.scandir(own / "kept")) == ["file"]
with open("out/run/here") as file:
    assert Path(file.name).parent.is_dir()

# Files of the user.
with open("losses.csv", "a") as file:
    file.write("2\n")
assert Path("losses.csv").read_text() == "1\n2\n"
with pytest.raises(FileExistsError), open("losses.csv", "x"):
    pass
Path("data/new").write_text("new")
assert sorted(os.listdir("data")) == sorted(map(os.fsdecode, os.listdir(b"data"))) == ["a", "new", "sub"]
found = sorted(glob.glob("data/**", recursive=True))
assert found == ["data/", "data/a", "data/new", "data/sub", "data/sub/b"], found
os.replace("data/a", "data/c")
assert not os.path.exists("data/a")
assert Path("data/c").read_text() == "a"
assert sorted(os.listdir("data")) == ["c", "new", "sub"]
shutil.copytree("data", "copy")
os.rename("data", "moved")
assert not os.path.exists("data")
for folder in ("copy", "moved"):
    assert {str(path.relative_to(folder)) for path in Path(folder).rglob("*")} == {"c", "new", "sub", "sub/b"}
shutil.rmtree("moved")
assert not os.path.exists("moved")
os.mkdir("data")
assert os.listdir("data") == []
with pytest.raises(OSError, match="not empty"):
    os.rmdir("kept")
os.remove("losses.csv")
for missing in ("losses.csv", "copy/none"):
    with pytest.raises(FileNotFoundError):
        os.remove(missing)
os.chmod("weights.pt", 0o600)

# Files that not Python itself writes.
torch.save(torch.zeros(3), "weights.pt")
assert not torch.load("weights.pt").any()
save_file({"x": torch.ones(3)}, "out/x.safetensors")
assert load_file("out/x.safetensors")["x"].all()
with h5py.File("out/data.h5", "w") as file:
    file["x"] = [1]
with h5py.File(Path("out/data.h5")) as file:
    assert file["x"][0] == 1
np.save("out/x.npy", np.ones(3))
np.load("out/x.npy", mmap_mode="r+")[0] = 2
assert np.load("out/x.npy")[0] == 2
with tarfile.open("out/data.tar", "w") as archive:
    archive.add("copy")
with tarfile.open("out/data.tar") as archive:
    archive.extractall("out/extracted", filter="data")
assert Path("out/extracted/copy/sub/b").read_text() == "b"

# Temporary files are those of all processes.
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as temporary:
    Path(folder, "x").touch()
    subprocess.run(["test", "-f", f"{folder}/x", "-a", "-f", temporary.name], check=True)
    with contextlib.chdir(folder):
        cstorch.save({"step": 4}, "step.mdl")
        assert cstorch.load("step.mdl")["step"] == 4
with tempfile.NamedTemporaryFile("w", dir=user, delete=False) as whole:
    whole.write("whole")
os.replace(whole.name, "atomic")
assert Path("atomic").read_text() == "whole"
