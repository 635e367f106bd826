"""Steps of one operation each, of those that only the vendor's client writes."""

from dataclasses import dataclass, field
from typing import Any

import torch
from plan_simulator import Simulation
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue

from appliance.compiler.pipeline import Target, compile_module
from appliance.compiler.plan_check.check import check_plan
from waferbox.cirh.dialect.source import Source
from waferbox.cirh.dialect.types import tensor_type
from waferbox.cirh.execution.kernel import Kernel
from waferbox.cirh.modules.builder import GraphBuilder
from waferbox.cirh.text.printer import print_module

BATCH = 12
F64, I64 = torch.float64, torch.int64
Tensor = torch.Tensor
Types = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass
class Step:
    """One operation: of the batch's tensors, states, and constants."""

    name: str
    operands: list[Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)
    types: Types = field(default_factory=list)
    kinds: str = ""  # for each operand: b batch, s state, c constant; without: all of the batch
    read: int | None = None
    torch_op: str = "aten::x"

    def module(self) -> ModuleOp:
        builder = GraphBuilder()
        values: list[SSAValue] = []
        for number, (kind, tensor) in enumerate(zip(self._kinds(), self.operands, strict=True)):
            named: dict[str, Any] = {"b": {"input": f"input_{number}"}, "s": {"state": f"state.{number}"}}.get(kind, {})
            argument = builder.dense(tensor) if kind == "c" else builder.argument(_type(tensor), **named)
            values.append(argument)
        given = [tensor_type(*type) for type in self.types] or None
        source = Source(module="layer", op=self.torch_op, file="train.py", line=53)
        made = builder.op(f"cirh.{self.name}", values, self.attributes, source, types=given)[: self.read]
        return builder.finish([(value, f"output_{number}") for number, value in enumerate(made)])

    def _kinds(self) -> str:
        return self.kinds or "b" * len(self.operands)

    def of_kind(self, kind: str) -> list[Tensor]:
        return [tensor for k, tensor in zip(self._kinds(), self.operands, strict=True) if k == kind]

    def divided(self, wafers: int) -> list[Tensor]:
        """What the outputs are on so many wafers."""
        plan = compile_module(print_module(self.module()), Target(num_csx=wafers, num_shards=1))
        check_plan(plan)
        named = {f"state.{n}": t for n, (k, t) in enumerate(zip(self._kinds(), self.operands, strict=True)) if k == "s"}
        (outputs,) = Simulation(plan, named).run([self.of_kind("b")])
        return list(outputs.values())

    def whole(self) -> list[Tensor]:
        given = [tensor for kind, tensor in zip(self._kinds(), self.operands, strict=True) if kind != "c"]
        return Kernel.build(self.module())(given)


