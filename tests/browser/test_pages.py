"""Report and documentation in a real browser: opened from a file, read with mouse and keys, deaf to sampled text."""

import itertools
import json
import shutil
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image

from openppo.datasets.media_files import thumbnail
from openppo.tracking.report.page import write_report
from tests.unit.tracking.report.runs import write_run

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="needs selenium (requirements-dev.txt)"
)
By = pytest.importorskip("selenium.webdriver.common.by").By
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
ui = pytest.importorskip("selenium.webdriver.support.ui")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1300,1000",
)
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\x1b[0m\u202e"
N_STEPS = 30
NUMBERS = {
    **{
        "advantage": (1.5, -0.75),
        "KL": (0.25, -0.5),
        "value": (0.0, 0.0625),
        "reward": (-0.125, 0.5),
    },
    **{
        "return": (2.0, -1.0),
        "log-prob": (-0.25, -2.0),
        "ratio": (1.25, 0.875),
        "entropy": (0.5, 1.0),
    },
}
"""Of the first and the third token of each sample, by what colours them; the second is a tool's."""
ABOVE, BELOW = (214, 92, 20), (38, 108, 214)


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, which keeps a log of what goes wrong in a page."""
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


def make_run(folder, learned, more=(), evaluations=(0, N_STEPS), **options):
    """A run of 30 steps with a reward that rises by ``learned`` a step, and three samples at steps 1 and 30."""
    metrics = [{"step": step, "time": 60.0 * step} for step in range(N_STEPS + 1)]
    for step in range(1, N_STEPS + 1):
        metrics[step] |= {"reward": learned * step, "kl": 0.01 * step, "truncated_fraction": 0.75}
    for step in evaluations:
        metrics[step] |= dict.fromkeys(
            ("eval_reward", "eval_rejected_reward"), 0.5 if step else 0.25
        )
    samples, tokens = [], []
    of_step = enumerate([(0.5, 3, "first"), (2.0, 1, "second"), (-1.0, 2, HOSTILE)])
    for step, (number, (reward, n, prompt)) in itertools.product((1, N_STEPS), of_step):
        where = {"step": step, "time": 0.0, "sample": number}
        texts = {
            "prompt": prompt,
            "response": HOSTILE,
            "label": None,
            "finish_reason": "eos",
            "response_length": n,
        }
        samples.append(
            {**where, **texts, "reward": reward, "rewards": {"style": 0.125}, "kl": -reward}
        )
        lists = {"texts": [HOSTILE, "b", ""], "ids": [11, 12, 13], "trained": [1, 0, 1]}
        lists |= {
            name.lower().replace("-", "_"): [of[0], None, of[1]] for name, of in NUMBERS.items()
        }
        tokens.append(
            {**where, "first": 2, "n_tokens": n, **{name: of[:n] for name, of in lists.items()}}
        )
    config = {"seed": 7, "generate_max_len": 16, **options}
    write_run(
        folder, [row for row in metrics if len(row) > 2] + list(more), samples, tokens, config
    )
    environment = {"python": "3.11", "ranks": [{"host": "h", "device": "CPU"}] * 2}
    (folder / "logs" / "environment.json").write_text(json.dumps(environment))
    return folder


def make_agent_run(folder, metrics):
    """A run with an episode of two turns, between which a tool answers, and one that failed before its first."""
    call = {"function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = [
        {"role": "user", "content": "3 + 4?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": HOSTILE},
        {"role": "assistant", "content": "7"},
    ]
    common = {
        "step": 1,
        "time": 0.0,
        "label": None,
        "finish_reason": "stop",
        "response": "",
        "rewards": {},
    }
    texts = ["<call>", "add", "</call>", "<tool>", HOSTILE, "7", "<end>"]
    trained, spans = [1, 1, 1, 0, 0, 1, 1], [[0, 3], [5, 7]]
    tokens = {
        "step": 1,
        "time": 0.0,
        "sample": 0,
        "first": 4,
        "n_tokens": 7,
        "texts": texts,
        "ids": list(range(7)),
    }
    tokens |= {
        "trained": trained,
        "turns": spans,
        "log_prob": [-0.5 if is_action else None for is_action in trained],
    }
    read = f"<system>Tools: add(a){HOSTILE}<user>3 + 4?"
    tokens |= {
        "prompt_texts": ["<system>", f"Tools: add(a){HOSTILE}", "<user>", "3 + 4?"],
        "prompt_ids": [7, 8, 9, 6],
    }
    played = {
        "sample": 0,
        "prompt": "3 + 4?",
        "reward": 1.0,
        "response_length": 5,
        "messages": messages,
    }
    played["rendered_prompt"] = read
    failed = {
        "sample": 1,
        "prompt": "3 + 4?",
        "reward": 0.0,
        "response_length": 0,
        "messages": messages[:1],
    }
    samples = [
        {**common, **played, "ending": "completed", "turns": 2, "error": "", "output": ""},
        {
            **common,
            **failed,
            "ending": "agent_error",
            "turns": 0,
            "error": "RuntimeError: broken",
            "output": "bye",
        },
    ]
    return write_run(folder, metrics, samples, [tokens], {})


def make_run_with_images(folder):
    """A response to a prompt with two images, and an episode in which a tool shows one, of six tokens."""
    red, blue = (thumbnail(Image.new("RGB", (8, 4), color)) for color in ("red", "blue"))
    seen = {
        "content": [
            {"type": "image_url", "image_url": {"url": "openppo:2"}},
            {"type": "text", "text": "here"},
        ]
    }
    common = {
        "step": 1,
        "time": 0.0,
        "label": None,
        "finish_reason": "stop",
        "response": "",
        "rewards": {},
    }
    first = {
        **common,
        "sample": 0,
        "prompt": "<image><image> which?",
        "reward": 2.0,
        "response_length": 1,
    }
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", **seen},
    ]
    messages.append({"role": "assistant", "content": "b"})
    second = {
        **common,
        "sample": 1,
        "prompt": "look",
        "reward": 1.0,
        "response_length": 2,
        "messages": messages,
    }
    second |= {"ending": "completed", "turns": 2, "error": "", "output": ""}
    tokens = [{"step": 1, "time": 0.0, "sample": n, "first": 4} for n in (0, 1)]
    tokens[0] |= {"n_tokens": 1, "texts": ["a"], "ids": [5], "trained": [1], "log_prob": [-0.5]}
    tokens[0]["images"] = {"openppo:1": red, "openppo:2": blue}
    tokens[1] |= {
        "n_tokens": 9,
        "texts": ["a", *["<image>"] * 6, "here", "b"],
        "ids": [5, *[9] * 6, 7, 6],
    }
    tokens[1] |= {
        "trained": [1, *[0] * 7, 1],
        "log_prob": [-0.5, *[None] * 7, -0.25],
        "turns": [[0, 1], [8, 9]],
    }
    tokens[1]["images"] = {"openppo:2": blue}
    return write_run(folder, [{"step": 1, "time": 0.0, "reward": 1.5}], [first, second], tokens, {})


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of pages: one run, two, three with two targets, one that was evaluated once and has values below 0."""
    folder = tmp_path_factory.mktemp("report")
    slow = make_run(folder / "slow", 0.01, actor_learning_rate=1e-6)
    quick = make_run(folder / "quick", 0.02, actor_learning_rate=1e-5)
    signs = [
        {
            "step": step,
            "time": 60.0 * step,
            "policy_loss": 0.001 * (-1) ** step,
            "values": -1.0 - step,
        }
        for step in range(N_STEPS + 1, 2 * N_STEPS + 1)
    ]
    ends = {"agent/completed": 0.75, "agent/agent_error": 0.25, "agent/timeout": 0.0}
    runs = {
        "agent": [
            make_agent_run(folder / "agent", [{"step": 1, "time": 0.0, "reward": 1.0, **ends}])
        ],
        "images": [make_run_with_images(folder / "images")],
        "one": [slow],
        "two": [slow, quick],
        "targets": [
            make_run(folder / f"target{i}", 0.01, kl_target=kl)
            for i, kl in enumerate((0.1, 0.2, 0.1))
        ],
        "once": [make_run(folder / "once", 0.01, signs, evaluations=[N_STEPS])],
    }
    return {
        name: write_report(some, folder / f"{name}.html").as_uri() for name, some in runs.items()
    }


DRAWN = """return [...document.querySelectorAll("[data-chart] svg")].every(
    (svg) => svg.childElementCount > 0 || svg.clientWidth === 0)"""
"""Charts are drawn once their size is known, in the first frame."""


@pytest.fixture
def page(browser, pages):
    """``page("one")`` opens a page. At the end nothing may have gone wrong in it, or been asked of a network."""

    def open_page(name):
        browser.get(pages[name])
        ui.WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(DRAWN))
        return browser

    yield open_page
    assert browser.get_log("browser") == []
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert loaded == []
    assert browser.title != "owned"
    assert "[object" not in one(browser, "body").text


