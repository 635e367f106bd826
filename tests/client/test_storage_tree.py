"""The trees that `save` takes: what it accepts comes back equal, and what it refuses is named, with what to do."""

import datetime
import enum
import os
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from cstorch.saver.pt_h5_saver import CerebrasStateDict
from cstorch.storage import load, save


class Color(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Text(str, enum.Enum):  # noqa: UP042 - the str of a StrEnum is its value
    A = "a"


Pair = namedtuple("Pair", "first second")
Registered = namedtuple("Registered", "first second")
pytree._register_namedtuple(Registered, serialized_type_name="test_storage_tree.Registered")


# --- What is accepted is loaded equal ---------------------------------------------------------------------------------


def are_equal(saved: object, loaded: object) -> bool:
    if isinstance(saved, torch.Tensor):
        return isinstance(loaded, torch.Tensor) and saved.dtype == loaded.dtype and torch.equal(saved, loaded)
    if isinstance(saved, np.ndarray):
        return isinstance(loaded, np.ndarray) and saved.dtype == loaded.dtype and np.array_equal(saved, loaded)
    if isinstance(saved, dict):
        return (
            isinstance(loaded, dict)
            and list(saved) == list(loaded)
            and all(are_equal(value, loaded[key]) for key, value in saved.items())
        )
    if isinstance(saved, list | tuple | deque):
        return (
            isinstance(loaded, list | tuple | deque)
            and len(saved) == len(loaded)
            and all(map(are_equal, saved, loaded))
        )
    return bool(saved == loaded) or (saved != saved and loaded != loaded)  # both are NaN


TEXTS = st.text(st.sampled_from("ab./_\0é\ud800\udc00"), max_size=3) | st.sampled_from(["__enum__", "__spec__", ".."])
NUMBERS = st.integers(-3, 3) | st.floats(width=16) | st.booleans()
ODD: list[Hashable] = [Color.RED, Number.ONE, Text.A, np.int64(2), np.float32(0.1), np.float64(0.1), np.bool_(1), b"a"]
PLAIN = TEXTS | NUMBERS | st.none() | st.sampled_from(ODD)
KEYS = st.recursive(PLAIN, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2), max_leaves=3)
TENSORS = [torch.ones(2), torch.zeros(0, 3), torch.tensor(3), torch.ones(2, dtype=torch.bfloat16), torch.eye(2).bool()]
ARRAYS = [np.arange(3), np.array(1.5), np.array([b"a"]), np.array(["a"]), np.array([None]), np.zeros(2, "M8[s]")]
LEAVES = PLAIN | st.sampled_from(TENSORS) | st.sampled_from(ARRAYS)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Registered, inner, inner),
        st.builds(deque, st.lists(inner, max_size=2)),
        st.dictionaries(KEYS, inner, max_size=3),
        st.builds(OrderedDict, st.dictionaries(TEXTS, inner, max_size=3)),
        st.builds(Counter, st.dictionaries(TEXTS, st.integers(), max_size=3)),
        st.builds(defaultdict, st.sampled_from([list, None, lambda: 1]), st.dictionaries(TEXTS, inner, max_size=3)),
    ),
    max_leaves=8,
)


def refusal(tree: object, path: Path) -> str:
    """Saves a tree; returns the error if it is refused."""
    try:
        save(tree, path)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@given(tree=TREES)
