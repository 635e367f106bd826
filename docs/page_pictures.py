"""Takes the pictures of the page anew, docs/images/page.png and job.webp. `python docs/page_pictures.py`.

They show a job of the README's script, with more steps, in Debian's chromium (packages chromium and chromium-driver).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Final

from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT: Final = Path(__file__).parents[1]
IMAGES: Final = ROOT / "docs" / "images"
STEPS: Final = 2400
STILL_STEP: Final = 1600  # after which page.png is taken
STILL: Final = (1160, 1000)  # width and height of page.png
MOVING: Final = (880, 1040)  # of job.webp
FRAME_SECONDS: Final = 0.5
LAST_FRAME_SECONDS: Final = 3.0
START_SECONDS: Final = 60.0


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="digits-") as folder,
        _running_job(Path(folder)) as page,
        _browser() as browser,
    ):
        browser.get(page)
        WebDriverWait(browser, START_SECONDS).until(
            lambda browser: browser.find_elements(By.CSS_SELECTOR, "a[href^='/jobs/']")
        )[0].click()
        frames = list(_frames(browser))
    # The end comes first: where nothing moves, the first frame is the picture.
    first, *others = [frames[-1], *frames]
    milliseconds = [round(1000 * seconds) for seconds in (LAST_FRAME_SECONDS, *(FRAME_SECONDS for _ in frames))]
    moving = {"save_all": True, "append_images": others, "duration": milliseconds, "loop": 0}
    first.save(IMAGES / "job.webp", quality=60, method=6, **moving)


def _frames(browser: webdriver.Chrome) -> Iterator[Image.Image]:
    """Yields pictures of the job's page from its first step to its end, and writes the still one on the way."""
    step, is_written = 0, False
    while step < STEPS:
        text = browser.find_element(By.TAG_NAME, "body").text
        if (found := re.search(r"step ([\d,]+) of ", text)) is None:
            time.sleep(0.1)
            continue
        step = int(found[1].replace(",", ""))
        _show(browser, MOVING)
        yield Image.open(BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        if not is_written and step > STILL_STEP:
            is_written = True
            _show(browser, STILL)
            (IMAGES / "page.png").write_bytes(browser.get_screenshot_as_png())
        time.sleep(FRAME_SECONDS)


def _show(browser: webdriver.Chrome, size: tuple[int, int]) -> None:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@contextmanager
def _running_job(folder: Path) -> Iterator[str]:
    """The URL of the page of a cluster on which the script trains; the cluster stays up until it is ended."""
    (difference,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = "\n".join(line[1:] for line in difference.splitlines() if line[0] in " +")
    (folder / "train.py").write_text(script.replace("DataExecutor(loader)", f"DataExecutor(loader, num_steps={STEPS})"))
    variables = {**os.environ, "WAFERBOX_CACHE": f"{folder}/cache", "XDG_RUNTIME_DIR": str(folder), "USER": "ada"}
    variables.pop("WAFERBOX_MANAGEMENT", None)
    command = [sys.executable, "-m", "waferbox"]
    up = [*command, "up", "--wafers", "2", "--memoryx", "2", "--page", "--background"]
    started = subprocess.run(up, env=variables, check=True, stdout=subprocess.PIPE, text=True, timeout=START_SECONDS)
    try:
        (page,) = re.findall(r"To look at it: +(\S+)", started.stdout)
        with subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, env=variables, stdout=subprocess.DEVNULL
        ) as job:
            yield page
            job.terminate()
    finally:
        subprocess.run([*command, "down"], env=variables, check=True, timeout=START_SECONDS)


@contextmanager
def _browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    # A sandbox needs rights that a container mostly lacks; all that is loaded here is ours.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


if __name__ == "__main__":
    main()
