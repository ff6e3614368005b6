"""Tests report.html in Chromium: on a phone and a desktop, light and dark, and printed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from deploy.__main__ import main
from tests.deploy.planted import noisy, plant, sample

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESK, HEIGHT = 390, 1200, 3000
# No window is narrower than 500 pixels, but a frame may be. Each frame reports the width of its page.
FRAMES = f"""<!doctype html><body style="margin: 0">
<script>const seen = {{}}; onmessage = event => {{
  seen[event.data[0]] = event.data; document.documentElement.dataset.seen = Object.values(seen).join(" ")
}}</script>
<iframe src="page.html" style="border: 0; float: left; width: {PHONE}px; height: {HEIGHT}px"></iframe>
<iframe src="page.html" style="border: 0; float: left; width: {DESK}px; height: {HEIGHT}px"></iframe>
"""
TELL = """<script>parent.postMessage([innerWidth, document.documentElement.scrollWidth,
matchMedia("(prefers-color-scheme: dark)").matches], "*")</script>"""

# `.ci/run` sets the variable where Chromium is installed: there these tests must run.
pytestmark = pytest.mark.skipif(
    not CHROMIUM and "TRAINER_TEST_CHROMIUM" not in os.environ,
    reason="Chromium is not installed here (Debian: chromium)",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the report of three tiers, and a page that shows it in two widths."""
    folder = tmp_path_factory.mktemp("pages")
    for count, seconds in ((1, 0.1), (2, 0.06), (4, 0.05)):
        devices = [f"GPU:{index}" for index in range(count)]
        sample(plant(folder / "runs" / f"l4x{count}", noisy(seconds), devices=devices, epochs=True))
    prices = [f"--price_per_hour=l4x{count}={count * 0.7}" for count in (1, 2, 4)]
    assert main(["report", str(folder / "runs"), f"--out={folder}", *prices]) == 0
    (folder / "page.html").write_text((folder / "report.html").read_text() + TELL)
    (folder / "frames.html").write_text(FRAMES)
    return folder


def chromium(folder: Path, page: str, *arguments: str) -> str:
    """Opens a page of the folder with a fresh profile, and returns what Chromium prints."""
    own = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
           "--no-first-run", "--disable-background-networking", f"--user-data-dir={folder / 'profile'}",
           f"--window-size={PHONE + DESK},{HEIGHT}"]  # fmt: skip
    command = [str(CHROMIUM), *own, *arguments, f"file://{folder / page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def colours(folder: Path, dark: bool) -> set[tuple[int, ...]]:
    """Returns the colours that the figures must have."""
    text = (folder / "report.html").read_text()
    light, _, rest = text.partition("@media screen and (prefers-color-scheme: dark)")
    values = dict(re.findall(r"(--c\d\d): *#([0-9a-f]{6})", light))
    if dark:
        values |= dict(re.findall(r"(--c\d\d): *#([0-9a-f]{6})", rest[: rest.index("</style>")]))
    filled = set(re.findall(r"fill: var\((--c\d\d)\)", text))
    return {tuple(bytes.fromhex(values[name])) for name in filled}


@pytest.mark.parametrize("dark", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_phone_and_desk_in_light_and_dark(page: Path, dark: bool) -> None:
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    seen = re.search(r'data-seen="([^"]*)"', chromium(page, "frames.html", "--dump-dom", *scheme))
    assert seen
    expected = str(dark).lower()
    assert seen[1] == f"{PHONE},{PHONE},{expected} {DESK},{DESK},{expected}"  # the page is not wider than the frame
    chromium(page, "frames.html", f"--screenshot={page / 'shot.png'}", *scheme)
    with Image.open(page / "shot.png") as image:
        shot = image.convert("RGB")
    for left, right in ((0, PHONE), (PHONE, PHONE + DESK)):
        view = shot.crop((left, 0, right, HEIGHT))
        corner = view.getpixel((3, 3))
        assert isinstance(corner, tuple)
        assert (max(corner) < 60) if dark else (min(corner) > 240)
        painted = {colour for _, colour in view.getcolors(1_000_000)}
        wanted = colours(page, dark)
        assert len(wanted) >= 4
        assert wanted <= painted


def test_on_paper(page: Path) -> None:
    chromium(page, "report.html", "--no-pdf-header-footer", f"--print-to-pdf={page / 'report.pdf'}")
    content = (page / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert 1 < len(re.findall(rb"/Type ?/Page\b", content)) < 10
