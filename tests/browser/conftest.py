"""A browser without a window, for pages that are opened from the disk."""

import shutil

import pytest

ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1300,1000")


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, which keeps a log of what goes wrong in a page."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (requirements-dev.txt)")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Debian's chromium and chromium-driver (apt-get install)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()
