"""Every attribute that public scripts read, set or call on an object of the API is there."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cerebras_pytorch
import cerebras_pytorch.experimental as release_1
import cstorch
from cerebras_pytorch.experimental.compiling import NamedBackend
from cerebras_torch.core import cb_model
from cstorch.distributed import ClusterConfig
from cstorch.utils import CSConfig

DOCS = Path(__file__).parents[2] / "docs"
USES: dict[str, dict[str, list[str]]] = tomllib.loads((DOCS / "public_attributes.toml").read_text())

_INSIDE = "is asked for where a script drives an ApplianceMode, which cannot be made"
ABSENT = {
    ("backend", "appliance.compile_resp"): "scripts look first whether there is an appliance",
    ("backend", "appliance.compile_resp.perf_info.algo_flops"): "as before",
    ("backend", "appliance.compile_resp.perf_info.supported_flops"): "as before",
    ("state", "get_activation_for_output()"): _INSIDE,
    ("state", "outputs"): _INSIDE,
    ("state", "register_activation_callback()"): _INSIDE,
    ("state", "register_metric()"): "of release 1.6, whose metrics are classes of the scripts",
    ("state", "set_num_csx()"): _INSIDE,
}


class Writer:
    def add_scalar(self, name: str, value: float, step: int) -> None:
        pass


def batches(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
    return [torch.zeros(4, 2)] * 3


def executor() -> Any:
    made = cstorch.utils.data.DataExecutor(cstorch.utils.data.DataLoader(batches), writer=Writer())
    for _ in made:
        pass
    return made


# Objects of a kind: an attribute may be of one generation alone.
OBJECTS: dict[str, Callable[[], list[Any]]] = {
    "backend": lambda: [cstorch.backend(), NamedBackend("WSE_WS")],
    "cluster_config": lambda: [ClusterConfig()],
    "cs_config": lambda: [CSConfig()],
    "dataloader": lambda: [release_1.utils.data.DataLoader(batches)],
    "environment": lambda: [cerebras_pytorch.env()],
    "executor": lambda: [executor()],
    "grad_scaler": lambda: [cstorch.amp.GradScaler(loss_scale="dynamic")],
    "resolver": lambda: [cb_model.service_resolver()],
    "state": lambda: [cerebras_pytorch.state()],
}


def check(holder: Any, use: str) -> None:
    """Raises AttributeError or TypeError if the object does not have what a use needs."""
    *path, last = use.rstrip("=()").split(".")
    for name in path:
        holder = getattr(holder, name)
    value = getattr(holder, last)
    if use.endswith("()") and not callable(value):
        raise TypeError(f"{use}: it is {value!r}")
    if use.endswith("="):
        setattr(holder, last, value)


def fits(holders: list[Any], use: str) -> bool:
    for holder in holders:
        try:
            check(holder, use)
        except (AttributeError, TypeError):
            continue
        return True
    return False


@pytest.mark.parametrize("kind", USES)
def test_attributes_of_a_kind(kind: str, tmp_path: Path) -> None:
    if kind == "backend":
        cstorch.backend("CSX", artifact_dir=tmp_path, validate_only=True, cluster_config=ClusterConfig(num_csx=2))
    else:
        cstorch.backend("CPU", artifact_dir=tmp_path)
    holders = OBJECTS[kind]()
    missing = {use for use in USES[kind] if not fits(holders, use)}
    assert missing == {use for listed, use in ABSENT if listed == kind}


def test_the_backend_of_the_cpu_has_what_is_not_of_a_cluster(tmp_path: Path) -> None:
    backend = cstorch.backend("CPU", artifact_dir=tmp_path)
    of_any = {use for use in USES["backend"] if not use.startswith("cluster")} - {use for _, use in ABSENT}
    assert {use for use in of_any if not fits([backend, NamedBackend("CPU")], use)} == set()
