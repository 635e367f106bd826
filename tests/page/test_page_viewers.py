"""The page and the figures from beyond this machine: for those who show a viewer's token."""

import base64
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from page_rig import FakeSource
from tokens_shown import token

from appliance.page.server import PageServer
from waferbox.rpc.address import split_address
from waferbox.runtime.metrics import MetricsServer, RoleCollector
from waferbox.security.tokens import Kind

SECONDS = 20.0


@pytest.fixture(params=["page", "figures"])
def open_at(request: pytest.FixtureRequest) -> Iterator[str]:
    """The port of a server that others can reach."""
    one: PageServer | MetricsServer
    if request.param == "page":
        one = PageServer("0.0.0.0:0")
        one.start(FakeSource())
    else:
        one = MetricsServer(RoleCollector("wafer", lambda: None), "wafer", "0.0.0.0", 0)
    yield f"http://127.0.0.1:{split_address(one.address)[1]}/"
    one.close()


def status(url: str, authorization: str) -> int:
    request = urllib.request.Request(url, headers={"Authorization": authorization} if authorization else {})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def basic(password: str) -> str:
    return f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"


def test_viewers_may_look_and_nobody_else(open_at: str) -> None:
    viewer = token(Kind.VIEWER)
    for authorization in (f"Bearer {viewer}", basic(viewer), basic(token(Kind.ADMIN))):
        assert status(open_at, authorization) == 200
    for authorization in (
        "",
        "Bearer",
        "Bearer rubbish",
        "Basic rubbish!",
        basic(""),
        basic(viewer[:-1]),
        f"Bearer {token(Kind.USER, 'ada')}",
        f"Bearer {token(Kind.JOB, 'job-1')}",
    ):
        assert status(open_at, authorization) == 401, authorization