def _type(tensor: Tensor) -> Any:
    return tensor_type(tensor.shape, tensor.dtype)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=F64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def n(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def dot(lb: list[int], rb: list[int], lc: list[int], rc: list[int]) -> dict[str, Any]:
    return {
        "lhs_batching_dimensions": lb,
        "rhs_batching_dimensions": rb,
        "lhs_contracting_dimensions": lc,
        "rhs_contracting_dimensions": rc,
    }


def convolution(direction: str) -> dict[str, Any]:
    return {
        "conv_pass_direction": direction,
        "data_format": "NCHW",
        "dilation": [1, 1],
        "groups": 2,
        "padding": [1, 1],
        "stride": [2, 2],
    }


def pool(kind: str, **more: Any) -> dict[str, Any]:
    windows = {"ksize": [1, 1, 1, 2, 2], "strides": [1, 1, 1, 2, 2], "padding": [0] * 10, "dilation": [1] * 5}
    return {"data_format": "NCDHW", "pool_type": kind, **windows, **more}


def typed(*shapes: tuple[int, ...]) -> Types:
    return [(shape, F64) for shape in shapes]


IMAGE, KERNEL, OUTPUT = (BATCH, 4, 5, 5), (6, 2, 3, 3), (BATCH, 6, 3, 3)
VOLUME, POOLED = (BATCH, 3, 1, 4, 4), (BATCH, 3, 1, 2, 2)
NORM = {"data_format": "NCHW", "epsilon": 1e-3}
TRAINED = {**NORM, "is_training": True}
CHANNELS = [r(4), r(4) + 1, r(4), r(4) ** 2 + 0.5]
PAD = {
    "edge_padding_low": [0, -1, 2],
    "edge_padding_high": [0, 3, 0],
    "interior_padding": [0, 1, 0],
    "constant_values": [0.5, 0.5, 0.5],
    "padding_mode": "CONSTANT",
}
MASKS = {"begin_mask": 1, "end_mask": 1, "shrink_axis_mask": 4}
BOUNDS = [n(0, 1, 2), n(0, 5, 3), n(1, 2, 1)]

STEPS = {
    "Gather of samples' rows": Step("Gather", [r(7, 5), ints(7, BATCH, 3)], {"axis": 0}, kinds="sb"),
    "Gather along columns": Step("Gather", [r(7, 5), ints(5, BATCH)], {"axis": 1}, kinds="sb"),
    "Gather of the same places": Step("Gather", [r(BATCH, 5, 2), ints(5, 4)], {"axis": 1}, kinds="bs"),
    "Gather in each sample": Step("Gather", [r(BATCH, 5, 2), ints(5, BATCH, 3)], {"axis": 1, "batch_dims": 1}),
    "Gather of single elements": Step(
        "Gather", [r(BATCH, 5, 2), ints(5, BATCH, 3, 1)], {"axis": 1, "batch_dims": 0}, typed((BATCH, 3, 1))
    ),
    "GatherNd of samples": Step("GatherNd", [r(7, 5, 2), ints(5, BATCH, 3, 2)], kinds="sb"),
    "GatherNd in each sample": Step("GatherNd", [r(BATCH, 5, 4), ints(4, BATCH, 3, 2)], {"start_dim": 1}),
    "ScatterNd": Step("ScatterNd", [torch.zeros(7, 5, dtype=F64), ints(7, BATCH, 1), r(BATCH, 5)], kinds="cbb"),
    "DotGeneral of batches": Step("DotGeneral", [r(BATCH, 3, 5), r(BATCH, 4, 5)], dot([0], [0], [2], [2])),
    "DotGeneral of another order": Step("DotGeneral", [r(BATCH, 3, 5), r(BATCH, 5, 3)], dot([1], [2], [2], [1])),
    "DotGeneral over samples": Step("DotGeneral", [r(BATCH, 3), r(BATCH, 4)], dot([], [], [0], [0])),
    "DotGeneral with a weight": Step("DotGeneral", [r(4, 5, 3), r(BATCH, 3, 2)], dot([], [], [2], [1]), kinds="sb"),
    "DotGeneral of a sample and a weight": Step(
        "DotGeneral", [r(BATCH, 2, 3), r(3, 2)], dot([1], [1], [2], [0]), kinds="bs"
    ),
    "DotGeneral of all with all": Step("DotGeneral", [r(BATCH, 3), r(BATCH, 3)], dot([], [], [1], [1])),
    "LayerNorm": Step("LayerNorm", [r(BATCH, 3, 5), r(5), r(5)], {"epsilon": 1e-3}, kinds="bss"),
    "LayerNormGrad": Step(
        "LayerNormGrad", [r(BATCH, 3, 5), r(BATCH, 3, 5) ** 2, r(5), r(5)], {"epsilon": 1e-3}, kinds="bbss"
    ),
    "Convolution": Step("Convolution", [r(*IMAGE), r(*KERNEL)], convolution("FWD"), typed(OUTPUT), kinds="bs"),
    "Convolution, gradient of the image": Step(
        "Convolution",
        [r(*OUTPUT), r(*KERNEL)],
        {**convolution("BWD_INPUT"), "transposed": True},
        typed(IMAGE),
        kinds="bs",
    ),
    "Convolution, transposed": Step(
        "Convolution",
        [r(*OUTPUT), r(*KERNEL)],
        {**convolution("FWD"), "transposed": True},
        typed(IMAGE),
        kinds="bs",
    ),
    "Convolution, transposed, gradient of the kernel": Step(
        "Convolution", [r(*IMAGE), r(*OUTPUT)], {**convolution("BWD_KERNEL"), "transposed": True}, typed(KERNEL)
    ),
    "Convolution, transposed, gradient of the image": Step(
        "Convolution", [r(*IMAGE), r(*KERNEL)], convolution("BWD_INPUT"), typed(OUTPUT), kinds="bs"
    ),
    "Convolution, gradient of the kernel": Step(
        "Convolution", [r(*IMAGE), r(*OUTPUT)], convolution("BWD_KERNEL"), typed(KERNEL)
    ),
    "BiasAdd": Step("BiasAdd", [r(*IMAGE), r(4)], {"dim": 1}, typed(IMAGE), kinds="bs"),
    "BiasAdd to samples": Step("BiasAdd", [r(3, BATCH), r(BATCH)], {"dim": 1}, typed((3, BATCH)), kinds="sb"),
    "BiasAddGrad": Step("BiasAddGrad", [r(*IMAGE)], {"dim": 1}, typed((4,))),
    "BiasAddGrad of samples": Step("BiasAddGrad", [r(BATCH, 3)], {"dim": 0}, typed((BATCH,))),
    "Convolution of a whole image, gradient of the kernel": Step(
        "Convolution", [r(*IMAGE), r(*OUTPUT)], convolution("BWD_KERNEL"), typed(KERNEL), kinds="sb"
    ),
    "Pool, maxima": Step("Pool", [r(*VOLUME)] * 2, pool("MAX"), typed(POOLED)),
    "Pool, means": Step("Pool", [r(*VOLUME)] * 2, pool("AVERAGE"), typed(POOLED)),
    "Pool, gradient of maxima": Step("Pool", [r(*VOLUME), r(*POOLED)], pool("MAX", gradient=True), typed(VOLUME)),
    "Pool, gradient of means": Step("Pool", [r(*VOLUME), r(*POOLED)], pool("AVERAGE", gradient=True), typed(VOLUME)),
    "FusedBatchNorm": Step(
        "FusedBatchNorm", [r(*IMAGE), *CHANNELS], TRAINED, typed(IMAGE, (4,), (4,)), kinds="bssss", read=1
    ),
    "FusedBatchNorm in evaluation": Step(
        "FusedBatchNorm",
        [r(*IMAGE), *CHANNELS],
        {**NORM, "is_training": False},
        typed(IMAGE, (4,), (4,)),
        kinds="bssss",
        read=1,
    ),
    "FusedBatchNormGrad": Step(
        "FusedBatchNormGrad", [r(*IMAGE), r(*IMAGE) ** 2, r(4)], TRAINED, typed(IMAGE, (4,), (4,)), kinds="bbs"
    ),
    "GroupNorm": Step("GroupNorm", [r(*IMAGE), *CHANNELS[:2]], {**NORM, "num_groups": 2}, kinds="bss"),
    "GroupNorm without weights": Step("GroupNorm", [r(*IMAGE)], {**NORM, "num_groups": 2}),
    "GroupNormGrad": Step("GroupNormGrad", [r(*IMAGE), r(*IMAGE) ** 2, r(4)], {**NORM, "num_groups": 2}, kinds="bbs"),
    "Scatter": Step("Scatter", [r(BATCH, 5), ints(5, BATCH, 3), r(BATCH, 3)], {"axis": 1, "reduce_kind": "ADD"}),
    "Scatter to zeros": Step(
        "Scatter",
        [torch.zeros(BATCH, 5, dtype=F64), ints(5, BATCH, 1), r(BATCH, 1)],
        {"axis": 1, "reduce_kind": "NONE"},
        kinds="cbb",
    ),
    "TopK": Step("TopK", [r(BATCH, 5)], {"dimension": 1, "k": 2}, [((BATCH, 2), F64), ((BATCH, 2), I64)]),
    "CumSum": Step("CumSum", [r(BATCH, 5)], {"axis": 1, "exclusive": True}),
    "CumProd": Step("CumProd", [r(BATCH, 5)], {"axis": 1, "reverse": True}),
    "SoftmaxCrossEntropyWithLogits": Step(
        "SoftmaxCrossEntropyWithLogits", [r(BATCH, 5), r(BATCH, 5).softmax(1)], {"axis": 1}
    ),
    "OneHot": Step(
        "OneHot",
        [ints(5, BATCH, 2), torch.tensor(5), torch.tensor(2.0), torch.tensor(0.0), torch.tensor(1)],
        kinds="bcccc",
    ),
    "MatrixBandPart": Step("MatrixBandPart", [r(BATCH, 4, 4), torch.tensor(1), torch.tensor(0)], kinds="bcc"),
    "pad": Step("pad", [r(BATCH, 4, 3)], PAD),
    "unpad": Step("unpad", [r(BATCH, 4, 3)], {"edge_unpadding_high": [0, 1, 2]}),
    "Repeat": Step("Repeat", [r(BATCH, 3)], {"repeats": [2, 1, 2]}),
    "Slice": Step("Slice", [r(BATCH, 4, 3), n(0, 1, 0), n(BATCH, 2, -1)], kinds="bcc"),
    "StridedSlice": Step("StridedSlice", [r(BATCH, 6, 3), *BOUNDS], MASKS, kinds="bccc"),
    "StridedSliceGrad": Step("StridedSliceGrad", [n(BATCH, 6, 3), *BOUNDS, r(BATCH, 2)], MASKS, kinds="ccccb"),
    "SigmoidGrad": Step("SigmoidGrad", [r(BATCH, 3), r(BATCH, 3)]),
    "EluGrad": Step("EluGrad", [r(BATCH, 3), r(BATCH, 3)], {"alpha": 0.5}),
    "LeakyReluGrad": Step("LeakyReluGrad", [r(BATCH, 3), r(BATCH, 3)], {"alpha": 0.5}),
    "MeshAllSlice": Step("MeshAllSlice", [r(BATCH, 3)], {"split_axes": [-1, 0], "names": "InnerDimension"}),
    "SerializeBarrier": Step("SerializeBarrier", [r(BATCH, 3), r(4)], kinds="bs"),
}