def all_of(node, selector):
    return node.find_elements(By.CSS_SELECTOR, selector)


def one(node, selector):
    (found,) = all_of(node, selector)
    return found


def tooltip(driver):
    """Lines of what is shown beside the pointer."""
    shown = one(driver, "#tooltip")
    return shown.text.splitlines() if shown.is_displayed() else []


def rewards(driver):
    """Rewards in the list of samples, in its order."""
    return [
        row.text.split("reward ")[1].split()[0]
        for row in all_of(driver, "#sample-list button .line")
    ]


def hover(driver, node):
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", node)
    webdriver.ActionChains(driver).move_to_element(node).perform()


def choose_run(driver, name):
    driver.execute_script("window.scrollTo(0, 0)")
    one(driver, f'.runs button[title*="{name}"]').click()


def test_a_run_is_summed_up_and_its_warnings_are_in_words(page):
    driver = page("one")
    assert "slow" in driver.title
    assert "30 steps" in one(driver, "#status").text
    tiles = {
        tile.text.splitlines()[0]: tile.text.splitlines()[1:] for tile in all_of(driver, ".tile")
    }
    assert tiles["Held-out reward"] == ["0.5", "from 0.25"]
    assert tiles["Reward"] == ["0.29", "from 0.02"]  # means of the first and the last three steps
    (warning,) = all_of(driver, ".warning")
    assert "75% of the responses are cut at --generate_max_len 16 since step 1" in warning.text
    assert "2 \u00d7 h: CPU" in one(driver, "#environment").text
    light = one(driver, "body").value_of_css_property("background-color")
    one(driver, "#theme").click()
    assert one(driver, "body").value_of_css_property("background-color") != light


