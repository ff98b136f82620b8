"""The pages in a real browser: rows are shown, keys and links work, nothing goes wrong, no foreign script runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_core.store import Store
from gyre_core.store.tables import locate_branch
from gyre_core.viewer.model import rollout_model
from gyre_core.viewer.page import rollout_page, run_page
from gyre_core.viewer.stored import page_name, stored_run_model
from tests.support.chromium import Page, chromium_page
from tests.support.hostile_rollout import PAYLOADS, hostile_rollout
from tests.support.rollouts import branch_of, finished, two_turns
from tests.support.viewed import Viewed, viewed_rollout

pytestmark = pytest.mark.integration

SHOWN = "[...document.querySelectorAll('.row.node')].filter((row) => !row.hidden).length"
FOCUS = "document.activeElement.id"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with chromium_page(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The browser's page; a test that leaves an error, or asked for anything but its own file, fails."""
    browser.problems.clear()
    browser.requests.clear()
    browser.stopped.clear()
    browser.look()
    yield browser
    assert browser.problems == []
    assert [url for url in browser.requests.values() if not url.startswith("file://") and url != "about:blank"] == []


def write(folder: Path, viewed: Viewed) -> Path:
    path = folder / "rollout.html"
    path.write_bytes(rollout_page(rollout_model(viewed.rollout, viewed.branches, viewed.vocabulary, run_id="run")))
    return path


def test_page_shows_a_row_a_node_and_the_numbers_of_the_header(page: Page, tmp_path: Path) -> None:
    viewed = viewed_rollout()
    page.open(write(tmp_path, viewed))
    tree = viewed.rollout.trajectory.tree
    assert page.run("document.querySelector('#app').dataset.state") == "ready"
    assert page.run(SHOWN) == len(tree.nodes)
    header = page.run("document.querySelector('header').textContent")
    assert "reward 0.75" in header and "advantage +0.412" in header and "step 13" in header
    panels = page.run("document.querySelector('.panels').textContent")
    assert f"{tree.unique_tokens:,}" in panels and "[object" not in panels
    assert page.run("document.querySelectorAll('.bar-call').length") == len(viewed.rollout.trajectory.calls)
    assert page.run("document.querySelectorAll('.tag.forked, .tag.respliced, .tag.synthetic').length") == 3


def test_page_text_of_a_node_is_its_decoded_tokens_with_the_trained_ones_marked(page: Page, tmp_path: Path) -> None:
    viewed = viewed_rollout()
    page.open(write(tmp_path, viewed), "#call=s0012-fix-parser-03-c0")
    node = viewed.rollout.trajectory.calls[0].node_id
    assert page.run(FOCUS) == f"node-{node}"
    shown = page.run(f"document.querySelector('#node-{node} .text').textContent")
    assert shown == "I look at the parser first.\n<|tool_call|>bash: ls src<|im_end|>"
    assert page.run(f"document.querySelectorAll('#node-{node} .text .trained').length") > 0
    prompt = viewed.rollout.trajectory.tree.nodes[node].parent_id
    assert page.run(f"document.querySelectorAll('#node-{prompt} .trained').length") == 0


def test_page_tokens_of_a_node_are_coloured_by_log_prob_on_demand(page: Page, tmp_path: Path) -> None:
    viewed = viewed_rollout()
    call = viewed.rollout.trajectory.calls[2]
    page.open(write(tmp_path, viewed), f"#call={call.call_id}")
    assert page.run("document.querySelectorAll('.token').length") == 0
    page.press("t")
    row = f"#node-{call.node_id}"
    assert page.run(f"document.querySelectorAll('{row} .token').length") == call.output_tokens
    logprob = viewed.rollout.trajectory.tree.nodes[call.node_id].logprobs[0]
    assert f"log-prob −{-logprob:.3f}" in page.run(f"document.querySelector('{row} .token').title")
    page.press("t")
    assert page.run("document.querySelectorAll('.token').length") == 0


def test_page_keys_move_open_and_fold(page: Page, tmp_path: Path) -> None:
    page.open(write(tmp_path, viewed_rollout(num_calls=80, num_tokens=40_000)))
    page.press("j", "j")
    first = page.run(FOCUS)
    assert first.startswith("node-")
    page.press("ArrowRight")
    assert page.run(f"document.querySelectorAll('#{first} .text').length") == 1
    page.press("ArrowLeft")
    assert page.run(f"document.querySelectorAll('#{first} .text').length") == 0
    before = page.run(SHOWN)
    page.press("f")
    assert page.run(SHOWN) == 0
    page.press("f")
    assert page.run(SHOWN) == before
    page.press("End")
    assert page.run(FOCUS) == page.run("[...document.querySelectorAll('.row')].at(-1).id")
    page.press("?")
    assert page.run("document.querySelector('dialog').open")


def test_page_search_finds_texts_that_were_never_opened(page: Page, tmp_path: Path) -> None:
    viewed = viewed_rollout(num_calls=80, num_tokens=40_000)
    page.open(write(tmp_path, viewed))
    page.press("/", *"found the CAUSE", "Enter")
    assert page.run("document.querySelector('.hits').textContent").startswith("1 of ")
    assert "Done: found the cause" in page.run("document.querySelector('.row.match .text').textContent")
    assert page.run("CSS.highlights.get('found').size") >= 1


def test_page_filters_and_branches_show_what_was_trained(page: Page, tmp_path: Path) -> None:
    viewed = viewed_rollout()
    page.open(write(tmp_path, viewed))
    tree = viewed.rollout.trajectory.tree
    page.run("[...document.querySelectorAll('.filter')].find((one) => one.title === 'only sub-agent').click()")
    assert page.run(SHOWN) == sum(node.role.value == "sub-agent" for node in tree.nodes)
    page.run("[...document.querySelectorAll('.filter')].find((one) => one.title === 'only sub-agent').click()")
    page.press("b")
    leaf = locate_branch(tree, viewed.branches[0])
    assert page.run("document.querySelectorAll('.row.node:not(.off)').length") == len(tree.path(leaf))
    assert page.run("document.querySelector('.branch').getAttribute('aria-pressed')") == "true"


