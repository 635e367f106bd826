"""The memory of large tensors: no more than is used at once, kept for the next step, and given back at the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

# A forward pass as most are: of each layer one tensor dies, one of the same size stays, and a small one.
STEPS = """
import logging, sys, torch
from waferbox.host.memory import keep_freed_memory
from wafer.large_tensors import limit_large_tensors, release_large_tensors

logging.basicConfig(stream=sys.stdout)

def resident_bytes():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))

keep_freed_memory()
limit_large_tensors(44 << 20)
torch.ones(8) * 2
before = resident_bytes()
for step in range(3):
    kept = []
    for layer in range(10):
        made = torch.ones(1 << 20)
        kept += [made * 2, torch.ones(2)]
        del made
print(resident_bytes() - before)
assert float(kept[-2].sum()) == 2 << 20
del kept
print(resident_bytes() - before)
release_large_tensors()
print(resident_bytes() - before)
"""
PLANNED_BYTES = 44 << 20


def run_steps(cache: Path, **variables: str) -> list[str]:
    environment = {**os.environ, "WAFERBOX_CACHE": str(cache), **variables}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=environment, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.splitlines()


def test_steps_take_what_is_planned_and_give_it_back(tmp_path: Path) -> None:
    in_use, between, after = map(int, run_steps(tmp_path))
    assert 0.9 * PLANNED_BYTES <= in_use <= 1.1 * PLANNED_BYTES
    assert between >= 0.9 * in_use  # the next step finds it
    assert after <= 4 << 20


def test_without_a_compiler_the_user_is_told(tmp_path: Path) -> None:
    first, *_ = run_steps(tmp_path, CXX="false")
    assert "Wafers take more memory than planned, up to four times the activations: false failed" in first