@settings(max_examples=300)
def test_what_save_accepts_load_returns_equal(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    folder = tmp_path_factory.mktemp("tree")
    if error := refusal(tree, folder / "a.mdl"):
        assert error.startswith(("a checkpoint cannot hold ", "two entries of the saved tree have the key "))
        assert os.listdir(folder) == []
    else:
        assert are_equal(tree, load(folder / "a.mdl"))


@given(key=KEYS)
@settings(max_examples=300)
def test_a_key_is_read_back_or_refused(tmp_path_factory: pytest.TempPathFactory, key: Hashable) -> None:
    path = tmp_path_factory.mktemp("key") / "a.mdl"
    if error := refusal({"a": {key: 1, "other": torch.ones(2)}}, path):
        assert error.startswith(f"a checkpoint cannot hold the key {key!r} of 'a': ")
    else:
        assert load(path)["a"][key] == 1


@pytest.mark.parametrize(
    "key", [3, -1.5, None, True, "", "a/b", "a.b", "*", "..", "__enum__", float("inf"), Number.ONE]
)
def test_keys_that_are_no_problem_are_accepted(tmp_path: Path, key: Hashable) -> None:
    save({"a": {key: torch.ones(2)}}, tmp_path / "a.mdl")
    assert load(tmp_path / "a.mdl")["a"][key].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float16(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.bool_(True), True),
        (Counter("aab"), {"a": 2, "b": 1}),
        (CerebrasStateDict(a=1), {"a": 1}),
        (OrderedDict(a=1), OrderedDict(a=1)),
        (defaultdict(list, a=[1]), defaultdict(list, a=[1])),
        (defaultdict(lambda: 1, a=1), {"a": 1}),
        (defaultdict(None, a=1), {"a": 1}),
        (Registered(1, 2), Registered(1, 2)),
        (deque([1, 2], 3), deque([1, 2], 3)),
    ],
)
def test_numpy_scalars_and_subclasses_of_dict(tmp_path: Path, saved: object, loaded: object) -> None:
    save({"a": saved}, tmp_path / "a.mdl")
    found = load(tmp_path / "a.mdl")["a"]
    assert found == loaded
    assert type(found) is type(loaded)


# --- What is refused is named -----------------------------------------------------------------------------------------


def cyclic() -> dict[str, Any]:
    tree: dict[str, Any] = {"inner": [1]}
    tree["inner"].append(tree)
    return tree


def deep() -> list[Any]:
    tree: list[Any] = []
    for _ in range(400):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({(0, 1): 3}, r"the key \(0, 1\) of 'extra\.confusion': .*tuple would not be the same.* list of pairs"),
        ({((0,), 1): 3}, r"the key \(\(0,\), 1\) of 'extra\.confusion'"),
        ({(): 3}, r"the key \(\) of 'extra\.confusion'"),
        ({frozenset([1]): 3}, r"the key frozenset\(\{1\}\) of 'extra\.confusion'"),
        ({np.int64(3): 3}, r"the key .* of 'extra\.confusion': .*int64 .*to a string or a Python number"),
        ({Color.RED: 3}, r"the key <Color\.RED: 1> of 'extra\.confusion'"),
        ({Text.A: 3}, r"the key <Text\.A: 'a'> of 'extra\.confusion'"),
        ({float("nan"): 3}, r"the key nan of 'extra\.confusion'"),
        ({"a\0b": 3}, r"the key 'a\\x00b' of 'extra\.confusion': .*NUL.* Rename it"),
        ({"\ud800": 3}, r"the key '\\ud800' of 'extra\.confusion': .*surrogate.* Rename it"),
        ({"a" * 70_000: 3}, r"name has more than .* Rename 'extra\.confusion\.a"),
        (Pair(1, 2), r"'extra\.confusion': Pair is a tuple of a class of its own.*Convert it to .*_asdict"),
        (torch.ones(2, 2).max(0), r"'extra\.confusion': max is a tuple of a class of its own.*Convert it to a tuple"),
        (torch.eye(2).to_sparse(), r"'extra\.confusion': .*sparse_coo. Convert it with to_dense"),
        (torch.nested.nested_tensor([torch.ones(1)]), r"'extra\.confusion': .*nested tensor. Convert it to .*unbind"),
        (torch.ones(2, device="meta"), r"'extra\.confusion': .*meta tensor.* leave it out"),
        (torch.ones(2, dtype=torch.complex64), r"'extra\.confusion' of type torch.complex64; cast it"),
        (np.array(["a"]), r"'extra\.confusion': .*<U1. Convert it to .* a list"),
        (np.array([None]), r"'extra\.confusion': .*type object. Convert it to"),
        (np.ma.array([1, 2], mask=[False, True]), r"'extra\.confusion': .*masked array. Convert it with filled"),
        (np.longdouble(1), r"'extra\.confusion': longdouble .*Convert it to"),
        (np.timedelta64(3, "ns"), r"'extra\.confusion': timedelta64 .*Convert it to"),
        (cyclic(), r"'extra\.confusion\.inner\.1': it contains itself. Remove this entry"),
        (deep(), r"'extra\.confusion\.0.*\.0': it lies more than 200 levels deep. Save a flatter tree"),
        (Color.RED, r"'extra\.confusion': Color .*Convert it to its value or its name"),
        ({1, 2}, r"'extra\.confusion': set .*Convert it to a list"),
        (torch.nn.Linear(1, 1), r"'extra\.confusion': Linear .*Convert it to a dict with state_dict"),
        (datetime.datetime(2020, 1, 1), r"'extra\.confusion': datetime .*Convert it to .* string"),
        # pytest cannot make its name of that number.
        pytest.param(10**5000, r"'extra\.confusion': .*Save a shorter number", id="an integer of 5001 digits"),
        ("\ud800\udc00", r"'extra\.confusion': .*without surrogates"),
        ({"a": torch.ones(2), "a/b": torch.ones(3)}, r"under the name 'extra\.confusion\.a/b', .*; rename it"),
        ({"a//b": torch.ones(2), "a/b": torch.ones(3)}, r"under the name 'extra\.confusion\.a/b', .*; rename it"),
        ({"a/": torch.ones(2)}, r"under the name 'extra\.confusion\.a/', .*; rename it"),
    ],
)
def test_an_entry_that_is_refused_is_named_with_what_to_do(tmp_path: Path, entry: object, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"a checkpoint cannot hold .*{text}"):
        save({"extra": {"confusion": entry}}, tmp_path / "a.mdl")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("leaf", [torch.ones(3), np.ones(3)], ids=["tensor", "array"])
