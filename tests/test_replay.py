"""The replay page tells what happened, whatever the tokens spell, and works in a real browser."""

import html.parser
import importlib
import importlib.util
import json
import shutil
import time
import types

import pytest
import torch
from test_house import METHODS
from tiny import make_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import bench
import common
import ctc_drafter
import glide
from support import replay

EVIL = "</script><script>window.broken = 1</script>"
WORDS = [
    EVIL,
    "<!--",
    "{{script}}",
    " the",
    "\n",
    "&lt;",
    '"',
    "\\",
    "é",
    "\u2028",
    "<b>x</b>",
    " ",
]
WORDS += [f" word{n}" for n in range(36)]
PROMPT = [3, 12, 13, 3, 12, 13, 14, 3, 12]
SHOWN = ["tokens", "parents", "q", "p", "rank", "kind"]  # one entry a node


def make_tokenizer():
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token=" the"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=" the")


def make_arm(name, target, copies=6):
    """An arm with an untrained drafter, whose layers are copies of the target's."""
    module = importlib.import_module(name)
    kwargs = {"custom_generate": module.generate, "copies": copies}
    if hasattr(module, "build"):
        small = {"stage": "head"} if name == "specdecpp" else {"intermediate_size": 48}
        shape = common.target_shape(target)
        config = module.Config(target=shape, draft_vocab=40, **small)
        drafter = module.build(config, target, torch.arange(48)).to(target.dtype).eval()
        kwargs["drafter"] = drafter
    else:
        base = make_arm(module.Config().base, target)
        drafter = base.kwargs["drafter"]
        kwargs |= {"base": base.module, "base_drafter": drafter}
    return bench.Arm(name, kwargs, [drafter], module, reports=True)


@pytest.fixture(scope="module")
def played():
    """{method: (what the page is told, Stats)} of 24 tokens, and the answer of plain decoding."""
    target = make_llama(max_position_embeddings=256)
    ids = torch.tensor([PROMPT])
    encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options = {"max_new_tokens": 24, "do_sample": False}
    answer = target.generate(**encoded, **options)[0, len(PROMPT) :].tolist()
    arms = {name: make_arm(name, target) for name in METHODS}
    told = {name: replay.play(arm, target, encoded, options) for name, arm in arms.items()}
    again = {}
    for name, arm in arms.items():
        again[name] = common.Stats()
        target.generate(**encoded, **options, **arm.kwargs, stats=again[name])
    return types.SimpleNamespace(told=told, answer=answer, plain=again)


@pytest.fixture(scope="module")
def page(played):
    about = {"prompt": EVIL, "target": "tiny", "device": "cpu", "sampled": False}
    methods = [played.told[name][0] for name in METHODS]
    return replay.page(methods, make_tokenizer(), PROMPT, about)


