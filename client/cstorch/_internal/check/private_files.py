"""Files of its own for a script that a check runs: it writes to a folder of the record, and reads what it has written.

A file that the script opens for writing is copied first where it keeps its content; one that it removes is hidden. So
the script finds all files as in a run without a check, and changes none. This holds for what Python does with files,
and for torch, h5py and safetensors; a program that the script starts sees the user's files only.
"""

import errno
import functools
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import h5py
import safetensors
import torch

from waferbox import settings

# Folders without files of a user's.
_SYSTEM: Final = ("/dev", "/proc", "/run", "/sys")
_WRITING_MODES: Final = frozenset("wax+")
_WRITING_FLAGS: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PLAIN: Final[Mapping[str, Callable[..., Any]]] = {**vars(os)}
_PLAIN_OPEN: Final = io.open
_NAMES: Final = (str, bytes, os.PathLike)

# The modules that other ones take these calls from, and this one.
_PLAIN_MODULES: Final = ("posix", "_io", __name__)

_READERS: Final = ("access", "getxattr", "listxattr", "lstat", "readlink", "stat", "statvfs")
_CHANGERS: Final = ("chmod", "chown", "removexattr", "setxattr", "truncate", "utime")


class PrivateFiles:
    """The files that a script sees: those of the user, with its own in the place of those that it has changed.

    Used by all threads of a process. Its own files lie under `root` by their absolute paths, so that processes with the
    same root see the same; files that one process has removed are hidden in this process only.

    Args:
        root: The folder of the script's own files.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._removed: set[str] = set()
        self._temporary = os.path.realpath(tempfile.gettempdir())
        caches: list[Any] = [os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")]
        caches += [folder for each in (settings.CACHE, settings.RECOVERY_DIR) if (folder := each.get())]
        self._shared = {*_SYSTEM, *map(os.path.realpath, caches), os.path.dirname(self._root)}
        self._is_inside = False  # whether the current folder is one of the script's own
        self._local = threading.local()
        self._resolved = functools.cache(os.path.realpath)

    # --- Paths --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _plainly(self) -> Iterator[None]:
        """Context in which this thread's calls go to the user's files."""
        before = getattr(self._local, "is_plain", False)
        self._local.is_plain = True
        try:
            yield
        finally:
            self._local.is_plain = before

    def place(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Returns the absolute path of a file that is the script's to change; None: all processes share it."""
        if isinstance(path, int) or getattr(self._local, "is_plain", False):
            return None
        with self._plainly():
            text = os.fsdecode(path)
            if dir_fd is not None:
                text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
            text = os.path.abspath(text)
            if not _is_in(text, self._root):
                text = os.path.join(self._resolved(os.path.dirname(text)), os.path.basename(text))
        if _is_in(text, self._root):
            return text[len(self._root) :] or "/"
        is_ours = text.startswith(os.path.join(self._temporary, "waferbox-"))
        return None if is_ours or _is_in_any(text, self._shared) else text

    def _own(self, place: str) -> str:
        return self._root + place.rstrip("/")

    def _is_removed(self, place: str) -> bool:
        return _is_in_any(place, self._removed)

    def _is_hidden(self, place: str) -> bool:
        """Whether the user's file, if there is one, is not what the script sees."""
        return os.path.lexists(self._own(place)) or self._is_removed(place)

    def seen(self, place: str) -> str:
        """Returns the path of the file that the script sees at a place."""
        with self._plainly():
            return self._own(place) if self._is_hidden(place) else place

    def reading(self, path: Any, dir_fd: int | None = None) -> Any:
        """Returns the path to read instead of one."""
        place = self.place(path, dir_fd)
        if place is None:
            return path
        # A relative path stays one, as names in errors and folders are made of it.
        is_as_given = dir_fd is None and not self._is_own_path(path)
        return path if is_as_given and not self._is_changed(place) else self.seen(place)

    def writing(self, path: Any, dir_fd: int | None = None, *, keeps: bool = True) -> Any:
        """Returns the path to write instead of one.

        Args:
            path: The path.
            dir_fd: The folder that it is relative to.
            keeps: Whether the file keeps its content, or its being a folder.
        """
        place = self.place(path, dir_fd)
        if place is None:
            return path
        with self._plainly():
            own, is_hidden = self._own(place), self._is_hidden(place)
            self._make_folder(os.path.dirname(place))
            if keeps and not is_hidden and os.path.isdir(place):
                self._make_folder(place)
            elif keeps and not is_hidden and os.path.exists(place):
                shutil.copy2(place, own)
            return own

    def _make_folder(self, place: str) -> None:
        """Makes the script's own folder where it sees one."""
        if os.path.isdir(self._own(place) if self._is_hidden(place) else place):
            os.makedirs(self._own(place), exist_ok=True)

    def names(self, place: str) -> list[str]:
        """Returns the names in a folder, as the script sees it."""
        with self._plainly():
            own = self._own(place)
            has_own = os.path.isdir(own)
            if self._is_removed(place) or (has_own and not os.path.isdir(place)):
                return os.listdir(own)
            names = [name for name in os.listdir(place) if not self._is_removed(os.path.join(place, name))]
            return [*dict.fromkeys([*names, *os.listdir(own)])] if has_own else names

    # --- Calls --------------------------------------------------------------------------------------------------------

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not _WRITING_MODES & set(mode):
            return _PLAIN_OPEN(self.reading(file), mode, *args, **kwargs)
        if "x" in mode:
            self._must_be_free(file)
        return _PLAIN_OPEN(self.writing(file, keeps="w" not in mode), mode, *args, **kwargs)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            self._share_temporary(path)
        if (place := self.place(path, dir_fd)) is None:
            return int(_PLAIN["open"](path, flags, mode, dir_fd=dir_fd))
        if not flags & _WRITING_FLAGS:
            return int(_PLAIN["open"](self.seen(place), flags, mode))
        if flags & os.O_CREAT and flags & os.O_EXCL:
            self._must_be_free(place)
        return int(_PLAIN["open"](self.writing(place, keeps=not flags & os.O_TRUNC), flags, mode))

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._share_temporary(path)
        if (place := self.place(path, dir_fd)) is None:
            _PLAIN["mkdir"](path, mode, dir_fd=dir_fd)
            return
        self._must_be_free(place)
        _PLAIN["mkdir"](self.writing(place), mode)

    def listdir(self, path: Any = ".") -> list[Any]:
        if (place := self.place(_folder_of(path))) is None:
            return list(_PLAIN["listdir"](path))
        names = self.names(place)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        place = self.place(_folder_of(path))
        if place is None or not (self._is_own_path(path) or self._removed or self._is_changed(place)):
            return _PLAIN["scandir"](path)
        names = set(self.names(place))
        with self._plainly():
            own = list(os.scandir(self._own(place))) if os.path.isdir(self._own(place)) else []
            names -= {entry.name for entry in own}
            others = [entry for entry in os.scandir(place) if entry.name in names] if names else []
        return _Entries([*others, *own])

    def getcwd(self) -> str:
        folder: str = _PLAIN["getcwd"]()
        return self.place(folder) or folder

    def getcwdb(self) -> bytes:
        return os.fsencode(self.getcwd())

    def chdir(self, path: Any) -> None:
        place = self.place(_folder_of(path))
        self._is_inside = place is not None and not self._is_of_user(place)
        _PLAIN["chdir"](self.seen(place) if place is not None and self._is_inside else place or path)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        if (place := self.place(path, dir_fd)) is None:
            _PLAIN["unlink"](path, dir_fd=dir_fd)
            return
        self._must_be_there(place)
        if os.path.isdir(place) and not os.path.islink(place):
            raise _error(errno.EISDIR, path)
        self._remove(place)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        if (place := self.place(path, dir_fd)) is None:
            _PLAIN["rmdir"](path, dir_fd=dir_fd)
            return
        self._must_be_there(place)
        if not os.path.isdir(place):
            raise _error(errno.ENOTDIR, path)
        if self.names(place):
            raise _error(errno.ENOTEMPTY, path)
        self._remove(place)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = self.place(src, src_dir_fd), self.place(dst, dst_dir_fd)
        if source is None and target is None:
            _PLAIN["rename"](src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        if source is None:
            _PLAIN["rename"](src, self.writing(target, keeps=False), src_dir_fd=src_dir_fd)
            return
        self._must_be_there(source)
        is_folder = os.path.isdir(source) and not os.path.islink(source)
        if is_folder and target is not None and os.path.isdir(target) and self.names(target):
            raise _error(errno.ENOTEMPTY, dst)
        own = self.writing(dst, dst_dir_fd, keeps=False)
        if is_folder and self._is_of_user(source):
            shutil.copytree(source, own, symlinks=True, dirs_exist_ok=True)
        else:
            _PLAIN["rename"](self.writing(source), own)
        self._remove(source)

    def symlink(self, src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        if self.place(dst, dir_fd) is not None and os.path.isabs(src):
            src = self.reading(src)
        self._must_be_free(dst, dir_fd)
        _PLAIN["symlink"](src, self.writing(dst, dir_fd), *args, **kwargs)

    def link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        self._must_be_free(dst)
        _PLAIN["link"](self.writing(src), self.writing(dst), **kwargs)

    def _is_own_path(self, path: Any) -> bool:
        """Whether a path leads to the script's own files, so that the user's are elsewhere."""
        return self._is_inside or _is_in(os.fsdecode(_folder_of(path)), self._root)

    def _is_changed(self, place: str) -> bool:
        with self._plainly():
            return self._is_hidden(place)

    def _is_of_user(self, place: str) -> bool:
        with self._plainly():
            return os.path.lexists(place) and not self._is_removed(place)

    def _remove(self, place: str) -> None:
        """Removes the script's own file or folder, and hides the user's."""
        with self._plainly():
            own = self._own(place)
            if os.path.isdir(own) and not os.path.islink(own):
                shutil.rmtree(own)
            elif os.path.lexists(own):
                os.unlink(own)
            if os.path.lexists(place):
                self._removed.add(place)

    def _must_be_free(self, path: Any, dir_fd: int | None = None) -> None:
        place = self.place(path, dir_fd)
        if place is not None and os.path.lexists(place):
            raise _error(errno.EEXIST, path)

    def _must_be_there(self, place: str) -> None:
        if not os.path.lexists(place):
            raise _error(errno.ENOENT, place)

    def _share_temporary(self, path: Any) -> None:
        """Leaves a file as it is that the module tempfile makes among temporary files: its maker removes it."""
        if sys._getframe(2).f_globals.get("__name__") == "tempfile":
            made = os.path.realpath(os.fsdecode(path))
            if _is_in(made, self._temporary):
                self._shared.add(made)

    def __reduce__(self) -> tuple[Any, ...]:
        """Has the process that unpickles it see the same files."""
        return _install, (Path(self._root),)

    # --- Installation -------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Puts these calls in the place of Python's, in all modules that this process has imported."""
        self._is_inside = _is_in(process_folder(), self._root)  # where a process of the script starts this one
        own: dict[str, Callable[..., Any]] = {
            **{name: self._translated(_PLAIN[name], self.reading) for name in _READERS},
            **{name: self._translated(_PLAIN[name], self.writing) for name in _CHANGERS},
            **{
                name: getattr(self, name)
                for name in ("chdir", "getcwd", "getcwdb", "link", "listdir", "mkdir", "rmdir", "scandir", "symlink")
            },
            "fchdir": self.chdir,
            "open": self.os_open,
            "remove": self.unlink,
            "unlink": self.unlink,
            "rename": self.rename,
            "replace": self.rename,
        }
        replaced = [(_PLAIN[name], function) for name, function in own.items()]
        for kinds in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            kinds.update([function for plain, function in replaced if plain in kinds])
        replaced += [
            (_PLAIN_OPEN, self.open),
            (torch.save, self._saving(torch.save)),
            (torch.load, self._loading(torch.load)),
            (h5py.is_hdf5, self._loading(h5py.is_hdf5)),
            (safetensors.serialize_file, self._saving(safetensors.serialize_file)),
            (safetensors.safe_open, self._translated(safetensors.safe_open, self.reading)),
        ]
        by_identity = {id(plain): function for plain, function in replaced}
        for module in list(sys.modules.values()):
            if module.__name__ not in _PLAIN_MODULES:
                for name, value in list(vars(module).items()):
                    if id(value) in by_identity:
                        setattr(module, name, by_identity[id(value)])
        h5py.File.__init__ = self._opening(h5py.File.__init__)

    def _translated(self, function: Callable[..., Any], path_of: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a path that is called with another path."""

        @functools.wraps(function)
        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            other = path_of(path, dir_fd)
            if other is path and dir_fd is not None:
                kwargs["dir_fd"] = dir_fd
            return function(other, *args, **kwargs)

        return call

    def _saving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that saves its first argument in the file that its second one names."""

        @functools.wraps(function)
        def save(value: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            return function(value, self.writing(f, keeps=False) if isinstance(f, _NAMES) else f, *args, **kwargs)

        return save

    def _loading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that reads the file that its first argument names, or is."""

        @functools.wraps(function)
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self.reading(f) if isinstance(f, _NAMES) else f, *args, **kwargs)

        return load

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def initialise(file: Any, name: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            if isinstance(name, _NAMES):
                name = self.reading(name) if mode == "r" else self.writing(name, keeps=mode != "w")
            function(file, name, mode, *args, **kwargs)

        return initialise


def _install(root: Path) -> None:
    PrivateFiles(root).install()


def process_folder() -> str:
    """Returns the folder that this process is in, which may be one of the script's own under another name.

    Empty: the folder has been removed.
    """
    try:
        folder: str = _PLAIN["getcwd"]()
    except FileNotFoundError:
        return ""
    return folder


class _Entries:
    """What os.scandir returns, for entries that are there."""

    def __init__(self, entries: Sequence["os.DirEntry[Any]"]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> "_Entries":
        return self

    def __next__(self) -> "os.DirEntry[Any]":
        return next(self._entries)

    def __enter__(self) -> "_Entries":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _is_in_any(path: str, folders: Collection[str]) -> bool:
    while path not in folders and path != "/":
        path = os.path.dirname(path)
    return path in folders


def _folder_of(path: Any) -> Any:
    """Returns the path of a folder, which may be given as a descriptor."""
    return _PLAIN["readlink"](f"/proc/self/fd/{path}") if isinstance(path, int) else path


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(path))
