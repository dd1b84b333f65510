"""Texts of the report against what lies behind them, in light and dark: WCAG 2.2 asks for a contrast of 4.5."""

import itertools
import re
from pathlib import Path

import pytest

from openppo.tracking.report import page

ENOUGH = 4.5
FOLDER = Path(page.__file__).with_name("page")
STYLE = (FOLDER / "style.css").read_text(encoding="utf-8")
TOKENS = (FOLDER / "tokens.js").read_text(encoding="utf-8")
BEHIND = ("--card", "--page", "--warn-page")


def palette_of(selector):
    block = STYLE.split(f"{selector} {{", 1)[1].split("}", 1)[0]
    return dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6}|rgba\([^)]*\));", block))


LIGHT = palette_of(":root")
DARK = {
    "pressed": palette_of(':root[data-theme="dark"]'),
    "system": palette_of(':root:not([data-theme="light"])'),
}


def rgb(text):
    return [int(text[i : i + 2], 16) for i in (1, 3, 5)]


def over(front, alpha, back):
    return [alpha * f + (1 - alpha) * b for f, b in zip(front, back, strict=True)]


def luminance(color):
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    parts = [c / 255 for c in color]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_the_ratio_is_that_of_the_standard():
    assert contrast([0, 0, 0], [255, 255, 255]) == pytest.approx(21)
    assert contrast(rgb("#777777"), rgb("#ffffff")) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("palette", [LIGHT, *DARK.values()], ids=["light", *DARK])
def test_every_colour_of_text_has_enough_contrast(palette):
    texts = sorted(set(re.findall(r"[ {]color: var\((--[\w-]+)\)", STYLE)))
    assert {"--c1", "--c2", "--ink", "--soft", "--warn", "--accent"} == set(texts)
    backgrounds = {name: rgb(palette[name]) for name in BEHIND}
    *shade, alpha = map(float, re.findall(r"[\d.]+", palette["--shade"]))
    backgrounds["--shade"] = over(shade, alpha, rgb(palette["--card"]))
    ratios = {
        (text, name): round(contrast(rgb(palette[text]), behind), 2)
        for text, (name, behind) in itertools.product(texts, backgrounds.items())
    }
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < ENOUGH} == {}


@pytest.mark.parametrize("palette", [LIGHT, *DARK.values()], ids=["light", *DARK])
def test_tokens_are_readable_on_the_strongest_colour(palette):
    alpha = float(re.search(r"\(([\d.]+) \* part\)", TOKENS)[1])
    tints = re.search(r"UP = \[(.*?)\], DOWN = \[(.*?)\];", TOKENS).groups()
    strongest = [over(map(int, tint.split(",")), alpha, rgb(palette["--card"])) for tint in tints]
    assert min(contrast(rgb(palette["--ink"]), tint) for tint in strongest) >= ENOUGH


def test_no_text_is_made_faint_by_opacity_or_a_colour_of_its_own():
    rules = dict(re.findall(r"^([^{}@]+?) \{([^}]*)\}", STYLE, re.MULTILINE))
    faint = {selector.strip() for selector, rule in rules.items() if "opacity" in rule}
    assert faint == {
        ".chart path.raw",
        ".chart .brush",
        '.runs button[aria-pressed="false"] .swatch',
    }
    assert ".token .mark" not in rules, (
        "it has the colour of its token, as it lies on the same background"
    )