@pytest.mark.parametrize("width", [390, 1300])
def test_headings_that_are_jumped_to_lie_below_the_bar(page, width):
    driver = page("two")
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": False},
    )
    try:
        for link in all_of(driver, "nav a"):
            link.click()
            heading, bar = (
                driver.execute_script(
                    f"return document.querySelector('{which}').getBoundingClientRect()"
                )
                for which in (link.get_dom_attribute("href") + " h2", "header")
            )
            assert heading["top"] >= bar["bottom"] == bar["height"], link.text
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_curve_goes_through_its_numbers_says_them_and_is_zoomed_by_dragging(page):
    driver = page("one")
    chart = one(driver, '[data-chart="KL from the reference"]')
    path = one(chart, 'path[data-metric="kl"]').get_attribute("d")
    points = [tuple(map(float, part.split())) for part in path.lstrip("M").split("L")]
    assert len(points) == N_STEPS
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    assert max(slopes) - min(slopes) < 0.05, "a straight line"
    assert slopes[0] < 0, "upwards"
    hover(driver, one(chart, "svg"))
    shown = tooltip(driver)
    step = int(shown[0].split()[1])
    assert 13 <= step <= 17
    assert float(shown[-1]) == pytest.approx(0.01 * step)
    driver.execute_script("arguments[0].focus()", one(chart, "svg"))
    for key, said in ((Keys.END, "step 30"), (Keys.ARROW_LEFT, "step 29")):
        one(chart, "svg").send_keys(key)
        assert tooltip(driver)[0].startswith(said)
    assert all(
        cross.get_attribute("visibility") == "visible" for cross in all_of(driver, ".chart .cross")
    )
    picture = one(driver, '[data-chart="Reward"] svg')
    assert "reward from 0.01 to 0.3" in picture.get_attribute("aria-label")
    hover(driver, picture)
    webdriver.ActionChains(driver).click_and_hold().move_by_offset(80, 0).release().perform()
    button = one(driver, "#unzoom")
    assert button.is_displayed()
    assert "0" not in [
        text.text for text in all_of(driver, '[data-chart="KL from the reference"] svg text')
    ]
    button.click()
    assert not button.is_displayed()


