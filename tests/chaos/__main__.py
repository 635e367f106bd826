"""`python tests/chaos [--trials 200] [--seed 0]`: random faults, and a table of their outcomes."""

import argparse
import os
import secrets
import sys
import tempfile
from datetime import datetime
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / each) for each in ("integration", "shared")), str(HERE.parents[1])]

from chaos_draw import draw
from chaos_table import table
from chaos_trial import EXECUTIONS, ONE_EXECUTION, Outcome, laboratory

WARM_UP = 10  # trials, until the memory of who survives is looked at


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/chaos", description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--script", choices=[ONE_EXECUTION.stem, EXECUTIONS.stem], default="", help="default: both")
    parser.add_argument("--ingress", action="store_true", help="the scripts reach the cluster through an ingress")
    parser.add_argument("--only", type=int, action="append", help="the number of a trial that is wanted; default: all")
    parser.add_argument("--keep", type=Path, help="a folder for the scripts' logs, and for what is left")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    before = {}
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        os.environ["WAFERBOX_SECRET_FILE"] = str(folder / f"{secrets.token_hex(4)}.key")
        try:
            with laboratory(folder / "laboratory", folder / "cache", with_ingress=options.ingress) as laboratory_:
                trials = islice(draw(options.seed, options.script, ingress=options.ingress), options.trials)
                for number, (size, faults) in enumerate(trials, 1):
                    if options.only and number not in options.only:
                        continue
                    outcome = laboratory_.run(size, faults)
                    outcomes.append(outcome)
                    if number == WARM_UP:
                        before = laboratory_.figures()
                    _tell(number, outcome)
                    if options.keep is not None:
                        options.keep.mkdir(parents=True, exist_ok=True)
                        began = datetime.fromtimestamp(outcome.silence_began)
                        words = f"the longest silence began at {began} and lasted {outcome.silence:.1f} s"
                        (options.keep / f"{number}.txt").write_text(f"{outcome.errors}\n\n{outcome.left}\n{words}\n")
                after = laboratory_.figures()
                for process, (role, resident, descriptors) in before.items():
                    if process in after:
                        _, resident_after, descriptors_after = after[process]
                        grown = 100 * (resident_after / resident - 1)
                        print(f"{role}: {descriptors} descriptors, then {descriptors_after}; memory {grown:+.1f} %")
        finally:
            print(table(outcomes))
    return 0 if outcomes and all(outcome.good for outcome in outcomes) else 1


def _tell(number: int, outcome: Outcome) -> None:
    what = "survived" if outcome.survived else "HUNG" if outcome.hung else "DIED"
    what += ", identical" if outcome.identical else ", DIFFERENT"
    what += f", {outcome.silence:.1f} s" + (f", LEFT: {outcome.left}" if outcome.left else "")
    faults = "; ".join(map(str, outcome.faults))
    print(f"{number}. {outcome.size.name}: {faults} ({outcome.injected} injected): {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