def test_page_of_hostile_texts_runs_none_and_shows_them_as_they_are(page: Page, tmp_path: Path) -> None:
    path = write(tmp_path, hostile_rollout())
    page.open(path)
    page.press("e")
    assert "日本 🙂 é" in page.run("[...document.querySelectorAll('.text')].at(-1).textContent")
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.run("document.querySelectorAll('.body .quiet').forEach((one) => one.textContent === 'Tokens' && one.click())")
    page.press("/", *"</script>", "Enter", "Enter")
    page.settle()
    assert page.run("window.pwned") is None
    assert page.run("document.querySelectorAll('img, iframe, object, link, #app script, #app style').length") == 0
    assert page.run("document.querySelectorAll('svg').length") == 1  # the timeline
    text = page.run("document.body.textContent")
    for payload in PAYLOADS[:6]:
        assert payload in text
    assert "⟦U+202E⟧gnp.exe⟦U+202C⟧" in text and "שלום عربى" in text and "␀␇␈␛[31mred" in text
    assert not page.run(r"/[\u0000-\u0008\u001b\u202a-\u202e\u2066-\u2069\ufeff]/.test(document.body.textContent)")


def test_page_policy_refuses_scripts_and_loads_even_if_markup_got_in(page: Page, tmp_path: Path) -> None:
    page.open(write(tmp_path, hostile_rollout()))
    markup = "<img src='http://127.0.0.1:9/x' onerror='window.pwned = 1'><style>body{color:red}</style>"
    page.run(f'document.body.insertAdjacentHTML("beforeend", {markup!r})')
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.pwned = 2'}))")
    page.settle()
    assert page.run("window.pwned") is None
    assert page.stopped == ["http://127.0.0.1:9/x"]
    assert len(page.problems) >= 3 and all("Content Security Policy" in problem for problem in page.problems)
    page.problems.clear()


def test_page_of_500_calls_is_shown_and_searched_in_moments(page: Page, tmp_path: Path) -> None:
    viewed = viewed_rollout(num_calls=500, num_tokens=700_000)
    page.open(write(tmp_path, viewed))
    assert page.run(SHOWN) == len(viewed.rollout.trajectory.tree.nodes) > 1000
    filled = page.run("[...document.querySelectorAll('.row')].filter((row) => row.firstChild).length")
    assert filled < 200  # rows far from the window stay empty
    ready_ms = page.run("performance.getEntriesByType('navigation')[0].loadEventEnd")
    began = page.run("performance.now()")
    page.press("/", *"Summarise", "Enter")
    searched_ms = page.run("performance.now()") - began
    assert page.run("document.querySelector('.hits').textContent") == "1 of 4"
    print(f"ready in {ready_ms:.0f} ms, typed and searched in {searched_ms:.0f} ms")
    assert ready_ms < 15_000 and searched_ms < 15_000  # measured: 0.4 s and 0.5 s on two slow cores


def test_page_of_no_calls_says_that_the_tree_is_empty(page: Page, tmp_path: Path) -> None:
    viewed = viewed_rollout(num_calls=2, num_tokens=400)
    rollout = viewed.rollout
    tree = type(rollout.trajectory.tree)(rollout_id=rollout.spec.rollout_id, nodes=())
    empty = type(rollout.trajectory)(rollout_id=rollout.spec.rollout_id, tree=tree, calls=())
    made = finished(rollout.spec.rollout_id, reward=None, trajectory=empty)
    stored = type(rollout)(spec=made.spec, trajectory=empty, grade=made.grade, harness=made.harness)
    path = tmp_path / "empty.html"
    path.write_bytes(rollout_page(rollout_model(stored, [], viewed.vocabulary)))
    page.open(path)
    page.press("j", "ArrowRight", "b", "t")
    assert "the tree is empty" in page.run("document.querySelector('main').textContent")
    assert "reward none" in page.run("document.querySelector('header').textContent")


def test_run_page_lists_groups_and_links_the_pages_that_are_there(page: Page, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    members = [finished(f"s0000-p07-{number:02d}", reward=reward) for number, reward in enumerate([1.0, 0.25, None])]
    record = {
        "group_id": "s0000-p07",
        "problem_id": "p07",
        "step": 0,
        "policy_version": 0,
        "dropped_reason": None,
        "rewards_by_rollout": {one.spec.rollout_id: one.grade.reward for one in members},
    }
    branches = [branch_of(two_turns("s0000-p07-00"), 3)]
    store.commit_rollouts("group", members, branches, record, token="s0000-p07")
    folder = tmp_path / "pages"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / page_name("s0000-p07-01")).write_text("<p>there</p>")
    (folder / "run.html").write_bytes(run_page(stored_run_model(store, "r1", beside=folder)))
    page.open(folder / "run.html")
    assert page.run("document.querySelectorAll('tbody tr').length") == 1 + 3
    links = page.run("[...document.querySelectorAll('td a')].map((link) => link.getAttribute('href'))")
    assert links == ["rollouts/s0000-p07-01.html"]
    page.run("[...document.querySelectorAll('th button')].find((one) => one.textContent === 'reward').click()")
    order = page.run("[...document.querySelectorAll('tbody tr td:first-child')].map((cell) => cell.textContent)")
    assert order == ["s0000-p07-00", "s0000-p07-01", "s0000-p07-02"]