class Reader(html.parser.HTMLParser):
    """What a browser sees: the elements, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [None], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, text):
        if self.tags[-1] == "script":
            self.scripts.append(text)


def data_of(page):
    return json.loads(Reader(page).scripts[0])


# ------------------------------------------------------------------------------------- the record


@pytest.mark.parametrize("method", METHODS)
def test_the_rounds_tell_what_stats_counted(played, method):
    told, stats = played.told[method]
    rounds = told["rounds"]
    assert told["answer"] == played.answer
    assert len(rounds) == stats.target_forwards
    assert sum(len(each["tokens"]) for each in rounds) == stats.drafted > 0
    assert [len(each["path"]) for each in rounds] == stats.accepted
    assert [max(replay.depths(each["parents"]), default=0) for each in rounds] == stats.offered
    assert [each["kind"].count("copy") for each in rounds] == [n for n, _ in stats.copies]
    committed = sum((each["committed"] for each in rounds), [])
    assert committed[: stats.emitted] == played.answer
    length = len(PROMPT)
    for each in rounds:
        assert each["prefix"] == length - 1
        length += len(each["committed"])
        assert {len(each[name]) for name in SHOWN} == {len(each["tokens"])}
        assert [each["tokens"][n] for n in each["path"]] == each["committed"][:-1]
        for q, p in zip(each["q"], each["p"]):
            assert 0 <= p <= 1 and (q is None or 0 <= q <= 1)
    for name in ("draft", "verify"):
        total = sum(each["ms"].get(name, 0.0) for each in rounds)
        assert total == pytest.approx(1000 * stats.seconds[name])
    assert min(each["ms"]["other"] for each in rounds) >= 0


def test_the_milliseconds_of_two_rounds_by_hand():
    """Drafting, verifying, and what is left of the time from round to round."""
    stats = replay.Recorder()
    rounds = replay.Rounds(stats, None)
    nothing = common.Draft(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    record = {"draft": nothing, "p_target": [], "path": [], "committed": [5], "prefix": 3}
    stats.began, stats.ended = 7.0, 7.6
    rounds.append(record | {"seconds": {"prefill": 2.0, "draft": 0.2, "verify": 0.3}})
    stats.began, stats.ended = 8.0, 9.0
    rounds.append(record | {"seconds": {"prefill": 2.0, "draft": 0.5, "verify": 0.7}})
    first, second = (told["ms"] for told in rounds)
    assert first == pytest.approx({"draft": 200, "verify": 300, "other": 100})
    assert second == pytest.approx({"draft": 300, "verify": 400, "other": 300})


def test_something_was_accepted_copied_and_refused(played):
    """Otherwise the pages above would show little."""
    for told, stats in played.told.values():
        assert 0 < sum(stats.accepted) < stats.drafted, told["name"]
        assert sum(offered for offered, _ in stats.copies) > 0, told["name"]


@pytest.mark.parametrize("method", METHODS)
def test_without_a_trace_nothing_is_kept_and_the_counts_are_the_same(played, method):
    off, on = played.plain[method], played.told[method][1]
    assert off.trace is None and off.noted == {}
    for name in ("target_forwards", "drafted", "emitted", "offered", "accepted", "copies"):
        assert getattr(off, name) == getattr(on, name), name


def test_the_settings_are_those_of_the_arm(played):
    """What it was told, else what its drafter says: all arms have copies, which no drafter has."""
    settings = {name: played.told[name][0]["settings"] for name in METHODS}
    assert {each["copies"] for each in settings.values()} == {6}
    assert settings["glide"] == {"gamma": glide.Config().gamma, "copies": 6}


def test_what_each_method_notes_reaches_the_page(played):
    rounds = {name: played.told[name][0]["rounds"][-2] for name in METHODS}
    assert played.told["glide"][0]["reads"] == [2] and played.told["falcon"][0]["reads"] == []
    cape = rounds["cape"]
    assert len(cape["counts"]) == len(cape["confidences"]) == cape["kind"].count("draft")
    assert "extra" in cape["kind"]
    spec = [each["chances"] for each in played.told["specdecpp"][0]["rounds"]]
    assert max(map(len, spec)) > 0 and rounds["specdecpp"]["stopped"]
    falcon = rounds["falcon"]
    levels = replay.depths(falcon["parents"])
    assert [2 * (p - 1) + s for p, s in zip(falcon["pass"], falcon["slot"])] == levels
    assert None not in [q for q, kind in zip(falcon["q"], falcon["kind"]) if kind == "draft"]
    slots = rounds["ctc_drafter"]["ctc"]["slots"]
    assert [len(slot) for slot in slots] == [replay.SYMBOLS] * 6
    assert all(slot == sorted(slot, key=lambda pair: -pair[1]) for slot in slots)


def test_kinds_ranks_and_probabilities_of_nodes():
    """A trajectory 5 6, an extra 7 beside 6, a copy 8 below 5."""
    probs = torch.zeros(2, 10)
    probs[0, [5, 1]] = torch.tensor([0.4, 0.6])
    probs[1, 6] = 1.0
    draft = common.Draft(torch.tensor([5, 6, 7, 8]), torch.tensor([-1, 0, 0, 0]), probs, copied=1)
    record = {"draft": draft, "path": [0], "committed": [5, 9], "prefix": 3}
    record |= {"p_target": [0.5, 0.1, 0.2, 0.3], "counts": [0, 1], "confidences": [0.6, 1.0]}
    told = replay.describe(record)
    assert told["kind"] == ["draft", "draft", "extra", "copy"]
    assert told["rank"] == [2, 1, 2, None]
    assert told["q"] == pytest.approx([0.4, 1.0, None, None])
    greedy = common.Draft(draft.tokens, draft.parents, None, copied=1)
    assert replay.describe(record | {"draft": greedy})["q"] == [0.6, 1.0, None, None]
    noted = replay.describe(record | {"q_nodes": torch.tensor([0.1, 0.2, 0.3])})["q"]
    assert noted == pytest.approx([0.1, 0.2, 0.3, None])


def test_ways_of_the_slots_collapse_into_the_prefix_they_are_listed_under():
    """Two slots of tokens 4, 7 and the blank: a prefix's ways are all that begin with it."""
    q_slots = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]])
    draft_ids = torch.tensor([4, 7])
    worth = ctc_drafter.prefix_search(q_slots, 2, 8)
    draft = ctc_drafter.token_tree(worth, draft_ids, 4, 2)
    record = {"draft": draft, "q_slots": q_slots, "worth": worth}
    facts = replay.ctc_facts(record, draft_ids)
    assert facts["slots"][0] == [
        [4, pytest.approx(0.6)],
        [7, pytest.approx(0.3)],
        [-1, pytest.approx(0.1)],
    ]
    found = replay.paths(draft.tokens.tolist(), draft.parents.tolist())
    for path, prefix in zip(found, facts["prefixes"]):
        ways = [tuple(way) for way, _ in prefix["ways"]]
        assert ways and all(ctc_drafter.collapse(way, -1)[: len(path)] == path for way in ways)
        if prefix["found"] <= replay.WAYS:  # all of them are listed, so they add up
            assert sum(value for _, value in prefix["ways"]) == pytest.approx(prefix["worth"])
    assert found[0] == (4,) and facts["prefixes"][0]["worth"] == pytest.approx(0.6 + 0.1 * 0.2)
    given_parent = dict(zip(found, replay.draft_probabilities(record, draft_ids)))
    assert given_parent[(4,)] == pytest.approx(0.62)
    assert given_parent[(4, 7)] == pytest.approx(0.6 * 0.3 / 0.62)  # both slots, in this order


