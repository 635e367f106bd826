"""The page in a browser, from a source that the test writes: Debian's chromium, without a head."""

import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from page_rig import HOSTILE, FakeSource, lease, log, make_job, make_nodes, report, scalar, write_report
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from appliance.page.server import PageServer
from wsc.v1 import management_pb2

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
JOB = "job-1f2e3d4c"
SECONDS = 20.0

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="there is no chromium with its chromedriver here"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    # A sandbox needs rights that a container mostly lacks; all that is loaded here is ours.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    )
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    yield browser
    browser.quit()


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def server(source: FakeSource) -> Iterator[PageServer]:
    server = PageServer("127.0.0.1:0")
    server.start(source)
    yield server
    server.close()


def wait_until(browser: webdriver.Chrome, condition: Callable[[], object]) -> None:
    WebDriverWait(browser, SECONDS).until(lambda _: condition())


def text(browser: webdriver.Chrome, name: str) -> str:
    return " ".join(browser.find_element(By.ID, name).text.split())


def no_complaint(browser: webdriver.Chrome) -> None:
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]  # Selenium has no types of it
    page = "document.documentElement"
    assert browser.execute_script(f"return {page}.scrollWidth <= {page}.clientWidth"), "it scrolls sideways"
    assert browser.execute_script("return window.broken === undefined")


def too_small(browser: webdriver.Chrome) -> list[str]:
    """The controls and links that a finger does not hit. A box is hit by its label, too."""
    return list(
        browser.execute_script("""
            const size = (one) => (one.closest("label") ?? one).getBoundingClientRect();
            const all = [...document.querySelectorAll("a, button, select, input, summary")];
            return all.filter((one) => size(one).width && size(one).height < 32).map((one) => one.outerHTML);
        """)
    )


def narrowest_view(browser: webdriver.Chrome) -> float:
    """The least share of a table's width that its first column, which stays in place, leaves to the others."""
    return float(
        browser.execute_script("""
            const left = (table) => {
                const first = [...table.querySelectorAll("tr:not(.group) > :first-child")];
                const widest = Math.max(...first.map((cell) => cell.getBoundingClientRect().width));
                return 1 - widest / table.clientWidth;
            };
            return Math.min(...[...document.querySelectorAll(".wide")].map(left));
        """)
    )


def drawn_pixels(browser: webdriver.Chrome) -> int:
    """How many pixels of the plot have a curve's colour: they are saturated, those of axes and grid are not."""
    return int(
        browser.execute_script("""
            const canvas = document.querySelector("#curves canvas");
            if (!canvas) return 0;
            const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) {
                const [r, g, b, a] = data.subarray(i, i + 4);
                if (a > 200 && Math.max(r, g, b) - Math.min(r, g, b) > 60) count += 1;
            }
            return count;
        """)
    )