def test_a_tensor_by_itself_is_refused(tmp_path: Path, leaf: object) -> None:
    with pytest.raises(TypeError, match=r"without a name. Save it in a dict, for instance \{'weight': "):
        save(leaf, tmp_path / "a.mdl")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["", ".", "/"])
def test_a_tensor_under_no_name_of_a_file_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="rename it"):
        save({key: torch.ones(3)}, tmp_path / "a.mdl")
    assert os.listdir(tmp_path) == []


def test_the_object_itself_and_its_keys_are_refused_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a checkpoint cannot hold this object: set is"):
        save({1, 2}, tmp_path / "a.mdl")
    with pytest.raises(TypeError, match=r"a checkpoint cannot hold the key \(0, 1\): a key"):
        save({(0, 1): 1}, tmp_path / "a.mdl")


def test_one_list_in_two_places_is_no_cycle(tmp_path: Path) -> None:
    shared = [torch.ones(2)]
    save({"a": shared, "b": [shared]}, tmp_path / "a.mdl")
    assert load(tmp_path / "a.mdl")["b"][0][0].tolist() == [1, 1]


def test_a_tensor_of_one_value_may_have_the_name_of_a_folder(tmp_path: Path) -> None:
    full = load(Path(__file__).parent / "samples" / "format_0_5.mdl")["full"]
    save({"a": full, "a/b": torch.ones(2)}, tmp_path / "a.mdl")
    assert torch.equal(load(tmp_path / "a.mdl")["a"], full)


# --- Folders ----------------------------------------------------------------------------------------------------------


def test_a_working_directory_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    for path in ("a.mdl", "sub/a.mdl"):
        with pytest.raises(
            FileNotFoundError, match=f"the working directory {folder} does not exist any more"
        ) as caught:
            save({"a": torch.ones(2)}, path)
        assert " MB" not in str(caught.value)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=f"{tmp_path / 'file'} is not a folder; choose another one"):
        save({"a": 1}, tmp_path / "file" / "a.mdl")