# --------------------------------------------------------------------------------------- the page


def test_the_page_holds_the_record_and_fetches_nothing(page, played):
    data = data_of(page)
    for method in data["methods"]:
        told, stats = played.told[method["name"]]
        assert method["stats"] == json.loads(json.dumps(replay.shortened(told["stats"])))
        assert method["rounds"] == json.loads(json.dumps(replay.shortened(told["rounds"])))
        assert method["answer"] == played.answer
    assert data["prompt"] == PROMPT and data["about"]["prompt"] == EVIL
    for fetched in ("http://", "https://", "src=", "@import", "url("):
        assert fetched not in page.replace("http://www.w3.org/2000/svg", "")  # a name, no address
    assert "default-src 'none'" in page


def test_tokens_that_spell_markup_stay_text(page):
    read = Reader(page)
    assert not set("<>&") & set(read.scripts[0])
    assert read.tags.count("script") == 2 and "b" in read.tags and "<b>x</b>" not in page
    texts = data_of(page)["texts"]
    used = {int(token) for token in texts}
    assert set(PROMPT) <= used and {texts[str(n)] for n in used} == {WORDS[n] for n in used}


def test_every_character_survives_the_way_into_a_script():
    text = EVIL + "<!-- ]]> & \u2028 \x00 \U0001f600 {{data}} " + "".join(map(chr, range(32)))
    told = {"answer": [0, 1], "title": EVIL, "rounds": [], "name": "glide", "settings": {}}
    told["rounds"] = [{"tokens": [1], "path": [0], "committed": [1, 0]}]
    tokenizer = types.SimpleNamespace(decode=lambda ids: [text, "{{script}}</title>"][ids[0]])
    page = replay.page([told], tokenizer, [0], {"prompt": text})
    data = data_of(page)
    assert data["texts"] == {"0": text, "1": "{{script}}</title>"}
    assert data["about"]["prompt"] == text and Reader(page).tags.count("script") == 2


def test_a_table_tells_the_rounds_without_scripts(page, played):
    inside = page.partition("<noscript>")[2].partition("</noscript>")[0]
    rows = sum(stats.target_forwards for _, stats in played.told.values())
    assert inside.count("<table>") == len(METHODS) and inside.count("<tr><td>") == rows
    assert "<script" not in inside
    for _, stats in played.told.values():
        assert f"<td>{stats.emitted}</td></tr></table>" in inside


def test_parts_of_letters_are_shown_by_the_tokenizers_name():
    names = types.SimpleNamespace(decode=lambda ids: "\ufffd", convert_ids_to_tokens=lambda n: "âĢ")
    assert replay.token_text(names, 7) == "âĢ"


def test_bench_writes_the_page_and_prints_the_counts(tmp_path, capsys):
    target = make_llama().float()
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    make_arm("glide", target).kwargs["drafter"].save_pretrained(tmp_path / "glide")
    command = ["--method", "glide", "--target", str(tmp_path / "target"), "--device", "cpu"]
    command += ["--checkpoint", str(tmp_path / "glide"), "--max-new-tokens", "9"]
    command += ["--prompt", " word1 word2", "--replay", str(tmp_path / "page.html")]
    bench.main(command)
    data = data_of((tmp_path / "page.html").read_text())
    rounds = len(data["methods"][0]["rounds"])
    assert f"glide: 9 tokens in {rounds} rounds" in capsys.readouterr().out
    assert data["about"]["prompt"] == " word1 word2" and len(data["methods"][0]["answer"]) == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["glide", "page.html", "target"]


