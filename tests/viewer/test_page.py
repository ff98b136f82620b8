"""Pages as text: nothing of an agent gets out of its place; colours can be told apart and read."""

import base64
import hashlib
import re
from dataclasses import replace
from importlib.resources import files

import pytest

from gyre_core.viewer.model import rollout_model
from gyre_core.viewer.page import rollout_page, run_page
from tests.support.hostile_rollout import PAYLOADS, hostile_rollout
from tests.support.viewed import viewed_rollout

STYLE = (files("gyre_core.viewer") / "assets" / "style.css").read_text(encoding="utf-8")


def hostile_page() -> str:
    viewed = hostile_rollout()
    return rollout_page(rollout_model(viewed.rollout, viewed.branches, viewed.vocabulary)).decode()


def test_page_of_hostile_texts_has_its_own_elements_only() -> None:
    page = hostile_page()
    assert len(re.findall(r"<script", page)) == 2 and len(re.findall(r"</script", page)) == 2
    assert page.count("<style") == page.count("</style") == 1
    assert "pwned" not in page  # what is not compressed is escaped: see the title
    assert "<title>&lt;b&gt;r1&lt;/b&gt; · Gyre</title>" in page


def test_page_policy_allows_the_one_script_and_the_one_style_and_nothing_else() -> None:
    page = hostile_page()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for name, text in (("script-src", script), ("style-src", style)):
        assert rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
    assert page.index("Content-Security-Policy") < page.index("<title>")


def test_page_loads_nothing_and_parses_no_text_as_html() -> None:
    page = hostile_page().replace("http://www.w3.org/2000/svg", "")  # the name of a namespace
    assert not re.search(r"https?://|src=|url\(|@import|<link", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", page)


def test_page_is_the_same_bytes_for_the_same_rollout() -> None:
    assert hostile_page() == hostile_page()


def test_page_title_keeps_braces_and_loses_marks_that_turn_text() -> None:
    viewed = viewed_rollout(num_calls=2, num_tokens=400)
    spec = replace(viewed.rollout.spec, rollout_id="{{payload}}\u202etxt")
    page = rollout_page(rollout_model(replace(viewed.rollout, spec=spec), [], viewed.vocabulary)).decode()
    assert "<title>{{payload}}�txt · Gyre</title>" in page


def test_run_page_of_an_empty_run_says_so() -> None:
    page = run_page({"run": "r1", "steps": [], "evaluations": [], "groups": []}).decode()
    assert "r1: 0 steps, 0 groups, 0 rollouts" in page


def test_payloads_cover_markup_direction_and_control_characters() -> None:
    text = "".join(PAYLOADS)
    assert "</script>" in text and "\u202e" in text and "\x00" in text and "\x1b" in text


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))


def themes() -> dict[str, dict[str, str]]:
    light, media, chosen = (part.partition("}")[0] for part in STYLE.split("\n  color-scheme: ")[1:4])
    assert colours(media) == colours(chosen)
    return {"light": colours(light), "dark": colours(media)}


def contrast(one: str, other: str) -> float:
    """Of two colours, by the formula of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_of_roles_have_a_contrast_of_three_and_texts_of_four_and_a_half(theme: str) -> None:
    values = themes()[theme]
    for name in ("r0", "r1", "r2", "r3", "r4", "trained", "focus"):
        assert contrast(values[name], values["card"]) >= 3, name
    for name in ("ink", "soft", "warn", "full", "part", "zero"):
        for ground in ("card", "page", "sampled-wash", "hover"):
            assert contrast(values[name], values[ground]) >= 4.5, (name, ground)
    assert contrast(values["ink"], values["trained-wash"]) >= 4.5
    assert contrast(values["ink"], values["found"]) >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_of_roles_are_told_apart_without_red_or_green_cones(theme: str) -> None:
    """Projections of Viénot, Brettel and Mollon (1999); distance in linear light, the nearest pair of roles."""
    values = themes()[theme]
    for matrix in (
        ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),  # no red cones
        ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),  # no green cones
    ):
        seen = []
        for name in ("r0", "r1", "r2", "r3", "r4"):
            parts = [(int(values[name][place : place + 2], 16) / 255) ** 2.2 for place in (1, 3, 5)]
            seen.append([sum(weight * part for weight, part in zip(row, parts, strict=True)) for row in matrix])
        for first in range(len(seen)):
            for second in range(first):
                distance = sum((a - b) ** 2 for a, b in zip(seen[first], seen[second], strict=True)) ** 0.5
                assert distance > 0.1, (first, second, distance)
