"""Puts the helpers of the appliance's tests on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "appliance"))
