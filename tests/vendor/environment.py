"""Makes the environment of the vendor's client: 6 GB, of the packages that its users install. Prints its Python.

python tests/vendor/environment.py FOLDER
"""

import os
import subprocess
import sys
from pathlib import Path

PACKAGES = ("cerebras_pytorch==2.10.0", "cerebras_appliance==2.10.0", "psutil==7.1.3")
PYTHON = "python3.11"  # the only one that the packages are for


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    complete = folder / ".complete"
    if not complete.exists():
        subprocess.run([PYTHON, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", "uv"], check=True)
        variables = {**os.environ, "VIRTUAL_ENV": str(folder)}
        subprocess.run([folder / "bin/uv", "pip", "install", "--quiet", *PACKAGES], check=True, env=variables)
        complete.touch()
    print(folder / "bin/python")


if __name__ == "__main__":
    main()
