"""The replay page shows what happened, whatever the tokens spell, also in a browser."""

import itertools
import json
import re
import shutil
import time
import types

import pytest
import torch
from chat import command, refused
from tiny import draft_of, make_llama, untrained

import common
from support import cli
from support.measuring import arms as arms_of
from support.measuring import report
from support.replay import __main__ as replay
from support.replay import page

EVIL = "</script><script>window.broken = 1</script>"
WORDS = [EVIL, "<!--", "{{script}}", " the", "\n", "&lt;", '"', "\\", "\u2028"]
WORDS += ["<b>x</b>", " "]
WORDS += [f" word{n}" for n in range(37)]
PROMPT = torch.tensor([[3, 12, 13, 3, 12, 13, 14, 3, 12]])
GREEDY = {"max_new_tokens": 24, "do_sample": False}
ENCODED = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}


def arm_of(text, target):
    """An arm with an untrained drafter."""

    def load(method, _):
        return untrained(cli.import_method(method), target)

    return arms_of.make_arm(text, target, load)


# --------------------------------------------------------------------------- the record


def recorded(target, *drafts, **options):
    """The rounds of these drafts; tokens stay numbers."""
    return page.record(target, lambda decoding: drafts, ENCODED, options, int)


def test_a_round_by_hand_tells_what_was_drafted_and_what_became_of_it(llama):
    """A chain a b, an extra x beside b and a copy y below x; the target says a x z."""
    a, x, z = llama.generate(PROMPT, max_new_tokens=3, do_sample=False)[0, -3:].tolist()
    b, y = (x + 1) % 48, (z + 1) % 48
    probs = torch.zeros(2, 48)
    probs[0, a] = 0.6
    probs[1, b] = 0.5
    probs[1, x] = 0.25
    notes = {"confidences": [0.6, 0.5], "counts": [0, 1], "copied": 1}
    draft = draft_of([a, b, x, y], [-1, 0, 0, 2], probs, **notes)
    [told] = recorded(llama, draft, max_new_tokens=8, do_sample=False)
    assert told["tokens"] == [a, b, x, y] and told["parents"] == [-1, 0, 0, 2]
    assert told["kinds"] == ["draft", "draft", "extra", "copy"]
    assert report.rounded(told["q"]) == [0.6, 0.5, 0.25, None]
    assert told["path"] == [0, 2] and told["committed"] == [a, x, z]
    assert told["room"] == 7
    assert told["notes"] == {"confidences": [0.6, 0.5], "counts": [0, 1]}


def test_a_tree_notes_its_own_q_and_the_last_tokens_may_end_the_answer(llama):
    a, b = llama.generate(PROMPT, max_new_tokens=2, do_sample=False)[0, -2:].tolist()
    draft = draft_of([a, b, 1], [-1, 0, 0], k=2, q=[0.5, 0.25, float("nan")], copied=1)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": b}
    [told] = recorded(llama, draft, **options)
    assert told["kinds"] == ["draft", "draft", "copy"] and told["notes"] == {"k": 2}
    assert report.rounded(told["q"]) == [0.5, 0.25, None]
    assert told["path"] == [0, 1] and told["committed"] == [a, b]


def test_the_q_of_a_drawn_node_is_that_of_its_own_row(llama):
    """Nodes 0 and 1 are drawn, 1 below 0; nodes 2 and 3 have a q in the notes."""
    probs = torch.zeros(2, 48)
    probs[0, 5] = 0.6
    probs[1, 7] = 0.5
    draft = draft_of([5, 7, 9, 6], [-1, 0, -1, 2], probs, q=[0.1, 0.1, 0.2, 0.3])
    for sampled, drawn in ((True, 2), (False, 0)):
        [told] = recorded(llama, draft, max_new_tokens=8, do_sample=sampled)
        assert report.rounded(told["q"]) == [0.6, 0.5, 0.2, 0.3]
        assert told["drawn"] == drawn
        chances = [min(1, p / q) for p, q in zip(told["p"], told["q"])]
        assert told["acceptance"] == [*chances[:drawn], *[None] * (4 - drawn)]


