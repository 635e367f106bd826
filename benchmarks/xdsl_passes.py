"""xDSL's pass pipeline, pattern rewriter and dead-code elimination against the compiler's.

`python -m benchmarks.xdsl_passes`. The same rewritings of the same modules, in CPU time and in turns, and whether what
comes out is equal.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass, PassPipeline
from xdsl.pattern_rewriter import PatternRewriter, PatternRewriteWalker, RewritePattern
from xdsl.transforms.dead_code_elimination import dce, region_dce

from appliance.compiler.core.rewriter import Rewriter
from appliance.compiler.passes import canonicalise
from appliance.compiler.passes.dce import eliminate_dead_code
from appliance.compiler.pipeline import PASSES, Pass
from benchmarks.traced import trace_gpt2, trace_training
from waferbox.cirh.text.parser import parse_module
from waferbox.cirh.text.printer import print_module

REPEATS: Final = 9
Work = Callable[[ModuleOp], object]


def cnn_text() -> str:
    widths = (3, *(16,) * 6, *(32,) * 6, *(64,) * 6)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    batch = (torch.randn(8, 3, 16, 16), torch.randint(10, (8,)))
    return trace_training(model, lambda net, given: nn.functional.cross_entropy(net(given[0]), given[1]), batch).text


class _ListeningRewriter(Rewriter):
    """Tells xDSL's rewriter of every change, as its walker needs it."""

    current: PatternRewriter

    def _insert(self, created: Operation) -> None:
        self.current.insert(created)

    def replace(self, values: Sequence[SSAValue]) -> None:
        self.current.replace(self._op, [], list(values))


class _Canonicalise(RewritePattern):
    def match_and_rewrite(self, op: Operation, rewriter: PatternRewriter) -> None:
        _ListeningRewriter.current = rewriter
        canonicalise._rewrite(op)


def xdsl_canonicalise(module: ModuleOp) -> None:
    with patch.object(canonicalise, "Rewriter", _ListeningRewriter):
        PatternRewriteWalker(_Canonicalise()).rewrite_module(module)


def pass_of(step: Pass) -> ModulePass:
    def apply(self: ModulePass, ctx: Context, op: ModuleOp) -> None:
        step.run(op)

    made: ModulePass = type(step.name, (ModulePass,), {"name": step.name, "apply": apply})()
    return made


def run_all(module: ModuleOp) -> None:
    for step in PASSES:
        step.run(module)


def xdsl_run_all(module: ModuleOp) -> None:
    PassPipeline(tuple(pass_of(step) for step in PASSES)).apply(Context(), module)


def before(name: str, text: str) -> str:
    """The text that a pass is given in a compile."""
    module = parse_module(text)
    for step in PASSES:
        if step.name == name:
            break
        step.run(module)
    return print_module(module)


def measure(text: str, ours: Work, theirs: Work) -> None:
    seconds: Mapping[str, list[float]] = {"ours": [], "theirs": []}
    texts = {}
    for number in range(REPEATS):
        sides: list[tuple[str, Any]] = [("ours", ours), ("theirs", theirs)]
        for side, work in sides if number % 2 else reversed(sides):
            module = parse_module(text)
            begin = time.process_time()
            work(module)
            seconds[side].append(time.process_time() - begin)
            texts[side] = print_module(module)
    ratio = statistics.median(them / us for us, them in zip(seconds["ours"], seconds["theirs"], strict=True))
    mine, other = (1e3 * statistics.median(seconds[side]) for side in ("ours", "theirs"))
    outcome = "equal" if texts["ours"] == texts["theirs"] else "NOT EQUAL"
    print(f"{mine:8.1f} ms ours {other:8.1f} ms xDSL's   ratio {ratio:5.2f}   {outcome}")


def main() -> None:
    torch.set_num_threads(1)
    for model, text in (("GPT-2 small", trace_gpt2().text), ("CNN of 18 convolutions", cnn_text())):
        print(f"{model}: {text.count(chr(10))} lines")
        for what, given, ours, theirs in (
            (
                "dce, xDSL's region_dce",
                before("dce", text),
                eliminate_dead_code,
                lambda module: region_dce(module.body),
            ),
            ("dce, xDSL's dce pattern", before("dce", text), eliminate_dead_code, dce),
            ("canonicalise", before("canonicalise", text), canonicalise.canonicalise, xdsl_canonicalise),
            ("all passes", text, run_all, xdsl_run_all),
        ):
            print(f"  {what:26}", end="")
            measure(given, ours, theirs)


if __name__ == "__main__":
    main()
