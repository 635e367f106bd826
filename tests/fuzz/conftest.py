"""The rigs of the integration tests are those of these."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