def test_a_second_drawn_sibling_is_not_judged_by_p():
    """It is judged by what the first one left of p, and its own first child by p."""
    parents = [-1, -1, 1, -1]
    p, q = [0.25, 0.5, 0.1, 0.1], [0.5, 0.25, 0.2, 0.2]
    assert page.acceptance(parents, 3, p, q) == [0.5, None, 0.5, None]


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.9}


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, SAMPLED])
def test_p_is_the_targets_probability_after_the_parents_text(llama, options):
    """Each node's own text is fed to the target alone, and processed as in decoding."""
    draft = draft_of([5, 6, 7, 8, 5], [-1, -1, 0, 2, 1])
    options = {"do_sample": False, "max_new_tokens": 20} | options
    [told] = recorded(llama, draft, **options)
    decoding = common.start(llama, **ENCODED, **options)  # for its processors
    texts = {-1: PROMPT}
    for node, (token, parent) in enumerate(zip(told["tokens"], told["parents"])):
        scores = llama(texts[parent]).logits[:, -1].float()
        if decoding.logits_processor:
            scores = decoding.logits_processor(texts[parent], scores)
        p = float(scores.softmax(-1)[0, token])
        assert told["p"][node] == pytest.approx(p, abs=1e-6)
        texts[node] = torch.cat([texts[parent], torch.tensor([[token]])], dim=1)


def test_times_are_of_one_round_and_not_of_its_description(llama, monkeypatch):
    """By a clock that shows a second more at each look, and at each token's text."""
    seconds = itertools.count()
    monkeypatch.setattr(page, "clock", lambda _: next(seconds))
    first, *rounds = page.record(
        llama, arms_of.plain_drafts, ENCODED, GREEDY, text=lambda token: next(seconds)
    )
    assert first["seconds"] == {"prefill": 1, "verify": 1}
    assert all(told["seconds"] == {"draft": 1, "verify": 1} for told in rounds)
    assert next(seconds) == 1 + 4 * 24  # three looks and a text in each round


@pytest.mark.parametrize("name", cli.METHODS)
def test_every_method_can_be_played(llama, name):
    """The answer is the greedy one, and what the page relies on is there."""
    answer = llama.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    rounds = page.play(arm_of(f"{name}+copies", llama), ENCODED, GREEDY, int)
    assert [token for each in rounds for token in each["committed"]] == answer
    kinds = set()
    for each in rounds:
        kinds.update(each["kinds"])
        count = len(each["tokens"])
        assert {len(each[part]) for part in ("parents", "kinds", "q", "p")} == {count}
    if name == "glide":  # the context repeats itself, so copies were merged in
        assert "copy" in kinds
    assert ("extra" in kinds) == (name == "cape")
    noted = {"cape": "counts", "specdecpp": "chances"}
    noted |= {"falcon": "k", "ctc_drafter": "slots"}
    if name in noted:
        assert all(noted[name] in each["notes"] for each in rounds if each["tokens"])
        for each in rounds:
            drafted = [q for q, kind in zip(each["q"], each["kinds"]) if kind != "copy"]
            assert None not in drafted
    json.dumps(report.rounded(rounds), allow_nan=False)


def test_plain_decoding_is_timed_at_each_token(llama):
    """By transformers' loop and by ours, from the start of the prompt on."""
    answer = llama.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    for loop in arms_of.plain_loops(llama, llama):
        plain = page.plain_answer(loop, ENCODED, GREEDY, int)
        assert plain["tokens"] == answer
        seconds = plain["seconds"]
        assert len(seconds) == GREEDY["max_new_tokens"]
        assert 0 < seconds[0] and seconds == sorted(set(seconds))


