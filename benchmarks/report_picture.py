"""Writes docs/images/report.png, the picture of a report page in README.md, from a run's report.html.

    interclr pretrain --out runs/demo
    python benchmarks/report_picture.py runs/demo/report.html

Needs Chromium and its driver (apt-get install chromium chromium-driver) and the developers' packages.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

OUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "report.png"
BROWSER, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
WIDTH, HEIGHT = 1180, 830  # of each part, as a window shows it
PARTS = ("", "map", "clusters", "neighbours")  # the top of the page, then sections
GAP = 24


def shots(page: Path) -> list[Image.Image]:
    """What a window shows of the page, once for each of the parts."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    with tempfile.TemporaryDirectory() as profile:
        for flag in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        try:
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.get(page.resolve().as_uri())
            driver.execute_script("document.documentElement.style.scrollBehavior = 'auto'")
            taken = []
            for part in PARTS:
                if part:
                    driver.execute_script("document.getElementById(arguments[0]).scrollIntoView()", part)
                driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")  # drawn
                taken.append(Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB"))
            return taken
        finally:
            driver.quit()


def beside(pictures: list[Image.Image]) -> Image.Image:
    """Two by two, at half their size."""
    small = [picture.resize((WIDTH // 2, HEIGHT // 2), Image.Resampling.LANCZOS) for picture in pictures]
    width, height = small[0].size
    whole = Image.new("RGB", (2 * width + GAP, 2 * height + GAP), (208, 208, 204))
    for number, picture in enumerate(small):
        whole.paste(picture, ((number % 2) * (width + GAP), (number // 2) * (height + GAP)))
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/images/report.png from a run's report page.")
    parser.add_argument("page", type=Path, help="a run's report.html")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    beside(shots(given.page)).save(given.out, optimize=True)
    print(f"{given.out}: {given.out.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
