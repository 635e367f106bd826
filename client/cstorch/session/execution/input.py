"""What the workers get to make the input of an execution: the input_fn, and the Python that it was written for."""

import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from cstorch.backends.mixed_precision import mixed_precision
from cstorch.distributed.cluster_config import ClusterConfig
from cstorch.session.execution.compiling import half_type
from wsc.v1 import node_pb2


def loader_name(artifact_dir: Path) -> str:
    """What the input of an execution is called within its job."""
    return f"loader_{artifact_dir.name}"


def prepared_input(builder: bytes, config: ClusterConfig, artifact_dir: Path) -> node_pb2.PrepareInput:
    """builder: calls the input_fn; pickled."""
    before, after = _own_paths(sys.path)
    return node_pb2.PrepareInput(
        loader=loader_name(artifact_dir),
        builder=builder,
        interpreter=sys.executable,
        python_paths=[*_absolute(config.python_paths), *before],
        last_python_paths=after,
        working_directory=str(Path.cwd()),
        mount_dirs=_absolute(config.mount_dirs),
        half_type=half_type(),
        mixed_precision=mixed_precision(),
    )


def _own_paths(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """The script's own folders, before and after those of the interpreter, which the workers have too."""
    installed = {*site.getsitepackages(), site.getusersitepackages()}
    installed |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    version = "{}{}".format(*sys.version_info)
    installed.add(f"{sys.base_prefix}/{sys.platlibdir}/python{version}.zip")  # in every sys.path, though seldom there
    roots = [Path(folder).resolve() for folder in installed]
    resolved = [Path(entry).resolve() for entry in paths]  # "": the current folder
    own = [not any(path.is_relative_to(root) for root in roots) for path in resolved]
    # The interpreter's begin with one of these. A package may have put a folder of its own before all (ray does).
    first = next((place for place, path in enumerate(resolved) if path in roots), len(resolved))
    after = [str(path) for path, is_own in zip(resolved[first:], own[first:], strict=True) if is_own]
    return [str(path) for path in resolved[:first]], after


def _absolute(folders: Sequence[str]) -> list[str]:
    return [str(Path(folder).absolute()) for folder in folders]
