"""The search for the first operation of a step whose results PyTorch does not have."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from waferbox.check.bisection import first_difference
from waferbox.checked_run.moments import moments
from waferbox.checked_run.record import StepObserved

# The first layer of a network: nobody needs the gradient of its input, which the mask switches off.
TEXT = """
module {
  func @graph(%arg0: tensor<2x1x3x3xf32> {tf.aliasing_output = 0 : i64, tf.resource_name = "state.model.weight"},
      %arg1: tensor<2x1x4x4xf32> {cs.input_name = "input_0"})
      -> (tensor<2x1x3x3xf32>, tensor<2x2x2x2xf32> {cs.output_name = "output_0"}) {
    %0 = aten.convolution %arg1, %arg0 {dilation = dense<1> : tensor<2xi64>, groups = 1 : i64,
      output_padding = dense<0> : tensor<2xi64>, padding = dense<0> : tensor<2xi64>, stride = dense<1> : tensor<2xi64>,
      transposed = false} : (tensor<2x1x4x4xf32>, tensor<2x1x3x3xf32>) -> tensor<2x2x2x2xf32>
      loc("first.fwd/aten::convolution"("train.py":7:0))
    %1, %2, %3 = aten.convolution_backward %0, %arg1, %arg0 {bias_sizes = dense<2> : tensor<1xi64>,
      dilation = dense<1> : tensor<2xi64>, groups = 1 : i64, output_mask = dense<[false, true, false]> : tensor<3xi1>,
      output_padding = dense<0> : tensor<2xi64>, padding = dense<0> : tensor<2xi64>, stride = dense<1> : tensor<2xi64>,
      transposed = false} : (tensor<2x2x2x2xf32>, tensor<2x1x4x4xf32>, tensor<2x1x3x3xf32>)
      -> (tensor<0xf32>, tensor<2x1x3x3xf32>, tensor<0xf32>)
      loc("first.bwd/aten::convolution_backward"("train.py":8:0))
    %4 = cirh.Sub %arg0, %2 : tensor<2x1x3x3xf32> loc("aten::sub_"("train.py":9:0))
    return %4, %0 : tensor<2x1x3x3xf32>, tensor<2x2x2x2xf32>
  }
}
"""


@pytest.mark.parametrize(("wrong", "line"), [("output", 7), ("gradient", 8)])
def test_an_operation_with_a_masked_result_is_passed_or_found(tmp_path: Path, wrong: str, line: int) -> None:
    weight, images = torch.randn(2, 1, 3, 3).requires_grad_(), torch.randn(2, 1, 4, 4)
    output = torch.nn.functional.conv2d(images, weight)
    (gradient,) = torch.autograd.grad(output, weight, output.detach())
    results = {"output": output, "gradient": gradient, "weight": weight - gradient}
    others = list(results)[list(results).index(wrong) :]  # what follows from it is other as well
    rows = [moments((result * 1.5 if name in others else result).detach()) for name, result in results.items()]
    kept = {"state.model.weight": weight.detach(), "input.0": images, "moments": torch.stack(rows)}
    save_file(kept, tmp_path / "observed")
    found = first_difference(TEXT, tmp_path, StepObserved(execution=1, step=1, path="observed", counter=0), None)
    assert found is not None
    assert found.source is not None
    assert found.source.line == line