@pytest.mark.parametrize(
    "options, line",
    [
        (["--cost-curve"], "give --method"),
        (["--method", "glide", "--json", "x.json"], "leave out --json"),
        (["--method", "glide", "--batch-size", "2"], "leave out --batch-size"),
        (["--method", "glide", "--refit"], "leave out --refit"),
    ],
)
def test_options_that_do_not_go_with_a_replay(options, line, tmp_path):
    with pytest.raises(ValueError, match=line):
        bench.parse([*options, "--replay", str(tmp_path / "page.html")])


def test_a_page_in_a_folder_that_is_not_there():
    with pytest.raises(ValueError, match="no such folder"):
        bench.parse(["--method", "glide", "--replay", "nowhere/page.html"])


# ---------------------------------------------------------------------------------- a real browser

FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
           --disable-background-networking --disable-component-update""".split()


@pytest.fixture(scope="module")
def browser(page, tmp_path_factory):
    """Debian's Chromium with the page open."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("no selenium: pip install selenium")
    from selenium import webdriver

    folder = tmp_path_factory.mktemp("browser")
    (folder / "page.html").write_text(page, encoding="utf-8")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in [*FLAGS, "--window-size=1500,1200", f"--user-data-dir={folder / 'profile'}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    driver.address = (folder / "page.html").as_uri()
    driver.get(driver.address)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser):
    """The page as it is when it was just opened; at the end nothing was complained of."""
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get("about:blank")
    browser.get(browser.address)
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.broken") is None, "a token was run as a script"


def shown(driver, name):
    """A number that the page shows."""
    return float(driver.execute_script(f"return document.querySelector('{name}').textContent"))


def visit(driver, method, number):
    """Follow a link to a round; the page hears of a new address a moment later."""
    from selenium.webdriver.support.ui import WebDriverWait

    driver.get(f"{driver.address}#{method}/{number}")
    title = f"{replay.TITLES[method]}, round {number} of "
    WebDriverWait(driver, 10, 0.02).until(lambda driver: driver.title.startswith(title))


