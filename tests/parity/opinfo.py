"""Tries every operator of torch's own table, and writes docs/operators.md. `make opinfo`.

    python tests/parity/opinfo.py [--operators REGEX] [--samples 2] [--page docs/operators.md]

Exit status 1 on wrong numbers, crashes, and refusals that do not say of what and where.
"""

import argparse
import collections
import json
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/parity", "tests/appliance", "tests/shared", "")]

import torch  # noqa: E402
from operator_case import WAFERS, results_of, variants_of  # noqa: E402
from operator_samples import name_of, operators, samples, tensors_of  # noqa: E402

_FAILURES = ("wrong", "crash", "vague")
_WORKS = ("exact", "rounded", "random")
_TYPE = torch.float32
_HEAD = """# Operators

The operators of torch's own table, `op_db`, on wafers: each runs with a few of the table's samples in float32 and is
compared with eager torch, with tensors of a sample as the batch, as weights, and in place. Made by `make opinfo`.
No sample gives other numbers than torch's.
"""
_WHOLE = """All samples of these give torch's numbers, on one wafer and on two, and so do all gradients that they have:
"""
_OTHERS = """`yes`: all samples give torch's numbers. `some`: some do, and the others are refused. `no`: none does.
A dash: there is nothing to run, such as a gradient.
"""


def records(operator: Any, count: int) -> Iterator[dict[str, Any]]:
    """What becomes of each sample, variant and direction of an operator."""
    for number, (place, sample) in enumerate(samples(operator, _TYPE, count)):
        differentiable = operator.supports_autograd and any(t.is_floating_point() for t in tensors_of(sample))
        for variant in variants_of(operator, sample, first=number == 0):
            for backward in (False, True) if differentiable else (False,):
                results = results_of(operator, sample, variant, backward=backward)
                for wafers, (verdict, detail) in results.items():
                    yield {
                        "operator": name_of(operator),
                        "sample": place,
                        "variant": variant,
                        "backward": backward,
                        "wafers": wafers,
                        "verdict": verdict,
                        "detail": detail,
                    }


def try_all(pattern: str, count: int) -> list[dict[str, Any]]:
    """In a child, which is started anew behind an operator that it dies of."""
    made: list[dict[str, Any]] = []
    start = 0
    while True:
        command = [sys.executable, __file__, "--operators", pattern, "--samples", str(count), "--from", str(start)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        current = ""
        for line in child.stdout:
            record = json.loads(line)
            if "begin" in record:
                start, current = record["begin"] + 1, record["operator"]
                print(current, file=sys.stderr)
            else:
                made.append(record)
        if child.wait() == 0:
            return made
        detail = f"the process ended with {child.returncode}"
        made += [_death(current, wafers, detail) for wafers in WAFERS]


def _death(operator: str, wafers: int, detail: str) -> dict[str, Any]:
    return {
        "operator": operator,
        "sample": -1,
        "variant": "",
        "backward": False,
        "wafers": wafers,
        "verdict": "crash",
        "detail": detail,
    }


def rows_of(made: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the table: operator, forward, backward, two wafers, the first refusal."""
    by_operator: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for record in made:
        if record["verdict"] != "skipped":
            by_operator[record["operator"]].append(record)
    return [_row(name, by_operator[name]) for name in sorted(by_operator, key=str.lower)]


def page(rows: list[tuple[str, ...]]) -> str:
    """The page: the operators that work in all samples, and a table of the others."""
    heads = ("operator", "forward", "backward", "two wafers", "refused")
    counts = [sum(row[column] in ("yes", "some") for row in rows) for column in (1, 2, 3)]
    tried = [sum(row[column] != "–" for row in rows) for column in (1, 2, 3)]
    summary = ", ".join(f"{h} {c} of {t}" for h, c, t in zip(heads[1:], counts, tried, strict=False))
    whole = [row[0] for row in rows if set(row[1:4]) <= {"yes", "–"}]
    listed = textwrap.fill(", ".join(whole), 120, break_long_words=False, break_on_hyphens=False)
    others = [f"| {' | '.join(row)} |" for row in rows if row[0] not in whole]
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *others]
    parts = [_HEAD, f"They work, at least in part: {summary}.\n", _WHOLE, f"{listed}\n", _OTHERS, *table]
    return "\n".join(parts) + "\n"


def _row(name: str, found: list[dict[str, Any]]) -> tuple[str, ...]:
    one = [record for record in found if record["wafers"] == 1]
    forward = _summary([record for record in one if not record["backward"]])
    backward = _summary([record for record in one if record["backward"]])
    two = _summary([record for record in found if record["wafers"] == 2])
    refusals = [record["detail"] for record in found if record["verdict"] not in _WORKS]
    return f"`{name}`", forward, backward, two, _reason(refusals[0]) if refusals else ""


def _summary(found: list[dict[str, Any]]) -> str:
    if not found:
        return "–"
    works = [record["verdict"] in _WORKS for record in found]
    return "yes" if all(works) else "some" if any(works) else "no"


def _reason(detail: str) -> str:
    """The refusal without its type, its place and its way out."""
    text = re.sub(r"^\w+: ", "", detail)
    text = re.sub(r"(At |at )?\S*operator_\w+\.py:\d+( \(backward\))?:? ?", "", text)
    text = re.sub(r"the Cerebras backend does not (yet )?support", "no", text, flags=re.IGNORECASE)
    text = re.split(r"\(Tensor|\(Scalar| \(aten\.|[.;] ", text)[0].replace("|", "/")[:110].rstrip(" .,(")
    return f"{text}`" if text.count("`") % 2 else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", default="")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--from", type=int, dest="start")
    given = parser.parse_args()
    if given.start is not None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        chosen = [operator for operator in operators(_TYPE) if re.search(given.operators, name_of(operator))]
        for number in range(given.start, len(chosen)):
            print(json.dumps({"begin": number, "operator": name_of(chosen[number])}), flush=True)
            for record in records(chosen[number], given.samples):
                print(json.dumps(record), flush=True)
        return
    made = try_all(given.operators, given.samples)
    if given.page is not None:
        given.page.write_text(page(rows_of(made)))
    print(dict(collections.Counter(record["verdict"] for record in made)))
    failures = [record for record in made if record["verdict"] in _FAILURES]
    for record in failures:
        print(record)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
