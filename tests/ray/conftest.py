"""Ray clusters for tests, on one host or on several."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))  # for cluster_rig
