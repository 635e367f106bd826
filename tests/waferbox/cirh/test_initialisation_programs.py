"""Programs of initialisation: what is not one that may be run is refused before anything is made."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from waferbox.cirh import CirhError
from waferbox.cirh.execution import initialisation
from wsc.v1 import initialisation_pb2, plan_pb2

FLOAT32 = plan_pb2.ELEMENT_TYPE_FLOAT32


def program(*calls: initialisation_pb2.InitialCall, elements: int = 12) -> initialisation_pb2.InitialProgram:
    buffer = initialisation_pb2.InitialBuffer(element_type=FLOAT32, elements=elements)
    return initialisation_pb2.InitialProgram(buffers=[buffer], calls=calls)


def call(
    operation: str, shape: list[int], *numbers: float, stride: Sequence[int] | None = None, offset: int = 0, **more: Any
) -> initialisation_pb2.InitialCall:
    steps = [1] * len(shape) if stride is None else stride
    view = initialisation_pb2.BufferView(shape=shape, stride=steps, offset=offset)
    arguments = [initialisation_pb2.InitialArgument(view=view)]
    arguments += [initialisation_pb2.InitialArgument(number=number) for number in numbers]
    return initialisation_pb2.InitialCall(operation=operation, arguments=arguments, **more)


def test_a_program_writes_to_views() -> None:
    out = torch.full((3, 4), 7.0)
    columns = call("aten.fill_.Scalar", [3, 2], 2.5, stride=[4, 1], offset=1)
    initialisation.run(program(columns, call("aten.add_.Scalar", [4], 1)), out)
    expected = torch.zeros(3, 4)
    expected[:, 1:3] = 2.5
    expected[0] += 1
    assert torch.equal(out, expected)


@torch.no_grad()
def test_random_numbers_are_those_of_the_generator() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state().numpy().tobytes()
    expected = torch.empty(20).normal_(1, 2)
    out = torch.empty(20)
    initialisation.run(program(call("aten.normal_.default", [20], 1, 2, generator=state), elements=20), out)
    assert torch.equal(out, expected)


def too_many_calls() -> initialisation_pb2.InitialProgram:
    return program(*[call("aten.zero_.default", [12])] * (initialisation.MAXIMUM_CALLS + 1))


def too_large() -> initialisation_pb2.InitialProgram:
    made = program()
    made.buffers.add(element_type=FLOAT32, elements=1 << 50)
    return made


def wrong_value() -> initialisation_pb2.InitialProgram:
    made = program(call("aten.zero_.default", [12]))
    made.buffers[0].value = b"abc"
    return made


WRONG = {
    "another operator": program(call("aten.bernoulli_.float", [12], 0.5)),
    "no aten operator": program(call("prims.fill.default", [12], 0.5)),
    "beyond the buffer": program(call("aten.zero_.default", [3], offset=10)),
    "beyond by strides": program(call("aten.zero_.default", [2, 2], stride=[11, 1])),
    "a negative stride": program(call("aten.zero_.default", [3], stride=[-1], offset=5)),
    "a negative size": program(call("aten.zero_.default", [-3])),
    "more strides than sizes": program(call("aten.zero_.default", [3], stride=[1, 1])),
    "shapes that do not fit": program(call("aten.tril_.default", [12])),
    "a generator that is none": program(call("aten.normal_.default", [12], generator=b"x" * 5056)),
    "no generator": program(call("aten.normal_.default", [12])),
    "a result where it writes in place": program(call("aten.zero_.default", [12], result=0)),
    "no result where it needs one": program(call("aten.exp.default", [12])),
    "a result of another size": program(call("aten.exp.default", [6], result=0)),
    "a result in no buffer": program(call("aten.exp.default", [12], result=1)),
    "too many calls": too_many_calls(),
    "too much memory": too_large(),
    "a value of another size": wrong_value(),
    "another size than the state": program(elements=13),
    "nothing": initialisation_pb2.InitialProgram(),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused(what: str) -> None:
    with pytest.raises(CirhError):
        initialisation.run(WRONG[what], torch.empty(12))


def test_an_argument_of_another_name_is_refused() -> None:
    made = program(call("aten.zero_.default", [12]))
    made.calls[0].arguments.add(name="out", integer=1)
    with pytest.raises(CirhError, match="out"):
        initialisation.run(made, torch.empty(12))