# ----------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page of CAPE, Falcon and drafts that are right: its text and its data.

    Of the loops that they race against, the second is the fastest. The answer ends with
    its 24th token, at which the right drafts end, too.
    """
    target = make_llama()
    answer = target.generate(PROMPT, **GREEDY)[0]
    options = GREEDY | {"max_new_tokens": 40, "eos_token_id": int(answer[-1])}

    def right_drafts(decoding):
        while not decoding.done:
            ahead = answer[decoding.ids.shape[1] :][:4]
            yield common.Draft(ahead, list(range(-1, len(ahead) - 1)))

    def plain(step):
        words = [f" plain{n}" for n in range(24)]
        return {"tokens": words, "seconds": [step * n for n in range(1, 25)]}

    race = map(plain, (3, 1, 2, 6, 5, 4))  # of two runs
    loops = arms_of.plain_loops(target, make_llama())
    path = tmp_path_factory.mktemp("replay") / "page.html"
    arms = [arm_of("cape", target), arms_of.Arm("a peer", target)]
    arms += [arm_of("falcon", target), arms_of.Arm("right", target, right_drafts)]
    tokenizer = types.SimpleNamespace(decode=lambda ids: WORDS[ids[0]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "encode", lambda *_: ENCODED)
        patch.setattr(page, "plain_answer", lambda *_: next(race))
        page.write(path, tokenizer, loops, arms, EVIL, options)
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]
    text = path.read_text(encoding="utf-8")
    data = json.loads(scripts(text)[0])
    return types.SimpleNamespace(path=path, text=text, data=data)


def scripts(text):
    """What a browser runs of a page: each script, up to the first end of one."""
    return re.findall(r"<script\b[^>]*>(.*?)</script", text, re.DOTALL | re.IGNORECASE)


def test_the_page_holds_both_runs_and_the_times_of_plain_decoding(written):
    greedy, sampled = written.data["runs"]
    assert (greedy["name"], sampled["name"]) == ("greedy", "temperature 1")
    assert not greedy["sampled"] and sampled["sampled"]
    for run, fastest in ((greedy, 1), (sampled, 4)):
        assert [each["name"] for each in run["methods"]] == ["cape", "falcon", "right"]
        assert run["plain"]["seconds"][0] == fastest
    for method in greedy["methods"]:
        assert sum(len(told["committed"]) for told in method["rounds"]) == 24
        assert not any(told["drawn"] for told in method["rounds"])
    cape = sampled["methods"][0]["rounds"]
    # The chain is sampled, and its extras and copies are not.
    drawn = [told["drawn"] for told in cape]
    assert drawn == [told["kinds"].count("draft") for told in cape] and any(drawn)
    assert written.data["prompt"] == [WORDS[token] for token in PROMPT[0]]
    assert written.data["about"]["prompt"] == EVIL
    assert len(scripts(written.text)) == 2
    assert "<b>x</b>" not in written.text
    for fetched in ("http:", "https:", "src=", "@import", "url("):
        assert fetched not in written.text


def test_a_command_writes_a_page(measured, monkeypatch, tmp_path):
    """The first run is greedy, and the second samples as asked."""
    monkeypatch.chdir(measured)
    file = tmp_path / "page.html"
    sampling = ["--temperature", "0.7", "--top-p", "0.9"]
    replay.main([str(file), *command(*sampling, method="glide@glide lookup")])
    greedy, sampled = json.loads(scripts(file.read_text())[0])["runs"]
    assert sampled["name"] == "temperature 0.7, top-p 0.9"
    for run in (greedy, sampled):
        glide, _ = run["methods"]
        assert glide["name"] == "glide@glide"
        drawn = any(told["drawn"] for told in glide["rounds"])
        assert drawn == run["sampled"] == (run is sampled)
    for path, method, said in (
        (file, "prompt-lookup", "a page needs drafts"),
        (tmp_path / "no" / "page.html", "lookup", "cannot write .*: name a file in"),
    ):
        with refused(said):
            replay.main([str(path), *command(method=method)])


def test_every_character_survives_the_way_into_a_script():
    text = EVIL + "<!-- ]]> & \u2028 \x00 \U0001f600 {{data}} "
    text += "".join(map(chr, range(32)))
    read = scripts(page.html({"prompt": [text, "{{script}}</title>"]}))
    assert json.loads(read[0]) == {"prompt": [text, "{{script}}</title>"]}
    assert len(read) == 2


# ---------------------------------------------------------------------------- a browser

FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run
           --disable-sync --disable-background-networking
           --disable-component-update""".split()