def test_a_logarithmic_axis_has_no_place_for_0_and_below(page):
    driver = page("once")
    policy_loss, below = (
        '[data-chart="Policy loss"]',
        '[data-chart="Values and returns"] .head button[aria-pressed]',
    )
    n_lines = []
    for _ in range(2):
        path = one(driver, f'{policy_loss} path[data-metric="policy_loss"]').get_attribute("d")
        n_lines.append(len([part for part in path.split("M") if part]))
        driver.execute_script(
            "arguments[0].click()", one(driver, f"{policy_loss} .head button[aria-pressed]")
        )
    assert n_lines == [1, N_STEPS // 2], "gaps where it is below 0"
    assert not one(driver, below).is_displayed(), "all of its values are below 0"


def test_runs_are_laid_over_each_other_and_their_options_and_samples_compared(page):
    driver = page("two")
    paths = all_of(driver, '[data-chart="Reward"] path[data-metric="reward"]')
    assert [path.get_attribute("data-run") for path in paths] == ["slow", "quick"]
    assert len({path.get_attribute("stroke") for path in paths}) == 2
    rows = [row.text.split() for row in all_of(driver, "#evaluation tr")]
    assert rows[0] == [
        "Metric",
        *"slow step 0 step 30 change best quick step 0 step 30 change best".split(),
    ]
    assert rows[2] == ["eval_reward", *("0.25 0.5 +0.25 0.5".split() * 2)]
    (options,) = (row.text for row in all_of(driver, "#options tbody tr"))
    assert options in (
        "--actor_learning_rate 1e-06 1e-05",
        "--actor_learning_rate 0.000001 0.00001",
    )
    one(driver, "#only-different").click()
    assert len(all_of(driver, "#options tbody tr")) == 3
    one(driver, "#same-prompt").click()
    facts = [node.text for node in all_of(driver, ".sides .facts")]
    assert [fact.split("step ")[1].split()[0] for fact in facts] == ["1", "1", "30", "30"]
    assert [fact.split("run ")[1].split()[0] for fact in facts] == ["slow", "quick"] * 2
    assert len({round(node.rect["y"]) for node in all_of(driver, ".sides > div")}) == 1, (
        "beside, not below each other"
    )
    choose_run(driver, "quick")
    assert len(all_of(driver, '[data-chart="Reward"] path[data-metric="reward"]')) == 1


def test_a_report_works_inside_the_frame_of_a_notebook(browser, pages, tmp_path):
    """The frame as examples/quickstart.ipynb makes it: the page is an attribute, without an address of its own."""
    report = Path(urlsplit(pages["one"]).path).read_text(encoding="utf-8")
    holder = tmp_path / "notebook.html"
    holder.write_text(f'<iframe srcdoc="{escape(report)}" width="1200" height="800"></iframe>')
    browser.get(holder.as_uri())
    browser.switch_to.frame(0)
    ui.WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(DRAWN))
    all_of(browser, "#sample-list button")[1].click()
    chosen = [row.get_attribute("aria-selected") for row in all_of(browser, "#sample-list button")]
    assert chosen.index("true") == 1
    hover(browser, all_of(browser, "#sample-detail .token")[0])
    assert "token 1 of" in tooltip(browser)[0]
    browser.switch_to.default_content()
    assert browser.get_log("browser") == []


