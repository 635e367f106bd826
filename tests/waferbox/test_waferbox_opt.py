"""`waferbox opt`: text in, text out."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from appliance.compiler.pipeline import PASSES, STAGES
from waferbox.cirh.modules.verify import verify
from waferbox.cirh.text.parser import parse_module
from waferbox.commands.cli import app

TEXT = """// A linear layer.
module {
  func @graph(%x: tensor<4x8xf32> {cs.input_name = "input_0"},
              %w: tensor<3x8xf32> {tf.resource_name = "w"}, %b: tensor<3xf32> {tf.resource_name = "b"})
      -> (tensor<3xf32> {cs.output_name = "y"}) {
    %p = cirh.Const dense<[1, 0]> : tensor<2xi64>
    %t = cirh.Transpose %w, %p : (tensor<3x8xf32>, tensor<2xi64>) -> tensor<8x3xf32>
    %m = cirh.MatMul %x, %t : (tensor<4x8xf32>, tensor<8x3xf32>) -> tensor<4x3xf32>
    %d = cirh.BroadcastInDim %b {broadcast_dimensions = dense<1> : tensor<1xi64>} : (tensor<3xf32>) -> tensor<4x3xf32>
    %a = cirh.Add %m, %d : tensor<4x3xf32>
    %y = cirh.Reduce %a {dimensions = dense<0> : tensor<1xi64>, reduce_kind = "ADD"}
      : (tensor<4x3xf32>) -> tensor<3xf32>
    return %y : tensor<3xf32>
  }
}
"""


def opt(*arguments: str, text: str | bytes = TEXT) -> Result:
    return CliRunner().invoke(app, ["opt", *arguments], input=text)


def message(result: Result) -> str:
    """What a refusal says: on one line, and nothing is written to standard output."""
    assert result.exit_code == 1, result.output
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("waferbox: ")
    return line


def test_text_without_passes_is_printed_as_it_stands() -> None:
    result = opt()
    assert result.exit_code == 0
    assert not result.stderr
    verify(parse_module(result.stdout))
    assert result.stdout.count(" = ") == TEXT.count(" = ")
    # No locations are invented in the text of a module without any.
    assert "loc" not in result.stdout
    assert opt(text=result.stdout).stdout == result.stdout


def test_passes_run_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    file, out = tmp_path / "step.mlir", tmp_path / "out.mlir"
    file.write_text(TEXT)
    result = opt(str(file), "--pass", "canonicalise, fuse-bias,dce", "--print-after-all", "-o", str(out))
    assert result.exit_code == 0
    assert not result.stdout
    dumps = result.stderr.split("// -----// IR Dump After ")[1:]
    assert [dump.split()[0] for dump in dumps] == ["canonicalise", "fuse-bias", "dce"]
    modules = [dump.split("//----- //\n")[1] for dump in dumps]
    assert "transpose_b = true" in modules[0]
    assert "aten.addmm" in modules[1]
    assert modules[2].strip() == out.read_text().strip()


def test_locations_stay_where_there_are_any() -> None:
    text = TEXT.replace(": tensor<4x3xf32>\n", ': tensor<4x3xf32> loc("fc.fwd/aten::add"("model.py":9:0))\n')
    result = opt("--pass", "fuse-bias,layers", text=text)
    assert '"fc.fwd/aten::add"("model.py":9:0)' in result.stdout
    assert 'wafer.segment = "0 fc"' in result.stdout


def test_stages_are_shown_as_text_that_can_be_read_again() -> None:
    notes = {
        "shard": [
            '%arg0: tensor<4x8xf32> {cs.input_name = "input_0", wafer.placement = "sharded in dimension 0"}',
            'wafer.placement = "partial (sum), reduced"',
        ],
        "cut": ['wafer.site = "wafers"'],
        "layers": ['wafer.segment = "0 model"'],
    }
    for name, expected in notes.items():
        result = opt("--pass", name, "--num-csx", "2")
        assert result.exit_code == 0, result.stderr
        assert all(note in result.stdout for note in expected), result.stdout
        verify(parse_module(result.stdout))
        again = opt("--pass", name, "--num-csx", "2", text=result.stdout)
        assert again.stdout == result.stdout


def test_kernels_are_those_of_one_wafer() -> None:
    result = opt("--pass", "fuse-bias,kernels", "--num-csx", "2")
    assert "// ----- wafer kernel 1: 'model'" in result.stdout
    assert "tensor<2x8xf32>" in result.stdout
    assert "tensor<4x8xf32>" not in result.stdout


def test_casts_of_mixed_precision_are_inserted_with_the_sharding() -> None:
    plain = opt("--pass", "fuse-bias,shard").stdout
    mixed = opt("--pass", "fuse-bias,shard", "--half", "bfloat16").stdout
    assert ("cirh.Cast" in plain, "bf16" in plain) == (False, False)
    assert re.search(r"cirh\.Cast .*: tensor<4x8xf32> -> tensor<4x8xbf16>", mixed)
    assert re.search(r"aten\.addmm .*-> tensor<4x3xbf16>", mixed)


def test_the_list_says_what_each_does() -> None:
    result = opt("--list")
    assert result.exit_code == 0
    for name in [*(step.name for step in PASSES), *STAGES]:
        assert f"\n{name} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pass", "nonsense"], "there is no pass 'nonsense'; known are verify, random-keys"),
        (["--pass", "shard,cse"], "'cse' cannot follow 'shard'"),
        (["--pass", "dce,shard", "--num-csx", "3"], "<stdin>: shard: a batch of 4 samples cannot be divided evenly"),
        (["--half-gradients"], "without --half there is no half precision for gradients to travel in"),
        (["--half", "float8"], "there is no half precision 'float8'; known are float16, bfloat16, cbfloat16"),
        (["-o", "/nowhere/at/all"], "No such file or directory"),
        (["/dev"], "/dev is no artifact and contains none: name an artifact folder"),
    ],
)
def test_refusals(arguments: list[str], says: str) -> None:
    assert says in message(opt(*arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/nowhere"], "there is no file or folder /nowhere"),
        ([""], "there is no file or folder ''"),
        ([__file__, "--execution", "1"], "is a script: run it"),
    ],
)
def test_arguments_that_name_nothing(arguments: list[str], says: str) -> None:
    result = opt(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "<stdin>: line 1: expected 'module'"),
        ("module {\nfunc @g() {\nnonsense\n", "<stdin>: line 3: "),
        (TEXT.replace("%m, %d : tensor<4x3xf32>", "%m, %d : tensor<4x4xf32>"), "<stdin>: line 10: "),
        # Types that are wrong together: the line is that of the operation.
        (TEXT.replace("dense<0>", "dense<7>"), "<stdin>: <stdin>:11: cirh.Reduce"),
        (b"\xff\xfe\x00", "<stdin>: not a text"),
        ('module { func @g() { "\\1b[31m\x1b[31m', "<stdin>: line 1: "),
        ("module {" * 10000, "<stdin>: line 1: expected 'func'"),
    ],
)
def test_text_that_is_wrong(text: str | bytes, says: str) -> None:
    line = message(opt("--pass", "cse", text=text))
    assert says in line
    assert line.isprintable()


def test_strict_sharding_refuses_what_is_gathered_and_names_the_line_of_the_script() -> None:
    text = TEXT.replace('reduce_kind = "ADD"', 'reduce_kind = "MUL"').replace(
        "-> tensor<3xf32>\n", '-> tensor<3xf32> loc("fc.fwd/aten::prod"("model.py":9:0))\n'
    )
    two = ("--pass", "shard", "--num-csx", "2")
    assert 'wafer.gathered = "cirh.Reduce of kind MUL goes over the samples"' in opt(*two, text=text).stdout
    refusal = message(opt(*two, "--strict-sharding", text=text))
    assert "<stdin>: shard: rows of all wafers are needed" in refusal
    assert "model.py:9 (in fc): cirh.Reduce of kind MUL goes over the samples" in refusal
    assert opt(*two, "--strict-sharding").exit_code == 0


def test_usage_errors_have_a_status_of_their_own() -> None:
    assert opt("--num-csx", "0").exit_code == 2
    assert opt("--half", "float16", "--optimization-level", "3").exit_code == 2
    assert opt("--pas", "cse").exit_code == 2


@pytest.mark.cluster
def test_other_commands_do_not_load_the_compiler() -> None:
    code = (
        "import sys, waferbox.commands.cli;"
        "assert not {'torch', 'appliance.compiler', 'waferbox.cirh'} & sys.modules.keys(), 'loaded'"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.cluster
def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "waferbox", "opt"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.write(TEXT.encode())
    process.stdin.close()
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.wait(60)


def test_text_that_is_too_long_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    from waferbox.commands import opt as module

    monkeypatch.setattr(module, "MAXIMUM_TEXT", 100)
    monkeypatch.setattr("waferbox.cirh.text.scanner.MAXIMUM_TEXT", 100)
    assert "101 characters; at most 100 are read" in message(opt())