def test_a_job_is_followed_to_its_end(
    browser: webdriver.Chrome, source: FakeSource, server: PageServer, tmp_path: Path
) -> None:
    nodes = lease(make_nodes(), JOB)
    artifact = write_report(
        tmp_path / "artifact", ["embed", HOSTILE, "a_name_that_is_longer_than_a_phone_is_wide." * 3]
    )
    job = make_job(
        JOB,
        management_pb2.JOB_PHASE_RUNNING,
        nodes=nodes,
        artifacts=[artifact],
        labels=[HOSTILE],
        step=40,
        num_steps=400,
    )
    source.job_list = [job]
    source.add_events(JOB, *(scalar(step, math.exp(-step / 50)) for step in range(1, 41)))
    browser.get(f"{server.url}jobs/{JOB}")
    wait_until(browser, lambda: text(browser, "connection") == "live" and drawn_pixels(browser) > 200)
    assert "loss 0.44933 at step 40" in text(browser, "curve-values")

    # What happens shows, without anything being loaded again.
    browser.execute_script("window.kept = true")
    now = time.time()
    source.add_events(
        JOB, scalar(41, 0.25), scalar(41, 0.9, HOSTILE), report("wafer-0", 41, now), log("wafer-0", 10, "quiet")
    )
    source.add_events(
        JOB, log("wafer-0", 30, HOSTILE), log("wafer-1", 40, "no memory\n" + "x" * 400), log("client", 40, "so")
    )
    wait_until(
        browser, lambda: "loss 0.25 at step 41" in text(browser, "curve-values") and "so" in text(browser, "log")
    )
    assert "compute 7 ms 70 %" in text(browser, "split")
    assert HOSTILE in text(browser, "log")
    assert "quiet" not in text(browser, "log")
    Select(browser.find_element(By.ID, "log-level")).select_by_value("error")
    rows = [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#log li") if row.is_displayed()]
    assert [row.startswith("first error") for row in rows] == [True, False]

    # A curve can be put away.
    box = browser.find_elements(By.CSS_SELECTOR, "#curve-names input")[1]
    box.click()
    assert "0.9" not in text(browser, "curve-values")
    no_complaint(browser)
    assert too_small(browser) == []
    assert narrowest_view(browser) > 0.4

    job.phase, job.message, job.ended = management_pb2.JOB_PHASE_FAILED, f"wafer-1 died: {HOSTILE}", time.time()
    wait_until(browser, lambda: text(browser, "connection") == "complete")
    assert text(browser, "phase").startswith(f"failed {HOSTILE} wafer-1 died")
    assert browser.execute_script("return window.kept")
    no_complaint(browser)


def shown_rows(browser: webdriver.Chrome) -> list[str]:
    return [row.text for row in browser.find_elements(By.CSS_SELECTOR, "#log li") if row.is_displayed()]


def test_the_log_is_searched(browser: webdriver.Chrome, source: FakeSource, server: PageServer) -> None:
    source.job_list = [make_job(name, management_pb2.JOB_PHASE_RUNNING) for name in (JOB, "job-2")]
    lines = [(10, "Disk a"), (20, "disk b"), (20, "net"), (30, "DISK & net"), (40, HOSTILE)]
    source.add_events(JOB, *(log("wafer-0", level, line) for level, line in lines))
    browser.get(f"{server.url}jobs/{JOB}#job-2")
    wait_until(browser, lambda: len(shown_rows(browser)) == 4)
    assert text(browser, "log-count") == ""
    search = browser.find_element(By.ID, "log-search")
    search.send_keys("disk")
    assert [row.rpartition("wafer-0 ")[2] for row in shown_rows(browser)] == ["disk b", "DISK & net"]
    assert text(browser, "log-count") == "2 of 5 lines"
    source.add_events(JOB, log("wafer-1", 20, "a disk more"), log("wafer-1", 20, "another thing"))
    wait_until(browser, lambda: text(browser, "log-count") == "3 of 7 lines")  # also what comes later
    Select(browser.find_element(By.ID, "log-level")).select_by_value("warning")
    assert text(browser, "log-count") == "1 of 7 lines"
    assert browser.current_url == f"{server.url}jobs/{JOB}?log=disk&level=warning#job-2"

    browser.refresh()  # the address has what is searched
    wait_until(browser, lambda: text(browser, "log-count") == "1 of 7 lines")
    assert browser.execute_script("return document.getElementById('log').getBoundingClientRect().top < innerHeight")
    browser.find_element(By.CSS_SELECTOR, "#curve-chosen button").click()
    assert browser.current_url == f"{server.url}jobs/{JOB}?log=disk&level=warning"
    search = browser.find_element(By.ID, "log-search")
    search.clear()
    search.send_keys(HOSTILE[:20])
    assert len(shown_rows(browser)) == 1
    no_complaint(browser)
    assert too_small(browser) == []


def test_curves_are_compared(browser: webdriver.Chrome, source: FakeSource, server: PageServer) -> None:
    ended = management_pb2.JOB_PHASE_SUCCEEDED
    source.job_list = [make_job(name, ended, ended=time.time()) for name in (JOB, "job-2", "job-3")]
    for step in range(1, 41):
        values = {"loss": 2.0 - step % 2, "rate": 1e-4, "x": -1.0}
        source.add_events(JOB, *(scalar(step, value, name) for name, value in values.items()))
        source.add_events("job-2", scalar(step, 3.0, "loss"))
    browser.get(f"{server.url}jobs/{JOB}")
    wait_until(browser, lambda: text(browser, "connection") == "complete" and drawn_pixels(browser) > 200)
    assert text(browser, "curve-names") == "Curves loss rate right axis x"  # of far smaller numbers

    Select(browser.find_element(By.ID, "curve-jobs")).select_by_visible_text("job-2")
    wait_until(browser, lambda: "loss, job-2 3 at step 40" in text(browser, "curve-values"))
    assert f"loss, {JOB} 2 at step 40" in text(browser, "curve-values")
    browser.refresh()  # the address has what is compared
    wait_until(browser, lambda: "loss, job-2 3 at step 40" in text(browser, "curve-values"))

    before = drawn_pixels(browser)
    browser.find_element(By.ID, "curve-log").click()
    wait_until(browser, lambda: "right axis" not in text(browser, "curve-names"))
    assert 0 < drawn_pixels(browser) < before  # a negative number has no place
    set_smoothing = "const box = document.getElementById('curve-smoothing'); box.value = arguments[0];"
    browser.execute_script(f"{set_smoothing} box.dispatchEvent(new Event('input'));", 0.9)
    no_complaint(browser)

    browser.find_element(By.CSS_SELECTOR, "#curve-chosen button").click()
    wait_until(browser, lambda: text(browser, "curve-names") == "Curves loss rate x")
    assert browser.current_url == f"{server.url}jobs/{JOB}"
    no_complaint(browser)


def test_the_cluster_is_live_and_comes_back(browser: webdriver.Chrome, source: FakeSource, server: PageServer) -> None:
    source.node_list = make_nodes()
    browser.get(server.url)
    wait_until(browser, lambda: text(browser, "connection") == "live")
    assert "No job runs." in text(browser, "running")
    source.job_list = [
        make_job(JOB, management_pb2.JOB_PHASE_RUNNING, step=7, num_steps=9, labels=["a" * 200 + "=b"]),
        make_job("job-2", management_pb2.JOB_PHASE_QUEUED, queue_position=1, waiting_for=f"2 wafers, held by {JOB}"),
    ]
    wait_until(browser, lambda: "step 7 of 9" in text(browser, "running"))
    assert "job-2 waits for 2 wafers, held by job-1f2e3d4c" in text(browser, "queue")
    no_complaint(browser)
    assert too_small(browser) == []
    assert narrowest_view(browser) > 0.4

    server.close()
    wait_until(browser, lambda: text(browser, "connection") == "connection lost, trying again")
    source.job_list = []
    again = PageServer(server.address)
    again.start(source)
    try:
        wait_until(browser, lambda: "No job runs." in text(browser, "running"))
        assert text(browser, "connection") == "live"
    finally:
        again.close()
    browser.get_log("browser")  # type: ignore[no-untyped-call]  # it has complained of the server that was away
    no_complaint(browser)