def test_each_target_has_its_line(page):
    driver, chart = page("targets"), '[data-chart="KL from the reference"]'
    lines = {line.get_attribute("data-target"): line for line in all_of(driver, f"{chart} .target")}
    assert lines.keys() == {"0.1", "0.2"}
    assert float(lines["0.2"].get_attribute("y1")) < float(lines["0.1"].get_attribute("y1")), (
        "higher up"
    )
    assert len({line.value_of_css_property("stroke") for line in lines.values()}) == 2
    legend = one(driver, f"{chart} .legend").text
    assert "target 0.1" in legend and "target 0.2" in legend
    choose_run(driver, "target1")
    assert [line.get_attribute("data-target") for line in all_of(driver, f"{chart} .target")] == [
        "0.1"
    ]


def test_evaluations_show_change_and_what_is_better_unless_there_is_one(page):
    table = one(page("one"), "#evaluation table")
    assert one(table, "thead").text == "Metric step 0 step 30 change best"
    rows = [all_of(row, "td") for row in all_of(table, "tbody tr")]
    expected = [
        ["eval_rejected_reward", "0.25", "0.5", "+0.25", ""],
        ["eval_reward", "0.25", "0.5", "+0.25", "0.5"],
    ]
    assert [[cell.text for cell in row] for row in rows] == expected
    assert [row[3].get_attribute("class").split() for row in rows] == [
        ["number"],
        ["number", "better"],
    ]
    driver = page("once")
    evaluation = one(driver, "#evaluation")
    assert one(evaluation, "table thead").text == "Metric step 30"
    assert [row.text for row in all_of(evaluation, "tbody tr")] == [
        "eval_rejected_reward 0.5",
        "eval_reward 0.5",
    ]
    assert "--eval_before_training" in one(evaluation, ".note").text
    (tile,) = (
        tile for tile in all_of(driver, ".tile") if "eval_reward" in tile.get_attribute("title")
    )
    assert tile.text.splitlines() == ["Held-out reward", "0.5", "one evaluation"]


def test_every_colouring_shows_its_own_numbers(page):
    driver = page("one")
    choose = ui.Select(one(driver, "#measure"))
    assert [option.text for option in choose.options] == list(NUMBERS)
    scales = set()
    for name, numbers in NUMBERS.items():
        choose.select_by_visible_text(name)
        scales.add(one(driver, "#scale").text)
        middle = 1.0 if name == "ratio" else 0.0
        largest = max(abs(number - middle) for number in numbers)
        nodes = all_of(driver, "#sample-detail .token")
        first, tool, last = (node.value_of_css_property("background-color") for node in nodes)
        assert tool == "rgba(0, 0, 0, 0)"
        for number, shown in zip(numbers, (first, last), strict=True):
            red, green, blue, alpha = map(float, shown.removeprefix("rgba(").rstrip(")").split(","))
            up = number >= middle or name == "log-prob"  # which is never above 0
            assert (red, green, blue) == (ABOVE if up else BELOW), name
            assert alpha == pytest.approx(0.75 * abs(number - middle) / largest, abs=0.01), name
        for node, number in zip(nodes[::2], numbers, strict=True):
            hover(driver, node)
            said = tooltip(driver)
            assert said[said.index(f"▸ {name}") + 1] == f"{number:g}"
    assert len(scales) == len(NUMBERS), "each has a scale of its own"


