"""Makes the environment of the public Model Zoo: 3 GB, of the packages that its scripts import. Prints its Python.

python tests/zoo/environment.py FOLDER
"""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
# The Zoo's own requirements are of years ago: these are the packages that its models and their data processors import.
PACKAGES = (
    "accelerate",
    "argcomplete",
    "datasets<4",
    "deepdiff",
    "dill",
    "evaluate",
    "ftfy",
    "jsonlines",
    "jsonschema",
    "keras-preprocessing",
    "lm-eval==0.4.9.1",
    "matplotlib",
    "more-itertools",
    "nltk",
    "pandas<3",
    "pydantic<2.12",
    "sentencepiece",
    "scipy",
    "slack-sdk",
    "tabulate",
    "torchvision==0.28.0",
    "transformers<5",
    "typing-inspection",
    "zstandard",
)

# torchvision is compiled for a torch with CUDA. Without it, it cannot even be imported, though no model of the Zoo uses
# its operators: they get their names.
WITHOUT_OPERATORS = """
if not _has_ops():
    _library = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

# Release 2.10 imports the harness that evaluates generated code, which is in no registry. No model needs it to train:
# its modules get the names that are imported.
BIGCODE_MODULES = {
    "__init__": "",
    "base": "class Task: ...\n",
    "evaluator": "class Evaluator: ...\n",
    "tasks": "ALL_TASKS, TASK_REGISTRY = [], {}\n",
    "utils": "def update_code_gens(): ...\n",
}


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    complete = folder / ".complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", "torch==2.13.0", *PACKAGES], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", "--editable", REPOSITORY], check=True)
        (site,) = folder.glob("lib/*/site-packages")
        with (site / "torchvision/extension.py").open("a") as file:
            file.write(WITHOUT_OPERATORS)
        (site / "bigcode_eval").mkdir(exist_ok=True)
        for name, text in BIGCODE_MODULES.items():
            (site / "bigcode_eval" / f"{name}.py").write_text(text)
        # Release 1.8 uses importlib.util without an import: packages of its time imported it as Python started.
        (site / "importlib_util.pth").write_text("import importlib.util\n")
        complete.touch()
    print(folder / "bin/python")


if __name__ == "__main__":
    main()
