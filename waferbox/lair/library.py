"""Libraries of C++, such as those of LAIR kernels, which the host's compiler builds in a folder of this user.

A cached library is found by the hash of its source, its options and the processor.
"""

import ctypes
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from waferbox.host.folders import make_folder
from waferbox.lair.cpp import source_of
from waferbox.lair.loop_program import LoopKernel

COMPILE_SECONDS = 60.0
# Room for all that a compiler writes while it builds a library: for any source, and for each character of one.
_ROOM_BYTES, _ROOM_BYTES_OF_CHARACTER = 1 << 20, 64
# Each operation rounds by itself, and no number is assumed to be finite, so that results equal torch's.
_OPTIONS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math"),
    "-ffp-contract=off",
)
_SUM_CHARACTERS = 32

# kernel(n, buffers): see waferbox.lair.cpp. It runs without Python's lock.
Function = Callable[[int, ctypes.Array[ctypes.c_void_p]], None]


class NotBuilt(Exception):
    """Raised where no kernel can be compiled, with the reason. torch's own calls can do the same work."""


class NotWritable(NotBuilt):
    """Raised where the folder cannot take the library; a library in another folder can still be built."""

    def __init__(self, reason: str, nbytes: int) -> None:
        """nbytes: the room that the build needs."""
        super().__init__(reason)
        self.nbytes = nbytes


def build(kernels: Sequence[LoopKernel], folder: Path) -> list[Function]:
    """The kernels as functions, found in the folder or compiled into it.

    Raises:
        NotBuilt: there is no compiler, it fails, or other users can write to the folder.
        NotWritable: the folder cannot be made or written, or its disk is full.
    """
    if not kernels:
        return []
    loaded = load(source_of(kernels), folder)
    functions = []
    for number in range(len(kernels)):
        function = getattr(loaded, f"kernel_{number}")
        function.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p)]
        function.restype = None
        functions.append(function)
    return functions


def load(source: str, folder: Path, options: Sequence[str] = ()) -> ctypes.CDLL:
    """The library of a source. options: further options of the compiler. Raises as `build`."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NotBuilt("there is no C++ compiler (install g++, or name one in CXX)")
    library = _library([compiler, *_OPTIONS, *options], source, folder)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NotBuilt(f"{library} cannot be loaded: {error}") from error


def _library(command: Sequence[str], source: str, folder: Path) -> Path:
    """The file of the library, found in the folder or compiled into it. Raises as `build`."""
    key = hashlib.sha256("\0".join([source, *command, _processor()]).encode()).hexdigest()[:_SUM_CHARACTERS]
    needed = _ROOM_BYTES + _ROOM_BYTES_OF_CHARACTER * len(source)
    try:
        _make_private(folder)
        library = _find(folder, key)
        if library is None:
            _check_room(folder, needed)
            library = _compile(command, source, folder, key)
    except OSError as error:
        raise NotWritable(error.strerror or str(error), needed) from error
    return library


def _processor() -> str:
    """Text that differs between processors for which -march=native means different things."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _make_private(folder: Path) -> None:
    make_folder(folder, 0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise NotBuilt(f"others can write to {folder}; make it private (chmod 700)")


def _check_room(folder: Path, nbytes: int) -> None:
    """Raises OSError if the disk is full, of which a compiler's own message would not name the folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def _find(folder: Path, key: str) -> Path | None:
    """The library with this key, if its content is intact: its name has the hash of it."""
    for path in folder.glob(f"{key}.*.so"):
        with suppress(OSError):
            if path.name == _name(key, path.read_bytes()):
                return path
            path.unlink()  # damaged
    return None


def _name(key: str, content: bytes) -> str:
    return f"{key}.{hashlib.sha256(content).hexdigest()[:_SUM_CHARACTERS]}.so"


def _compile(command: Sequence[str], source: str, folder: Path, key: str) -> Path:
    made = folder / f"{key}.{secrets.token_hex(4)}.tmp"  # other processes may build the same library at the same time
    try:
        # From standard input: the name of a file would be part of the library, and equal kernels give equal libraries.
        _run([*command, "-x", "c++", "-", "-o", str(made)], source, folder)
        library = folder / _name(key, made.read_bytes())
        made.chmod(0o700)  # whatever the umask: every process of this user loads it
        made.rename(library)
        return library
    finally:
        with suppress(OSError):
            made.unlink(missing_ok=True)


def _run(command: Sequence[str], source: str, folder: Path) -> None:
    """Runs the compiler, with its temporary files in the folder, so that no other needs room. Raises NotBuilt."""
    try:
        done = subprocess.run(
            command,
            input=source.encode(),
            capture_output=True,
            timeout=COMPILE_SECONDS,
            check=False,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        first = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise NotBuilt(f"{command[0]} failed: {first}")
