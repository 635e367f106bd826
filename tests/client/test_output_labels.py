"""What the script calls the outputs of a step: the names of the curves of a job."""

from typing import Any

import pytest
import torch
from traced_steps import trace

from cstorch._internal.execution import Closure
from cstorch._internal.session.execution.outputs import MAX_LABEL, Outputs
from cstorch._internal.tracing import StepValue


def call(function: Any, *args: Any, **kwargs: Any) -> Closure:
    return Closure(function=function, args=args, kwargs=kwargs, at_checkpoint=False)


def add_scalar(name: str, scalar: torch.Tensor) -> None: ...


def report(loss: torch.Tensor, accuracy: Any = None, *more: torch.Tensor, **others: Any) -> None: ...


def step_with_two_outputs() -> tuple[Outputs, torch.Tensor, torch.Tensor]:
    """The outputs of a step that returns two numbers, and these."""
    traced = trace(lambda x: (x.sum(), x.mean()), torch.ones(3))
    first, second = (output.tensor for output in traced.outputs)
    outputs = Outputs()
    outputs.add_results((first, second))
    return outputs, first, second


@pytest.mark.parametrize(
    ("function", "arguments", "labels"),
    [
        (add_scalar, lambda first, _: ("train/loss", first), ["train/loss"]),
        (report, lambda first, second: (first, second), ["loss", "accuracy"]),
        (report, lambda first, second: ({"nll": first, "aux": [second]},), ["nll", "aux_0"]),
        (report, lambda first, second: ([first, second],), ["loss_0", "loss_1"]),
        (report, lambda first, second: (first, {"top": {"loss": second}}), ["loss", "top_loss"]),
        (report, lambda first, second: (first, None, second), ["loss", "more_0"]),
        (report, lambda first, _: (first, "epoch 3"), ["loss"]),  # a text behind the value does not name it
        (lambda text, a, b: None, lambda first, second: ("both", first, second), ["a", "b"]),
    ],
)
def test_an_output_is_called_what_the_script_calls_it(function: Any, arguments: Any, labels: list[str]) -> None:
    outputs, first, second = step_with_two_outputs()
    expected = dict(zip(["output_values_0", "output_values_1"], labels, strict=False))
    assert outputs.labels([call(function, *arguments(first, second))]) == expected


def test_the_first_closure_counts_and_labels_are_unique() -> None:
    outputs, first, second = step_with_two_outputs()
    other = trace(lambda x: x.sum(), torch.ones(3)).outputs[0].tensor
    value = StepValue(step=1, source=second)
    calls = [
        call(add_scalar, "loss", first),
        call(add_scalar, "again", first),
        call(add_scalar, "loss", value),
        call(add_scalar, "none", other),
        call(add_scalar, "constant", StepValue(step=1, value=torch.ones(()))),
    ]
    assert outputs.labels(calls) == {"output_values_0": "loss", "output_values_1": "loss_1"}


def test_a_long_label_is_cut() -> None:
    outputs, first, _ = step_with_two_outputs()
    assert outputs.labels([call(add_scalar, "x" * 1000, first)]) == {"output_values_0": "x" * MAX_LABEL}
