"""Artifacts on disk: found again, checked again, and made again when they are damaged."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compiled_steps import Traced
from torch import nn

from appliance.compiler import artifacts as cache_module
from appliance.compiler.artifacts import KEY_FILE, REPORT_DATA, Artifacts, artifact_key, read_plan
from appliance.compiler.core.target import ExecutionStrategy, Target
from appliance.coordinator.compilation import report_of
from waferbox import settings
from waferbox.execution_folders import REPORT_PAGE
from wsc.v1 import plan_pb2

TARGET = Target(num_csx=2, num_shards=1)
HEAD = 8 + 32 + 32  # magic, hash, keyed hash


@pytest.fixture(scope="module")
def text() -> str:
    batch = torch.ones(4, 3)
    return Traced(lambda m: lambda x: m(x).square().mean().detach(), nn.Linear(3, 2), batch, double=False).text


@pytest.fixture(scope="module", autouse=True)
def _own_cache_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.CACHE.name, str(tmp_path_factory.mktemp("root")))
        yield


@pytest.fixture
def cache(tmp_path: Path) -> Artifacts:
    return Artifacts(tmp_path / "cache", tmp_path / "root")


def test_a_second_compile_finds_the_first(cache: Artifacts, text: str, tmp_path: Path) -> None:
    key, plan, cached = cache.compile(text, TARGET)
    assert not cached
    again = cache.compile(text, TARGET)
    assert again == (key, plan, True)
    other, _, cached = cache.compile(text, Target(num_csx=1, num_shards=1))
    assert other != key
    assert not cached
    beside = tmp_path / "cache" / key
    assert json.loads((beside / REPORT_DATA).read_text())["artifact"] == key
    assert report_of(tmp_path / "cache", key) == str(beside / REPORT_PAGE)
    assert (beside / REPORT_PAGE).read_text().startswith("<!DOCTYPE html>")
    assert report_of(tmp_path / "cache", "another") == ""


def test_a_key_names_all_that_a_plan_depends_on(text: str) -> None:
    targets = [
        TARGET,
        Target(num_csx=1, num_shards=1),
        Target(num_csx=2, num_shards=2),
        Target(num_csx=2, num_shards=1, prefetch_layers=1),
        Target(num_csx=2, num_shards=1, wafer_memory_bytes=1 << 20),
        Target(num_csx=2, num_shards=1, pinned_shards={"a": 0}),
        Target(num_csx=2, num_shards=1, wafer_cores=3),
        Target(num_csx=2, num_shards=1, num_replicas=2),
        Target(num_csx=2, num_shards=1, execution_strategy=ExecutionStrategy.PIPELINE),
    ]
    keys = {artifact_key(source, target) for target in targets for source in (text, text + " ")}
    assert len(keys) == 2 * len(targets)


def damage(data: bytes, kind: str) -> bytes:
    body = data[HEAD:]
    if kind == "truncated":
        return data[: len(data) // 2]
    if kind == "flipped":
        return data[:200] + bytes([data[200] ^ 4]) + data[201:]
    if kind == "foreign":
        return b"\x7fELF" + body
    if kind == "empty":
        return b""
    plan = plan_pb2.Plan.FromString(body)
    if kind == "another format":
        plan.format += 1
    else:
        plan.wafer.instructions[-1].send.group += 1
    body = plan.SerializeToString(deterministic=True)
    return data[:8] + hashlib.sha256(body).digest() + data[40:HEAD] + body  # with a hash that is right


def test_what_is_damaged_is_made_again(cache: Artifacts, text: str, tmp_path: Path) -> None:
    key, plan, _ = cache.compile(text, TARGET)
    path = tmp_path / "cache" / f"{key}.plan"
    whole = path.read_bytes()
    assert read_plan(path) == plan
    for kind in ("truncated", "flipped", "foreign", "empty", "another format", "does not hold together"):
        path.write_bytes(damage(whole, kind))
        assert read_plan(path) is None, kind
        assert cache.compile(text, TARGET) == (key, plan, False), kind
        assert path.read_bytes() == whole, kind
    assert cache.compile(text, TARGET) == (key, plan, True)


def test_what_is_too_large_is_not_read(
    cache: Artifacts, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, plan, _ = cache.compile(text, TARGET)
    monkeypatch.setattr(cache_module, "MAX_PLAN_BYTES", 100)
    assert cache.compile(text, TARGET) == (key, plan, False)


def test_a_folder_that_cannot_be_written_fails_no_compile(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    key, _, cached = Artifacts(tmp_path / "file", tmp_path / "root").compile(text, TARGET)
    assert not cached
    assert report_of(tmp_path / "file", key) == ""


def test_a_plan_that_another_has_written_is_compiled_again(cache: Artifacts, text: str, tmp_path: Path) -> None:
    """Everything about it is right but the key."""
    folder = tmp_path / "cache"
    stranger = Artifacts(folder, tmp_path / "strange root")
    key, plan, _ = stranger.compile(text, TARGET)
    assert read_plan(folder / f"{key}.plan") == plan
    assert cache.compile(text, TARGET) == (key, plan, False)
    assert cache.compile(text, TARGET) == (key, plan, True)


def test_a_plan_of_ours_does_not_stand_for_another(cache: Artifacts, text: str, tmp_path: Path) -> None:
    other = Target(num_csx=1, num_shards=1)
    key, _, _ = cache.compile(text, TARGET)
    other_key, other_plan, _ = cache.compile(text, other)
    (tmp_path / "cache" / f"{key}.plan").replace(tmp_path / "cache" / f"{other_key}.plan")
    assert cache.compile(text, other) == (other_key, other_plan, False)


def test_the_key_is_its_owners_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "root" / KEY_FILE
    Artifacts(tmp_path / "cache", tmp_path / "root").compile(text, TARGET)
    first = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)  # it may be known by now
    _, _, cached = Artifacts(tmp_path / "cache", tmp_path / "root").compile(text, TARGET)
    assert not cached
    assert path.read_bytes() != first
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [KEY_FILE]


def test_a_root_that_takes_no_key_fails_no_compile(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(2):
        _, _, cached = Artifacts(tmp_path / "cache", tmp_path / "file").compile(text, TARGET)
        assert not cached
