"""`python tests/zoo CHECKOUT ...`: trains each model of checkouts of the public Model Zoo for three steps.

Needs a Python that has the Zoo's packages, as `environment.py` makes it. Nothing of a checkout is changed:
configurations are cut down and data is synthetic, and its own scripts run on a cluster that starts with them, and on
the CPU. `docs/zoo_models.toml` has the results. With `--full-size`, each configuration is compiled as it is instead.
"""

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from zoo_compiles import compile_at_full_size, configurations
from zoo_models import models, package, release
from zoo_results import record, row
from zoo_runs import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/zoo", description=__doc__)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="CHECKOUT", help="such as modelzoo-2.0.3")
    parser.add_argument(
        "--full-size", action="store_true", help="compile each configuration as it is, and train nothing"
    )
    parser.add_argument("--only", default="", help="a part of the names of the models, or of the configurations")
    parser.add_argument("--limit", type=float, default=300, help="seconds that a run may take")
    parser.add_argument("--keep", type=Path, help="a folder for configurations, data and logs")
    options = parser.parse_args()
    are_good = True
    with tempfile.TemporaryDirectory(prefix="zoo-") as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        for checkout in options.checkouts:
            if options.full_size:
                are_good &= _compile(checkout.absolute(), folder, options.only, options.limit)
                continue
            found = list(models(checkout.absolute()))
            if not found:
                parser.error(f"{checkout} holds no model: name a checkout, the folder with `src` or `modelzoo`")
            for number, model in enumerate(found):
                if options.only in model.name:
                    place = folder / release(checkout) / str(number)
                    result = run(model, checkout.absolute(), place, options.limit)
                    print(release(checkout), *row(result), sep=" | ", flush=True)
                    record(release(checkout), result)
                    are_good &= not result.reason
    return 0 if are_good else 1


def _compile(checkout: Path, folder: Path, only: str, limit: float) -> bool:
    """Whether all configurations with such a name compile."""
    are_good = True
    for number, path in enumerate(configurations(checkout)):
        name = str(path.relative_to(package(checkout) / "models"))
        if only in name:
            result = compile_at_full_size(path, checkout, folder / release(checkout) / str(number), limit)
            figures = f"{result.seconds:.0f} s | {result.processor:.0f} s of processor | {result.memory / 1e9:.2f} GB"
            print(release(checkout), name, figures, result.reason or "compiled", sep=" | ", flush=True)
            are_good &= not result.reason
    return are_good


if __name__ == "__main__":
    sys.exit(main())
