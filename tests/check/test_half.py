"""The answer of what half precision does, from the values of steps on the cluster and by PyTorch in float32."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import save_file

from appliance.compiler.core.target import Precision
from waferbox.check.half import half_answer, steps_before_skip
from waferbox.check.half_errors import HalfErrors, half_errors
from waferbox.check.verdict import Answer, State
from waferbox.checked_run.record import Found, Program, Question, StepObserved
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module

# After each step: of NAME, or of several states.
Values = Sequence[Sequence[float] | Mapping[str, float | Sequence[float]]]

NAME = "state.model.fc.weight"
TEXT = """\
#loc1 = loc("fc.fwd/aten::mul"("train.py":7:0))
module  {
  func @graph(%arg0: tensor<4xf32> {tf.aliasing_output = 0 : i64, tf.resource_name = "state.model.fc.weight"} \
loc(unknown), %arg1: tensor<4xf32> {cs.input_name = "x"} loc(unknown)) -> (tensor<4xf32>) {
    %0 = cirh.Mul %arg0, %arg1 : tensor<4xf32> loc(#loc1)
    return %0 : tensor<4xf32> loc(unknown)
  } loc(unknown)
} loc(unknown)
"""


class AnswerOf(Protocol):
    def __call__(self, cluster: Values, eager: Values, beyond: Sequence[Found] = ()) -> Answer: ...


@pytest.fixture
def answer(tmp_path: Path) -> AnswerOf:
    """Returns a function that returns the answer for values of one state, after the steps from the first on."""

    def answer_of(cluster: Values, eager: Values, beyond: Sequence[Found] = ()) -> Answer:
        path = tmp_path / "cirh.mlir"
        path.write_text(TEXT)
        program = Program(
            execution=1,
            path=str(path),
            function="training_step",
            trains=True,
            half="float16",
            optimization_level=1,
            half_gradients=False,
            trace_seconds=0.1,
            num_csx=1,
            input_line="",
        )
        return half_answer(
            program, saved(tmp_path / "cluster", cluster, 1), saved(tmp_path / "eager", eager, 0), beyond
        )

    return answer_of


def saved(folder: Path, steps: Values, first: int) -> dict[tuple[int, int], Path]:
    folder.mkdir()
    files: dict[tuple[int, int], Path] = {}
    for step, values in enumerate(steps, first):
        named = values if isinstance(values, Mapping) else {NAME: values}
        files[1, step] = folder / f"{step}.safetensors"
        save_file({name: torch.tensor(value, dtype=torch.float64) for name, value in named.items()}, files[1, step])
    return files


def test_good(answer: AnswerOf) -> None:
    given = answer([[1.1, 2, 3, 4.1]], [[1.0, 2, 3, 4], [1.1, 2, 3, 4.2]])
    assert (given.state, given.findings) == (State.GOOD, ())


def test_values_that_do_not_change(answer: AnswerOf) -> None:
    given = answer([[1.0, 2, 3, 4.1]], [[1.0, 2, 3, 4], [1.1, 2.1, 3, 4.1]])
    assert given.state is State.FOUND
    (finding,) = given.findings
    assert finding.message.startswith("67% of the values of fc.weight change in float32 and not in float16")


def test_overflow(answer: AnswerOf) -> None:
    beyond = [Found(question=Question.HALF, line="train.py:5", message="`aten::mul` gives values of 1e+06")]
    given = answer([[1.0, float("inf"), 3, 4]], [[1.0, 2, 3, 4], [1.1, 2.1, 3, 4]], beyond)
    assert [finding.line for finding in given.findings if "not finite" in finding.message] == ["train.py:5"]


@pytest.mark.parametrize(
    ("skipped", "said"),
    [
        (1.0, "; the loss scale moved to 16384, and the step was skipped"),
        (0.0, "; the loss scale of 16384 did not move, as the gradients are finite"),
    ],
)
def test_overflow_with_a_loss_scale(answer: AnswerOf, skipped: float, said: str) -> None:
    scaler = {"state.grad_scaler.0.loss_scale": 2.0**14, "state.grad_scaler.0.num_skipped_steps": skipped}
    given = answer([{"output.0": math.inf, **scaler}], [{}, {"output.0": 1.0}])
    assert given.state is State.FOUND
    (finding,) = given.findings
    assert finding.message == f"after step 1 output.0 are not finite, and in float32 they are{said}"


def test_infinity_that_float32_has_too(answer: AnswerOf) -> None:
    given = answer([[1.1, float("inf")]], [[1.0, 2.0], [1.1, float("inf")]])
    assert given.state is State.GOOD


def test_skipped_steps(answer: AnswerOf, tmp_path: Path) -> None:
    def scale(skipped: float) -> dict[str, float | list[float]]:
        return {
            NAME: [1.0, 2],
            "state.grad_scaler.0.loss_scale": 2.0**15,
            "state.grad_scaler.0.num_skipped_steps": skipped,
        }

    given = answer([scale(0), scale(1)], [[1.0, 2], [1.1, 2.1], [1.2, 2.2]])
    assert given.state is State.GOOD
    assert given.summary.endswith("after the first step and 32768 after the last; 1 of the steps were skipped.")
    assert list(steps_before_skip(saved(tmp_path / "more", [scale(0), scale(0), scale(1), scale(1)], 1))) == [
        (1, 1),
        (1, 2),
    ]


def test_errors_by_layer(tmp_path: Path) -> None:
    def layer(name: str, line: int) -> Source:
        return Source(module=name, op="aten::mm", file="train.py", line=line)

    builder = GraphBuilder()
    weight = builder.argument(tensor_type((4, 4), torch.float32), state=NAME)
    batch = builder.argument(tensor_type((2, 4), torch.float32), input="input_0")
    (hidden,) = builder.op("cirh.MatMul", [batch, weight], loc=layer("first", 7))
    (large,) = builder.op("cirh.MatMul", [hidden, weight], loc=layer("second", 8))
    (after,) = builder.op("cirh.MatMul", [large, weight], loc=layer("third", 9))
    text = print_module(builder.finish([(after, "output_0")]))
    tensors = {NAME: torch.full((4, 4), 200.0), "input.0": torch.ones(2, 4), "moments": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "observed")
    observed = StepObserved(execution=1, step=1, path="observed", counter=0)

    def errors_in(half: str) -> HalfErrors:
        precision = Precision.of_options(half, 1, False)
        assert precision is not None
        errors = half_errors(text, precision, tmp_path, observed)
        assert errors is not None
        return errors

    found = errors_in("float16")  # 200 * 4 = 800; 800 * 800 is beyond 65504
    assert found.first is not None
    assert (found.first.place, found.first.module, found.first_error) == ("train.py:8", "second", math.inf)
    assert list(found.layers.items()) == [("first", (0, 0)), ("second", (math.inf, 0)), ("third", (math.inf, 0))]
    good = errors_in("bfloat16")
    assert good.first is None
    assert all(forward < 0.01 for forward, _ in good.layers.values())
