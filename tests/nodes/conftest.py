"""The steps that the tests of the compiler trace are for some of these tests too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "appliance"))
