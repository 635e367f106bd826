"""`python tests/fuzz [--messages 100000] [--seed 0]`: malformed messages while a job trains."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / each) for each in ("integration", "shared")), str(HERE.parents[1])]

from fuzz_attack import attack


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        os.environ["WAFERBOX_SECRET_FILE"] = str(Path(name) / "cluster.key")
        result = attack(Path(name), options.messages, options.seed)
    print(f"{result.sent} messages: {dict(result.answers.most_common())}")
    print(f"died: {', '.join(result.died) or 'nobody'}; the job {'ended well' if result.survived else 'DIED'}")
    print(
        f"results: {'equal' if result.identical else 'DIFFERENT'}; {result.grown} grew by {result.growth / 1e6:.1f} MB"
    )
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())
