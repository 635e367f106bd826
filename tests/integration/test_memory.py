"""Each role of a cluster has in memory what its plan says: while a model trains, in processes of their own."""

import pytest
from cluster_rig import forking
from role_server import RoleServer

from benchmarks.memory import measure

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

STEPS = 3  # from the second one on all is there that ever will be


# One with large embeddings, and two with large activations; `python -m benchmarks memory` has more.
@pytest.mark.parametrize("model", ["embeddings", "images", "sequence"])
def test_roles_have_what_the_plan_says(model: str, role_server: RoleServer) -> None:
    figures = measure(model, 2, steps=STEPS, start=forking(role_server))
    assert set(figures) == {"memoryx-0", "swarmx-0", "wafer-0", "wafer-1"}
    # All gradients of a step would be more than is allowed for.
    assert all(figure.planned > 0 for figure in figures.values())
    assert not {name: figure for name, figure in figures.items() if not figure.fits}


def test_links_between_hosts_hold_no_more_than_the_plan_says(role_server: RoleServer) -> None:
    figures = measure("deep", 2, "grpc", steps=STEPS, start=forking(role_server))
    assert set(figures) == {"memoryx-0", "swarmx-0", "wafer-0", "wafer-1"}
    # They do hold something, or the bound would mean nothing.
    assert all(figure.link > 0 and figure.measured > figure.planned for figure in figures.values())
    assert not {name: figure for name, figure in figures.items() if not figure.fits_links}