@pytest.fixture
def browser(written, tmp_path):
    """Debian's Chromium with the page open; at the end it has no complaint."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in [*FLAGS, "--window-size=1400,1000", f"--user-data-dir={tmp_path}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    try:
        driver.get(written.path.as_uri())
        yield driver
        assert driver.get_log("browser") == []
        ran = driver.execute_script("return window.broken")
        assert ran is None, "a token ran as a script"
    finally:
        driver.quit()


LOOK = """
    const all = (path) => [...document.querySelectorAll(path)];
    const heads = all('#draft th').map((head) => head.textContent);
    const odds = heads.indexOf('min(1, p/q)');
    return {
        nodes: all('#draft .row').map((row) => row.dataset.node),
        rejected: all('#draft .row.rejected').map((row) => Number(row.dataset.node)),
        odds: Object.fromEntries(all('#draft .row').map((row) =>
            [row.dataset.node, odds < 0 ? '' : row.children[odds].textContent])),
        kept: all('#draft .cache .kept').length - 1,
        cut: all('#draft .cache .cut').length,
        text: document.getElementById('text').textContent.replaceAll('↵', ''),
        figures: Object.fromEntries(all('[data-figure]').map((b) =>
            [b.dataset.figure, Number(b.textContent)])),
        story: document.getElementById('story').textContent,
    }"""


def rejected_nodes(told, sampled):
    """By the rules of verification, the nodes that were looked at and rejected."""
    reached = [-1, *told["path"]]  # the target chose a token after each of these
    if len(told["committed"]) == len(told["path"]):
        reached.pop()  # the answer ended there
    found = []
    for node, parent in enumerate(told["parents"]):
        siblings = [n for n in told["path"] if told["parents"][n] == parent]
        accepted = siblings[0] if siblings else None
        if parent not in reached or node == accepted:
            continue
        if sampled:  # drawn siblings are judged in their order
            judged = node < told["drawn"]
            found += [node] if judged and (accepted is None or node < accepted) else []
        elif accepted is None:
            found.append(node)
    return found


def press(browser, name):
    browser.find_element("xpath", f"//button[text()='{name}']").click()


@pytest.mark.slow
def test_stepping_through_the_rounds_in_a_browser(browser, written):
    from selenium.webdriver.common.keys import Keys

    body = browser.find_element("tag name", "body")
    for run, method in [(r, m) for r in written.data["runs"] for m in r["methods"]]:
        press(browser, run["name"])
        press(browser, method["name"])
        body.send_keys(Keys.HOME)
        emitted = drafted = accepted = 0
        text = ""
        for number, told in enumerate(method["rounds"], 1):
            seen = browser.execute_script(LOOK)
            emitted += len(told["committed"])
            drafted += len(told["tokens"])
            text += "".join(told["committed"])
            assert seen["text"] == text
            figures = seen["figures"]
            assert (figures["rounds"], figures["emitted"]) == (number, emitted)
            assert figures["drafted"] == drafted
            accepted += len(told["path"])
            assert figures["accepted"] == accepted
            path = [str(node) for node in told["path"]]
            own = ["own"] if len(told["committed"]) > len(path) else []
            assert ("The last one ends the answer" in seen["story"]) == (not own)
            shown = ["-1", *path, *own]
            assert seen["nodes"][: len(shown)] == shown
            assert len(seen["nodes"]) == 1 + len(told["tokens"]) + len(own)
            assert sorted(seen["rejected"]) == rejected_nodes(told, run["sampled"])
            # The target has cached the root and all nodes, and keeps those of the text.
            assert seen["kept"] == len(told["committed"])
            assert seen["kept"] + seen["cut"] == 1 + len(told["tokens"])
            for node, chance in enumerate(told["acceptance"]):
                odds = seen["odds"][str(node)]
                assert (odds == "") == (chance is None)
                if odds:
                    assert float(odds) == pytest.approx(chance, abs=0.0051)
            body.send_keys(Keys.ARROW_RIGHT)
        assert run["sampled"] or emitted == 24


@pytest.mark.slow
def test_the_page_opens_at_a_small_tree_with_three_accepted_tokens(browser, written):
    """Or else at a chain with three, as the right drafts have."""
    rounds = [told for m in written.data["runs"][0]["methods"] for told in m["rounds"]]
    rounds = [told for told in rounds if len(told["path"]) >= 3]
    trees = [x for x in rounds if len(set(x["parents"])) < len(x["parents"])]
    best = min(trees or rounds, key=lambda told: len(told["tokens"]))
    nodes = browser.execute_script(LOOK)["nodes"]
    assert nodes[: 1 + len(best["path"])] == ["-1", *map(str, best["path"])]


@pytest.mark.slow
def test_play_shows_all_answers_in_time(browser, written):
    """Plain decoding takes a second for each token, see `written`."""
    run = written.data["runs"][0]
    press(browser, "falcon")
    press(browser, "«")
    press(browser, "▶ Play")

    def lanes():
        return browser.execute_script(
            "return [...document.querySelectorAll('.racer')].map((lane) => "
            "[lane.children[0].textContent, lane.querySelectorAll('.token').length])"
        )

    names = ["plain decoding", *(method["name"] for method in run["methods"])]
    assert [name for name, _ in lanes()] == names
    assert not browser.find_element("id", "still").is_displayed()
    deadline = time.monotonic() + 60
    while dict(lanes())["falcon"] < 24 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert dict(lanes())["falcon"] == 24
    assert dict(lanes())["plain decoding"] < 24
    press(browser, "■ Stop")
    assert browser.find_element("id", "still").is_displayed()
    assert browser.execute_script(LOOK)["figures"]["emitted"] == 24
