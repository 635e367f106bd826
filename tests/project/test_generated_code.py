"""The committed message code is what `make proto` makes of the .proto files."""

import subprocess
import sys
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto"
GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


@pytest.mark.cluster
def test_committed_code_is_current(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    scripts = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I.",
            f"--python_out={tmp_path}",
            f"--grpc_python_out={tmp_path}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--mypy_out={tmp_path}",
            f"--mypy_grpc_out={tmp_path}",
            *sources,
        ],
        check=True,
        cwd=PROTO,
        capture_output=True,
        timeout=60,
    )
    for source in sources:
        for ending in GENERATED:
            name = source.removesuffix(".proto") + ending
            assert (PROTO / name).read_text() == (tmp_path / name).read_text(), f"{name} is stale: run `make proto`"
