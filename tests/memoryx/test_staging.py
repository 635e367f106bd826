"""Values that are staged before anybody knows where they will lie."""

import pytest
import torch

from waferbox.cirh import CirhError
from waferbox.states import staging
from waferbox.states.staging import Staging
from wsc.v1 import initialisation_pb2, node_pb2, plan_pb2


def filled(name: str, value: float, elements: int = 8) -> node_pb2.InitialState:
    """A state with one number in every place."""
    program = initialisation_pb2.InitialProgram()
    program.buffers.add(element_type=plan_pb2.ELEMENT_TYPE_FLOAT32, elements=elements)
    call = program.calls.add(operation="aten.fill_.Scalar")
    call.arguments.add(view=initialisation_pb2.BufferView(shape=[elements], stride=[1]))
    call.arguments.add(number=value)
    return node_pb2.InitialState(name=name, program=program)


def test_a_staged_value_is_taken_once() -> None:
    staged = Staging()
    assert staged.make([filled("a", 1), filled("b", 2)]) == ["a", "b"]
    value = staged.take("b")
    assert value is not None
    assert value.tolist() == [2.0] * 8
    assert staged.take("b") is None
    staged.clear()
    assert staged.take("a") is None


def test_no_more_is_staged_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_LIMIT_BYTES", 100)
    staged = Staging()
    assert staged.make([filled("a", 1, 20), filled("b", 2, 20), filled("c", 3, 5)]) == ["a", "c"]
    assert staged.make([filled("d", 1, 1)]) == []
    staged.clear()
    assert staged.make([filled("b", 2, 20)]) == ["b"]


def test_a_program_that_cannot_be_run_is_an_error() -> None:
    wrong = filled("a", 1)
    wrong.program.calls[0].operation = "aten.bernoulli_.float"
    with pytest.raises(CirhError, match="bernoulli_"):
        Staging().make([filled("b", 1), wrong])


def test_nothing_is_staged_after_the_end() -> None:
    staged = Staging()
    staged.close()
    assert staged.make([filled("a", 1)]) == []


def test_a_value_that_is_made_again_takes_the_place_of_the_first() -> None:
    staged = Staging()
    staged.make([filled("a", 1)])
    staged.make([filled("a", 2)])
    value = staged.take("a")
    assert value is not None
    assert torch.equal(value, torch.full((8,), 2.0))