def press(driver, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_round_shows_the_numbers_of_stats(opened, played, method):
    told, stats = played.told[method]
    drafted = emitted = 0
    for number, each in enumerate(told["rounds"], 1):
        visit(opened, method, number)
        drafted += len(each["tokens"])
        emitted = min(emitted + len(each["committed"]), len(played.answer))
        assert shown(opened, "#number") == shown(opened, "[data-figure=forwards]") == number
        assert shown(opened, "#rounds") == stats.target_forwards
        assert shown(opened, "[data-figure=drafted]") == drafted
        assert shown(opened, "[data-figure=accepted]") == sum(stats.accepted[:number])
        assert shown(opened, "[data-figure=emitted]") == emitted
        assert shown(opened, "[data-figure=tau]") == round(emitted / number + 1e-9, 2)
        look = """const all = (path) => document.querySelectorAll(path);
            const cells = [...all('#mask .mask-row')].map((row) =>
                [...row.querySelectorAll('rect:not(.rowband)')].map((cell) =>
                    Number(cell.classList.contains('may'))));
            const there = [...all('#text [data-round]:not(.later)')].map((t) => t.textContent);
            return [[...all('#tree .node.taken')].map((node) => Number(node.dataset.node)),
                    all('#tree .node').length, cells, there.join('').replaceAll('↵', ''),
                    document.getElementById('method-panel').hidden]"""
        taken, nodes, cells, text, bare = opened.execute_script(look)
        assert sorted(taken) == sorted(each["path"]) and nodes == len(each["tokens"]) + 2
        mask = common.ancestor_mask(torch.tensor(each["parents"]).long(), 1, torch.float32)
        assert cells == (mask[0, 0] == 0).long().tolist()
        assert text == "".join(WORDS[n] for n in played.answer[:emitted])
        assert not bare, "every method has something particular to show"
    assert (drafted, emitted) == (stats.drafted, stats.emitted)


@pytest.mark.slow
def test_keys_buttons_slider_and_links(opened, played):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    last = played.told["glide"][1].target_forwards

    def at():
        return int(shown(opened, "#number"))

    press(opened, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert at() == 3
    press(opened, Keys.ARROW_LEFT)
    assert at() == 2
    press(opened, Keys.END)
    assert at() == last
    press(opened, Keys.HOME)
    assert at() == 1
    for button, place in [("next", 2), ("last", last), ("back", last - 1), ("first", 1)]:
        opened.find_element(By.ID, button).click()
        assert at() == place
    slider = opened.find_element(By.ID, "slider")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert at() == 2
    opened.execute_script("document.activeElement.blur()")
    press(opened, " ")
    assert opened.find_element(By.ID, "play").text.endswith("Stop")
    press(opened, " ")
    assert opened.find_element(By.ID, "play").text.endswith("Play")
    visit(opened, "cape", 3)
    assert at() == 3
    opened.find_element(By.ID, "next").click()
    time.sleep(0.4)
    assert opened.current_url.endswith("#cape/4")
    visit(opened, "falcon", 2)
    opened.execute_script("location.hash = '#falcon/999'")
    time.sleep(0.4)
    assert at() == played.told["falcon"][1].target_forwards
    opened.find_element(By.CSS_SELECTOR, "[role=tab][aria-selected=true]").send_keys(
        Keys.ARROW_LEFT
    )
    assert opened.title.startswith("SpecDec++")


@pytest.mark.slow
def test_pointing_at_a_node_lights_its_row_and_ancestors(opened, played):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    visit(opened, "cape", 2)
    parents = played.told["cape"][0]["rounds"][1]["parents"]
    node, line = 2, {2}
    while node >= 0:
        node = parents[node]
        line.add(node)
    lit = """return [...document.querySelectorAll(arguments[0] + ' .lit[data-node]')].map(
        (item) => Number(item.dataset.node))"""
    chosen = "return document.querySelector(arguments[0] + ' .chosen').dataset.node"
    for area, other in (("#tree", "#mask"), ("#mask", "#tree")):
        opened.execute_script(f"document.querySelector('{area}').scrollIntoView()")
        item = opened.find_element(By.CSS_SELECTOR, f"{area} [data-node='2']")
        ActionChains(opened).move_to_element(item).perform()
        assert set(opened.execute_script(lit, other)) == line
        assert opened.execute_script(chosen, other) == "2"
    ActionChains(opened).move_to_element(opened.find_element(By.ID, "story")).perform()
    opened.execute_script("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    press(opened, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert opened.execute_script(chosen, "#mask") == "2"
    assert set(opened.execute_script(lit, "#mask")) == line
    label = "return document.activeElement.getAttribute('aria-label')"
    assert opened.execute_script(label) == opened.find_element(By.ID, "seen").text


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_at_400_percent_only_the_pictures_scroll(opened, method):
    """1280 pixels at 400% are 320."""
    size = {"width": 320, "height": 256, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    visit(opened, method, 3)
    wide = "return document.documentElement.scrollWidth"
    assert opened.execute_script(wide) <= 320
    text = "return document.getElementById('text').getBoundingClientRect().right"
    assert opened.execute_script(text) <= 320


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(opened, scheme):
    """Contrast of 4.5 between each kind of token and what lies behind it."""
    emulate = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", emulate)
    colours = """const items = document.querySelectorAll('.legend .token, #story, .said');
        return [...items].map((item) => {
        const own = getComputedStyle(item);
        const back = item.matches('.token') ? own
            : getComputedStyle(item.closest('.panel') ?? document.body);
        return [own.color, back.backgroundColor] })"""

    def luminance(colour):
        parts = [int(n) / 255 for n in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for pair in opened.execute_script(colours):
        low, high = sorted(map(luminance, pair))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (scheme, pair)
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.slow
def test_the_table_is_there_without_scripts(opened, played):
    from selenium.webdriver.common.by import By

    opened.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        opened.get(opened.address)
        opened.refresh()
        tables = opened.find_elements(By.CSS_SELECTOR, "noscript table")
        assert len(tables) == len(METHODS) and all(table.is_displayed() for table in tables)
        rows = tables[0].find_elements(By.CSS_SELECTOR, "tr")
        assert len(rows) == 1 + played.told["glide"][1].target_forwards
        assert not opened.find_element(By.ID, "main").is_displayed()
    finally:
        opened.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.slow
def test_a_page_of_128_tokens_is_under_a_megabyte():
    target = make_llama(max_position_embeddings=256)
    ids = torch.tensor([PROMPT])
    encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    about = {"prompt": "", "target": "", "device": "cpu", "sampled": False}
    for name in METHODS:
        arm = make_arm(name, target)
        options = {"max_new_tokens": 128, "do_sample": False}
        told, _ = replay.play(arm, target, encoded, options)
        assert len(replay.page([told], make_tokenizer(), PROMPT, about)) < 2**20, name
