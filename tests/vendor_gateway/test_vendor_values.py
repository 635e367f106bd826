"""Tensors, steps and releases as the vendor's client writes them."""

import pytest
import torch

from vendor_gateway import wire_values
from vendor_gateway.vendor_execution import CompiledStep, Resources
from vendor_gateway.wire_values import ReleaseRefusedError, build_of, checkpoint_steps, read_value, write_value
from vendor_wire import appliance_pb2
from wsc.v1 import coordinator_pb2

ELEMENTS = (torch.bool, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float16, torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("dtype", ELEMENTS + FLOATS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_tensor_goes_there_and_back(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_values, "CHUNK_BYTES", 8)
    tensor = (torch.arange(6)[: torch.Size(shape).numel()].reshape(shape) % 2).to(dtype)
    messages = list(write_value("x", tensor))
    assert {message.num_chunks for message in messages} == {len(messages)}
    assert tuple(messages[0].value.tensor.shape) == shape
    data = bytearray(b"".join(message.value.tensor.data for message in messages))
    back = read_value(messages[0].value.element_type, data)
    assert back.dtype is dtype
    assert torch.equal(back, tensor.reshape(-1))


@pytest.mark.parametrize(("code", "data"), [(99, b"abcd"), (appliance_pb2.ELEMENT_TYPE_FLOAT32, b"abc"), (11, b"")])
def test_what_is_no_tensor_is_refused(code: int, data: bytes) -> None:
    with pytest.raises(ValueError, match="element"):
        read_value(code, bytearray(data))


def schedule(*intervals: tuple[int, int, int, bool]) -> appliance_pb2.Schedule:
    found = appliance_pb2.Schedule()
    for start, end, step, last in intervals:
        found.intervals.add(start=start, end=end, step=step, include_last=last)
    return found


def test_steps_are_counted_from_1() -> None:
    assert checkpoint_steps(schedule((4, 12, 5, True)), 12) == [5, 10, 12]
    assert checkpoint_steps(schedule(), 12) == []
    assert checkpoint_steps(schedule((0, 2, 1, False), (1, 3, 1, False)), 12) == [1, 2, 3]


@pytest.mark.parametrize("interval", [(4, 13, 5, True), (5, 5, 1, True), (0, 5, 0, True), (0, 1 << 40, 1, True)])
def test_steps_that_are_none_of_the_run_are_refused(interval: tuple[int, int, int, bool]) -> None:
    with pytest.raises(ValueError, match=r"steps|checkpoints"):
        checkpoint_steps(schedule(interval), 1 << 40 if interval[1] > 13 else 12)


def test_releases() -> None:
    assert build_of("2.10.0") == build_of("2.10.0+32008fd851")
    assert len({build_of(f"2.{release}") for release in ("6.0", "7.0", "7.1", "8.0", "9.0", "10.0")}) == 6
    with pytest.raises(ReleaseRefusedError, match=r"2\.9\.0 and 2\.10\.0, and this client is of release 2\.5\.0"):
        build_of("2.5.0")
    with pytest.raises(ReleaseRefusedError, match="does not say"):
        build_of("")


def test_the_inputs_of_a_step_are_those_of_its_header() -> None:
    text = (
        'module {\n  func @graph(%arg0: tensor<2xf32> {cs.input_name = "input_x"}, %arg1: tensor<f32> '
        '{tf.resource_name = "w"}, %arg2: tensor<2xi32> {cs.input_name = "input_labels"}) {\n'
        '    loc("cs.input_name = \\"a\\"")'
    )
    resources = Resources(num_csx=1, num_workers_per_csx=1, max_wgt_servers=0)
    step = CompiledStep(text=text, resources=resources, response=coordinator_pb2.CompileResponse())
    assert step.input_names == ["input_x", "input_labels"]