def test_a_token_says_its_exact_numbers_under_the_pointer_and_to_the_keys(page):
    driver = page("one")
    first, tool, last = all_of(driver, "#sample-detail .token")
    hover(driver, last)
    shown = tooltip(driver)
    assert "part of a character" in shown[0] and "token 3 of 3 · id 13" in shown[0]
    numbers = [text for name, (_, number) in NUMBERS.items() for text in (name, f"{number:g}")]
    assert shown[1:] == ["▸ advantage", *numbers[1:]]
    hover(driver, tool)
    assert "Not trained" in tooltip(driver)[1] and "untrained" in tool.get_attribute("class")
    assert "</script><script>document.title='owned'</script>" in first.text, (
        "sampled text is shown as it is"
    )
    assert "␛[0m⟨U+202E⟩" in first.text
    assert all_of(driver, "#samples img") == []
    box = one(driver, "#sample-detail .response")
    driver.execute_script("arguments[0].focus()", box)
    box.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert "id 11" in tooltip(driver)[0] and "active" in first.get_attribute("class")


def test_samples_are_sorted_filtered_and_walked_with_keys(page):
    driver = page("one")
    one(driver, '#sample-list [aria-selected="true"]').send_keys(Keys.ARROW_DOWN)
    chosen = [row.get_attribute("aria-selected") for row in all_of(driver, "#sample-list button")]
    assert chosen.index("true") == 1
    assert "reward 2" in driver.switch_to.active_element.text
    facts = one(driver, "#sample-detail .facts").text
    assert "reward 2" in facts and "style 0.125" in facts
    assert rewards(driver) == ["0.5", "2", "-1"] * 2
    sort = ui.Select(one(driver, "#sort"))
    sort.select_by_visible_text("reward")
    assert rewards(driver) == ["2", "2", "0.5", "0.5", "-1", "-1"]
    one(driver, "#direction").click()
    for order, expected in (("reward", "-1 0.5 2"), ("length", "2 -1 0.5"), ("KL", "2 0.5 -1")):
        sort.select_by_visible_text(order)
        assert rewards(driver) == [reward for reward in expected.split() for _ in range(2)]
    one(driver, '#samples input[aria-label="from"]').send_keys("0.5")
    assert rewards(driver) == ["2", "2", "0.5", "0.5"]
    one(driver, '#samples input[type="search"]').send_keys("SECOND")
    assert rewards(driver) == ["2", "2"]
    assert one(driver, "#sample-count").text == "2 of 6 samples"


def complaints(browser):
    """What the browser logged, but for the list of other versions, which only a published site has."""
    messages = [entry["message"] for entry in browser.get_log("browser")]
    return [message for message in messages if "versions.json" not in message]


def test_every_page_of_the_site_opens_without_an_error_and_from_the_disk_alone(browser, site):
    pages = sorted(
        file for file in site.rglob("*.html") if file.name != "404.html"
    )  # which only a server shows
    assert len(pages) > 40
    wrong = {}
    for page in pages:
        browser.get(page.as_uri())
        heading = browser.find_element(By.CSS_SELECTOR, "article h1").text
        loaded = browser.execute_script(
            "return performance.getEntriesByType('resource').map((entry) => entry.name)"
        )
        from_elsewhere = [
            name for name in loaded if not name.startswith(("file:", "blob:", "data:"))
        ]
        if found := [*complaints(browser), *from_elsewhere, *([] if heading else ["no heading"])]:
            wrong[str(page.relative_to(site))] = found
    assert wrong == {}


def test_search_finds_a_flag_without_a_server(browser, site):
    browser.get((site / "index.html").as_uri())
    field = browser.find_element(By.CSS_SELECTOR, "input[name=query]")
    browser.execute_script("arguments[0].focus()", field)
    field.send_keys("init_kl_coef")
    results = ".md-search-result__item a"
    ui.WebDriverWait(browser, 30).until(
        lambda driver: driver.find_elements(By.CSS_SELECTOR, results)
    )
    links = [link.get_attribute("href") for link in browser.find_elements(By.CSS_SELECTOR, results)]
    assert any("/flags/" in link or "/algorithms/kl" in link for link in links), links
    assert complaints(browser) == []


