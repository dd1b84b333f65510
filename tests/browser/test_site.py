"""The documentation in a real browser, opened from the disk: nothing goes wrong in a page, and search finds a flag."""

import pytest

pytest.importorskip("material", reason="needs mkdocs-material (requirements-dev.txt)")
By = pytest.importorskip("selenium.webdriver.common.by", reason="needs selenium (requirements-dev.txt)").By
Wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait


def complaints(browser):
    """What the browser logged, but for the list of other versions, which only a published site has."""
    messages = [entry["message"] for entry in browser.get_log("browser")]
    return [message for message in messages if "versions.json" not in message]


def test_every_page_opens_without_an_error_and_from_the_disk_alone(browser, site):
    pages = sorted(file for file in site.rglob("*.html") if file.name != "404.html")  # which only a server shows
    assert len(pages) > 40
    wrong = {}
    for page in pages:
        browser.get(page.as_uri())
        heading = browser.find_element(By.CSS_SELECTOR, "article h1").text
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        from_elsewhere = [name for name in loaded if not name.startswith(("file:", "blob:", "data:"))]
        if found := [*complaints(browser), *from_elsewhere, *([] if heading else ["no heading"])]:
            wrong[str(page.relative_to(site))] = found
    assert wrong == {}


def test_search_finds_a_flag_without_a_server(browser, site):
    browser.get((site / "index.html").as_uri())
    field = browser.find_element(By.CSS_SELECTOR, "input[name=query]")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys("init_kl_coef")
    results = ".md-search-result__item a"
    Wait(browser, 30).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, results))
    links = [link.get_attribute("href") for link in browser.find_elements(By.CSS_SELECTOR, results)]
    assert any("/flags/" in link or "/algorithms/kl" in link for link in links), links
    assert complaints(browser) == []
