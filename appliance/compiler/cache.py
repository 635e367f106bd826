"""Compiled plans on disk, by the hash of what they are made from. What comes from disk is checked like other input.

A plan decides what every role does with a user's data, so it is authenticated: whoever can write to the folder of the
plans, which a script may choose, cannot write one without the key, which lies in the cluster's cache root for its owner
alone.
"""

import dataclasses
import hashlib
import hmac
from pathlib import Path
from typing import Final

import torch
from google.protobuf.message import DecodeError

from appliance.compiler.core.micro_batching import MicroBatching
from appliance.compiler.core.target import Target
from appliance.compiler.plan import PLAN_FORMAT
from appliance.compiler.plan_check.check import PlanError, check_plan
from interconnect.rpc.version import __version__
from wsc.v1 import plan_pb2

SUFFIX: Final = ".plan"
_MAGIC: Final = b"WSCPLAN2"
_SUM_BYTES: Final = 32  # of the hash, and of the keyed hash
_HEAD_BYTES: Final = len(_MAGIC) + 2 * _SUM_BYTES
MAX_PLAN_BYTES: Final = 1 << 30


def artifact_key(text: str, target: Target, asked: MicroBatching | None = None) -> str:
    """The name of the plan for this module and target, with its batch divided as asked."""
    pinned = sorted(target.pinned_shards.items())
    mixed = target.precision
    precision = mixed and (mixed.half.value, mixed.level, mixed.half_gradients)
    memory = (target.wafer_memory_bytes, target.prefetch_layers)
    time = (target.micro_batches, asked and dataclasses.astuple(asked))
    how = (target.kernel_library.value, target.execution_strategy.value, target.wafer_cores)
    replicas = (target.num_replicas, target.asynchronous_updates)
    made_for = (target.num_csx, target.num_shards, *memory, pinned, precision, *how, *replicas, time)
    made_by = (PLAN_FORMAT, __version__, torch.__version__)
    return hashlib.sha256(f"{made_by}{made_for}\n{text}".encode()).hexdigest()


class PlanCache:
    """The plans in one folder that one key authenticates."""

    def __init__(self, folder: Path, key: bytes) -> None:
        self._folder = folder
        self._key = key

    def path(self, name: str) -> Path:
        """Where the plan of this name lies."""
        return self._folder / f"{name}{SUFFIX}"

    def content(self, name: str, plan: plan_pb2.Plan) -> bytes:
        """What is to lie there."""
        body = plan.SerializeToString(deterministic=True)
        digest = hashlib.sha256(body).digest()
        return _MAGIC + digest + self._tag(name, digest) + body

    def load(self, name: str) -> plan_pb2.Plan | None:
        """The plan of this name, or None: there is none, it is damaged, it is not ours, or does not hold together."""
        data = _read(self.path(name))
        digest, tag = data[len(_MAGIC) : len(_MAGIC) + _SUM_BYTES], data[len(_MAGIC) + _SUM_BYTES : _HEAD_BYTES]
        return _parse(data) if hmac.compare_digest(tag, self._tag(name, digest)) else None

    def _tag(self, name: str, digest: bytes) -> bytes:
        """Of the name too: a plan under another's name is not what was asked for."""
        return hashlib.blake2b(name.encode() + digest, key=self._key, digest_size=_SUM_BYTES).digest()


def read_plan(path: Path) -> plan_pb2.Plan | None:
    """The plan in a file, to be looked at and not to be run: whoever wrote it. None as of PlanCache.load."""
    return _parse(_read(path))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PLAN_BYTES + 1)
    except OSError:
        return b""
    return data if len(data) <= MAX_PLAN_BYTES else b""


def _parse(data: bytes) -> plan_pb2.Plan | None:
    body = data[_HEAD_BYTES:]
    if not data.startswith(_MAGIC + hashlib.sha256(body).digest()):
        return None
    try:
        plan = plan_pb2.Plan.FromString(body)
        if plan.format != PLAN_FORMAT:
            return None
        check_plan(plan)
    except (DecodeError, PlanError):
        return None
    return plan