def test_an_episode_is_a_conversation_whose_tools_are_not_trained(page):
    driver = page("agent")
    assert [row.text for row in all_of(driver, "#endings tbody tr")] == [
        "completed 75 % 75 %",
        "agent_error 25 % 25 %",
    ]
    one(driver, "#sort").send_keys("reward")
    boxes = [
        (box.get_attribute("class"), box.text.splitlines()[0])
        for box in all_of(driver, ".conversation .turn")
    ]
    assert boxes == [
        ("turn other", "user"),
        ("turn model", "turn 1 of the model \u00b7 3 tokens"),
        ("turn other", "tool \u00b7 not trained"),
        ("turn model", "turn 2 of the model \u00b7 2 tokens"),
    ]
    by_box = [len(all_of(box, ".token")) for box in all_of(driver, ".conversation .turn")]
    untrained = [
        len(all_of(box, ".token.untrained")) for box in all_of(driver, ".conversation .turn")
    ]
    assert (by_box, untrained) == ([0, 3, 2, 2], [0, 0, 2, 0])
    hover(driver, all_of(driver, ".turn.model .token")[0])
    assert tooltip(driver)[0].startswith('"<call>" \u00b7 token 1 of 7')
    all_of(driver, "#sample-list button")[1].click()
    said = one(driver, "#sample-detail").text
    assert (
        "ended by agent_error" in said
        and "error RuntimeError: broken" in said
        and "output bye" in said
    )


def test_what_the_model_read_is_shown_as_text_or_as_tokens(page):
    driver = page("agent")
    one(driver, "#sort").send_keys("reward")
    assert all_of(driver, ".text.prompt") == [], "behind a switch"
    as_text, _ = all_of(driver, "#read button")
    assert "The model read 4 tokens before its first turn" in one(driver, "#read").text
    as_text.click()
    read = one(driver, ".text.prompt")
    assert read.text.startswith("<system>Tools: add(a)</script>") and read.text.endswith(
        "<user>3 + 4?"
    )
    assert all_of(read, ".token") == []
    all_of(driver, "#read button")[1].click()
    tokens = all_of(one(driver, ".text.prompt"), ".token")
    assert [token.get_attribute("title") for token in tokens] == [
        f"token {i + 1} · id {n}" for i, n in enumerate((7, 8, 9, 6))
    ]
    assert tokens[3].text == "3 + 4?"
    all_of(driver, "#read button")[1].click()
    assert all_of(driver, ".text.prompt") == []
    all_of(driver, "#sample-list button")[1].click()
    assert all_of(driver, "#read") == [], "of an episode without turns nothing was read"


def test_a_prompt_is_shown_as_text_unless_its_tokens_are_chosen(page):
    driver = page("one")
    shown = one(driver, ".text.prompt").text
    as_text, as_tokens = all_of(driver, "#read button")
    assert as_text.get_attribute("aria-pressed") == "true" and not as_tokens.is_enabled(), (
        "logs of an older version"
    )
    assert shown in ("first", "second") or "</script>" in shown


def test_images_are_pictures_and_their_tokens_one(page):
    driver = page("images")
    one(driver, "#sort").send_keys("reward")
    sizes = "return [...document.querySelectorAll('.pictures img')].map((img) => [img.naturalWidth, img.naturalHeight])"
    assert driver.execute_script(sizes) == [[8, 4], [8, 4]]
    all_of(driver, "#sample-list button")[1].click()
    boxes = all_of(driver, ".conversation .turn")
    assert [len(all_of(box, "img")) for box in boxes] == [0, 0, 1, 0]
    assert [node.text for node in all_of(boxes[2], ".token") if node.is_displayed()] == [
        "<image> \u00d7 6",
        "here",
    ]
    one(driver, ".response").click()
    for _ in range(3):
        one(driver, ".response").send_keys(Keys.ARROW_RIGHT)
    assert tooltip(driver)[0].startswith('"here" \u00b7 token 8 of 9')
