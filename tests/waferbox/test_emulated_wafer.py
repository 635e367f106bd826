"""Wafers that sleep in place of computing: what they send, and for how long they sleep."""

import time

import pytest
import torch

import wafer.kernels
from benchmarks.emulated_wafer import VARIABLE, Sleeper, emulate, install
from wafer.kernels import WaferKernels
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module
from waferbox.prediction.simulation import Compute
from wsc.v1 import plan_pb2


def kernel_text() -> str:
    """A product with 2 * 8 * 6 * 4 operations."""
    builder = GraphBuilder()
    left = builder.argument(tensor_type((8, 6), torch.float32))
    right = builder.argument(tensor_type((6, 4), torch.float32))
    (product,) = builder.op("cirh.MatMul", [left, right])
    return print_module(builder.finish([(product, "output_0")]))


def test_a_kernel_sleeps_for_its_arithmetic_and_gives_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wafer.kernels, "_make", wafer.kernels._make)  # put back afterwards
    monkeypatch.setenv(VARIABLE, emulate(Compute(flops_per_second=2 * 8 * 6 * 4 / 0.05)))
    slept: list[float] = []
    monkeypatch.setattr(Sleeper, "sleep", lambda self, seconds: slept.append(seconds))
    install("wafer")
    kernels = WaferKernels().make([plan_pb2.Kernel(id=1, cirh=kernel_text())], plan_pb2.KERNEL_LIBRARY_ATEN)
    (made,) = kernels[1]([torch.ones(8, 6), torch.ones(6, 4)], [None])
    assert torch.equal(made, torch.zeros(8, 4))
    place = torch.ones(8, 4)
    assert kernels[1]([], [place])[0] is place
    assert slept == pytest.approx([0.05, 0.05])


def test_other_roles_stay_as_they_are() -> None:
    before = wafer.kernels._make
    install("memoryx")
    assert wafer.kernels._make is before


def test_what_a_sleep_took_too_long_the_next_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds + 0.25

    monkeypatch.setattr(time, "sleep", sleep)
    sleeper = Sleeper()
    for _ in range(4):
        sleeper.sleep(1.0)
    assert now[0] == pytest.approx(4.25)
