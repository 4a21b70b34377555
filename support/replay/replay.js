// The replay page: draws one round of one method at a time from the data in #data, or
// lets all methods of a run race in time.
//
// A run is one way of decoding, greedy or sampled, with the answers of all methods.
// Token text enters the page through textContent only, never as markup. A node of the
// token tree is named by its number; ROOT is the newest committed token, OWN the token
// that the target adds.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const ROOT = -1;
const OWN = "own";
const PLAY_SECONDS = 20; // how long plain decoding takes in the race

const state = { run: 0, method: 0, round: 1, race: null };

// ----------------------------------------------------------------------- small helpers

const $ = (id) => document.getElementById(id);
const run = () => data.runs[state.run];
const method = () => run().methods[state.method];
const current = () => method().rounds[state.round - 1];
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** A new element in `parent`, if there is one; strings become text. */
function add(parent, tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  parent?.append(made);
  return made;
}

/** A token with signs for spaces and line ends; null is CTC's blank. */
function word(token) {
  if (token === null) return "ε";
  return token.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

function short(text, most) {
  const letters = [...text];
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : text;
}

/** Tokens in a sentence; with signs if nothing else would be left. */
function quoted(...tokens) {
  const text = tokens.join("").trim().replaceAll("\n", "↵");
  return `“${text || tokens.map(word).join("")}”`;
}

/** A probability with two decimals: .07, 1.0. */
function chance(value) {
  if (value === null || value === undefined) return "–";
  return value < 0.995 ? value.toFixed(2).slice(1) : "1.0";
}

// -------------------------------------------------------- what follows from the record

for (const each of data.runs.flatMap((one) => one.methods)) {
  let end = 0;
  let seconds = 0;
  let newest = data.prompt.at(-1);
  for (const round of each.rounds) {
    round.root = newest;
    round.before = data.prompt.length + end - 1; // tokens before the root
    end += round.committed.length;
    seconds += sum(Object.values(round.seconds));
    Object.assign(round, { end, ends: seconds, taken: new Set(round.path) });
    round.last = round.path.at(-1) ?? ROOT; // where the walk through the tree ended
    // Unless a draft token ended the answer, the target adds one of its own.
    round.added = round.committed.length > round.path.length;
    newest = round.committed.at(-1);
  }
}

function tokenOf(round, node) {
  if (node === ROOT) return round.root;
  return node === OWN ? round.committed.at(-1) : round.tokens[node];
}

const parentOf = (round, node) => (node === OWN ? round.last : round.parents[node]);

/** The node and all its ancestors, the root last. */
function lineage(round, node) {
  return node === ROOT ? [ROOT] : [node, ...lineage(round, parentOf(round, node))];
}

/** What became of a node. */
function fate(round, node) {
  if (node === ROOT) return "root";
  if (node === OWN) return "own";
  if (round.taken.has(node)) return "accepted";
  const parent = round.parents[node];
  const reached = parent === ROOT || round.taken.has(parent);
  // If the last accepted token ended the answer, nothing below it was looked at.
  if (!reached || (parent === round.last && !round.added)) return "unreached";
  if (!run().sampled) return parent === round.last ? "rejected" : "passed";
  // The drawn siblings are judged in their order, until one of them is accepted.
  const taken = round.path.find((other) => round.parents[other] === parent);
  const before = taken < round.drawn ? taken : round.drawn;
  return node < before ? "rejected" : "passed";
}

const VERDICTS = {
  root: "newest token",
  own: "target's own",
  accepted: "✓ accepted",
  rejected: "✗ rejected",
  passed: "another one taken",
  unreached: "not reached",
};

/**
 * The nodes as an outline, the accepted path and the target's own token first:
 * [{node, bars}].
 * `bars` tells of every level whether a sibling follows below.
 */
function outline(round) {
  const children = new Map([ROOT, ...round.tokens.keys()].map((node) => [node, []]));
  if (round.added) children.get(round.last).push(OWN);
  round.parents.forEach((parent, node) => {
    if (round.taken.has(node)) children.get(parent).unshift(node);
    else children.get(parent).push(node);
  });
  const rows = [];
  const visit = (node, bars) => {
    rows.push({ node, bars });
    const below = children.get(node) ?? [];
    below.forEach((child, n) => visit(child, [...bars, n < below.length - 1]));
  };
  visit(ROOT, []);
  return rows;
}

// ---------------------------------------------------------------------- story and text

function showStory() {
  const round = current();
  const count = round.tokens.length;
  const taken = round.path.length;
  let story = `The draft has ${plural(count, "token")}. `;
  if (!count) {
    story =
      round.room > 0
        ? "Nothing is drafted: the drafter has no token to offer. "
        : "Nothing is drafted: the one token still allowed is the target's own. ";
  } else if (!taken) {
    story += "The target accepts none of them. ";
  } else {
    const text = quoted(...round.path.map((node) => round.tokens[node]));
    story += `The target accepts ${taken === count ? "all" : taken} of them, ${text}. `;
  }
  if (round.added) story += `It adds its own, ${quoted(round.committed.at(-1))}: `;
  else story += "The last one ends the answer: ";
  story += `${plural(round.committed.length, "token")} from one forward.`;
  $("story").textContent = story;
}

function showText() {
  $("text").replaceChildren();
  method()
    .rounds.slice(0, state.round)
    .forEach((round, index) => {
      round.committed.forEach((text, place) => {
        const span = addToken($("text"), { text, kind: kindOf(round, place) });
        if (index === state.round - 1) span.classList.add("new");
      });
    });
  $("text").scrollTop = $("text").scrollHeight;
}

/** Whose token stands at a place of what a round committed. */
function kindOf(round, place) {
  const node = round.path[place];
  if (node === undefined) return "own";
  return round.kinds[node] === "copy" ? "copied" : "accepted";
}

/** Append a token to a text, with a sign for each line end. */
function addToken(place, { text, kind }) {
  const span = add(place, "span", `token ${kind}`);
  text.split("\n").forEach((part, n) => {
    if (n) span.append(add(null, "span", "sign", "↵"), "\n");
    span.append(part);
  });
  return span;
}

// --------------------------------------------------------------------------- the draft

/** A bar with its number; `line` marks a threshold. */
function meter(kind, value, line) {
  const made = add(null, "span", `meter ${kind}`);
  add(made, "i").style.width = `${100 * (value ?? 0)}%`;
  if (line !== undefined) add(made, "em").style.left = `${100 * line}%`;
  add(made, "b", "", chance(value));
  return made;
}

/** Columns of single methods: a heading, what to say of it, and a cell for a node. */
const COLUMNS = {
  chances: {
    head: "chance",
    says: (round) =>
      "The chance is SpecDec++'s prediction that all draft tokens up to this one are " +
      "accepted. The line is the threshold 1 − h below which drafting stops. The " +
      "newest token of a draft is submitted without a prediction.",
    cell: (round, node) => {
      const threshold = method().settings.threshold;
      const line = threshold === undefined ? undefined : 1 - threshold;
      return meter("q", round.notes.chances[node], line);
    },
  },
  counts: {
    head: "confidence, extras",
    says: () =>
      "The confidence is the drafter's highest probability at this step. The less " +
      "confident the drafter is, the more extras CAPE adds beside the token. They " +
      "cost no pass of the drafter.",
    cell: (round, node) => {
      if (node >= round.notes.counts.length) return "";
      return `${chance(round.notes.confidences[node])} → ${round.notes.counts[node]}`;
    },
  },
  k: {
    head: "pass, slot",
    says: (round) =>
      `One pass of the drafter fills ${round.notes.k} levels of the tree at once, ` +
      "its slots. All tokens of a first slot have the same q for what is below them, " +
      "because one pass predicts both.",
    cell: (round, node) => {
      const level = lineage(round, node).length - 2; // from 0 on
      const k = round.notes.k;
      return `${1 + Math.floor(level / k)}, ${1 + (level % k)}`;
    },
  },
};

/** The name in COLUMNS of the column that this method has, or undefined. */
function columnName() {
  const filled = (note) => note !== undefined && note.length !== 0;
  const noted = (name) => method().rounds.some((round) => filled(round.notes[name]));
  return Object.keys(COLUMNS).find(noted);
}

function showDraft() {
  const round = current();
  const rows = outline(round);
  const column = COLUMNS[columnName()];
  const table = add(null, "table");
  const draws = method().rounds.some((each) => each.drawn > 0);
  const heads = ["token", "q", "p", "verdict"];
  heads.splice(
    3,
    0,
    ...(draws ? ["min(1, p/q)"] : []),
    ...(column ? [column.head] : []),
  );
  const head = add(add(table, "thead"), "tr");
  for (const name of [...heads, "attention mask: filled where this row may attend"]) {
    add(head, "th", "", name).scope = "col";
  }
  const body = add(table, "tbody");
  table.style.setProperty(
    "--size",
    `${Math.max(9, Math.min(20, 420 / rows.length))}px`,
  );
  for (const { node, bars } of rows) {
    const row = add(body, "tr", `row ${fate(round, node)}`);
    row.dataset.node = node;
    row.append(tokenCell(round, node, bars));
    const drafted = node !== ROOT && node !== OWN;
    add(row, "td", "", drafted ? meter("q", round.q[node]) : "");
    add(row, "td", "", drafted ? meter("p", round.p[node]) : "");
    if (draws) {
      const known = drafted && round.acceptance[node] !== null;
      add(row, "td", "", known ? meter("p", round.acceptance[node]) : "");
    }
    if (column) {
      const noted =
        drafted && round.kinds[node] !== "copy" && columnName() in round.notes;
      add(row, "td", "", noted ? column.cell(round, node) : "");
    }
    add(row, "td", "verdict", VERDICTS[fate(round, node)]);
    add(row, "td", "", maskRow(round, node, rows));
  }
  const last = add(body, "tr", "cache");
  const stay = `${round.committed.length} of the ${round.tokens.length + 1} new rows stay`;
  add(last, "td", "", `the target's cache: ${stay}`).colSpan = heads.length;
  add(last, "td", "", cacheRow(round, rows));
  $("draft").replaceChildren(table);
  $("draft").classList.remove("choosing");
  $("column-says").textContent = column ? column.says(round) : "";
}

function tokenCell(round, node, bars) {
  const cell = add(null, "td");
  bars.slice(0, -1).forEach((on) => add(cell, "span", on ? "trunk on" : "trunk"));
  if (bars.length) add(cell, "span", bars.at(-1) ? "arm" : "arm end");
  add(cell, "span", `chip ${fate(round, node)}`, short(word(tokenOf(round, node)), 14));
  const kind = round.kinds[node];
  if (kind === "extra" || kind === "copy") add(cell, "span", `from ${kind}`, kind);
  return cell;
}

/** What becomes of the rows that the forward cached, in the columns of the mask. */
function cacheRow(round, rows) {
  // The newest committed token stays without a row: it is fed in the next round.
  const kept = new Set([ROOT, ...round.path].slice(0, round.committed.length));
  const made = add(null, "div", "mask");
  add(made, "span", "kept prefix", `${round.before} kept`);
  for (const { node } of rows) {
    if (node === OWN) continue;
    const stays = kept.has(node);
    add(made, "span", stays ? "kept" : "cut", stays ? "" : "×");
  }
  return made;
}

/** One row of the tree mask: the tokens before, the root, the nodes as listed. */
function maskRow(round, node, rows) {
  if (node === OWN) return "read in the next round";
  const row = add(null, "div", "mask");
  add(row, "span", "may prefix", `${round.before} before`);
  const sees = new Set(lineage(round, node));
  for (const { node: other } of rows) {
    if (other === OWN) continue;
    const may = sees.has(other) ? "may" : "";
    add(row, "span", other === node ? "may self" : may);
  }
  return row;
}

/** Let all rows step back but those of the node under the pointer and its ancestors. */
function point(event) {
  const name = event.target.closest?.(".row")?.dataset.node;
  const node = name === OWN ? OWN : Number(name);
  const lit = new Set(name === undefined ? [] : lineage(current(), node).map(String));
  $("draft").classList.toggle("choosing", lit.size > 0);
  for (const row of $("draft").querySelectorAll(".row")) {
    row.classList.toggle("lit", lit.has(row.dataset.node));
    row.classList.toggle("chosen", row.dataset.node === name);
  }
}

/** Swatches for what this method's drafts can hold, and the words of the table. */
function showLegend() {
  const rounds = method().rounds;
  const fates = new Set(
    rounds.flatMap((round) => round.parents.map((_, n) => fate(round, n))),
  );
  const kinds = new Set(rounds.flatMap((round) => round.kinds));
  const meanings = {
    accepted: "accepted",
    own: "the target's own token, which every forward adds after the accepted ones",
    rejected: "rejected: another token takes its place",
    passed: "not taken: the target chose another token",
    unreached: "not reached: it is below a token that is not taken",
  };
  $("draft-legend").replaceChildren();
  for (const [name, meaning] of Object.entries(meanings)) {
    if (name !== "own" && !fates.has(name)) continue;
    add(
      $("draft-legend"),
      "li",
      "",
      add(null, "span", `chip ${name}`, "token"),
      ` ${meaning}`,
    );
  }
  const origins = {
    extra: "one of CAPE's further choices beside a drafted token",
    copy: "copied from earlier in the text",
  };
  for (const kind of Object.keys(origins).filter((kind) => kinds.has(kind))) {
    add(
      $("draft-legend"),
      "li",
      "",
      add(null, "span", `from ${kind}`, kind),
      `: ${origins[kind]}`,
    );
  }
  const item = add($("draft-legend"), "li", "mask");
  const keys = { may: "may attend", "may self": "itself", kept: "its row stays" };
  for (const [name, meaning] of Object.entries(keys)) {
    item.append(add(null, "span", `key ${name}`), `${meaning} `);
  }
  $("rule").textContent = meaningOfQ(rounds) + ruleOfAcceptance(rounds);
  $("copied-key").hidden = !kinds.has("copy");
}

function meaningOfQ(rounds) {
  const p = "p is the target's of the token after its parent. ";
  if (!rounds.some((round) => round.notes.slots)) {
    return "q is the drafter's probability of a token after its parent, " + p;
  }
  const drawn = rounds.some((round) => round.drawn)
    ? "or, where min(1, p/q) is shown, of the token after its parent; "
    : "";
  return (
    "q is the drafter's probability of the whole branch down to a token, " + drawn + p
  );
}

function ruleOfAcceptance(rounds) {
  if (!run().sampled) {
    return (
      "Greedy decoding: a token is accepted if it is the target's first choice " +
      "after its parent."
    );
  }
  if (!rounds.some((round) => round.drawn)) {
    return (
      "Sampling: the drafter drew none of these tokens. The target draws one from p, " +
      "and a draft token that holds this draw is accepted. So each is accepted with " +
      "probability p."
    );
  }
  const second = rounds.some((round) =>
    round.acceptance.some((each, n) => n < round.drawn && each === null),
  );
  return (
    "Sampling: a token that the drafter drew is accepted with probability min(1, p/q)" +
    (second
      ? ", in which what is left of p stands for p after a rejected sibling"
      : "") +
    ". The others are not judged: where no drawn token is accepted, the " +
    "target draws one of its own, from p or, after a rejection, from what is left " +
    "of p, max(p − q, 0), and a draft token that holds this draw is accepted."
  );
}

function showSlots() {
  const slots = current().notes.slots ?? [];
  $("slots-panel").hidden = !slots.length;
  if (!slots.length) return;
  const table = add(null, "table");
  const head = add(table, "tr");
  slots.forEach((_, n) => (add(head, "th", "", `slot ${n + 1}`).scope = "col"));
  slots[0].forEach((_, place) => {
    const row = add(table, "tr");
    for (const [token, q] of slots.map((slot) => slot[place])) {
      if (q < 0.01) {
        add(row, "td");
        continue;
      }
      const kind = token === null ? "blank" : "";
      add(
        row,
        "td",
        "",
        add(null, "span", `chip ${kind}`, word(token)),
        ` ${chance(q)}`,
      );
    }
  });
  $("slots").replaceChildren(table);
}

// ---------------------------------------------------------------------------- the race

/**
 * One lane of a race for each way of decoding.
 * `plain` holds the value of plain decoding after each token, `value` gives that of a
 * round.
 */
function showLanes(place, plain, value, print) {
  const figure = plain[current().end - 1] ?? null;
  const lanes = [{ name: "plain decoding", kind: "plain", figure }];
  for (const each of run().methods) {
    const there = each.rounds.find((round) => round.end >= current().end);
    const kind = each === method() ? "ours" : "";
    lanes.push({ name: each.name, kind, figure: there ? value(each, there) : null });
  }
  const ends = run().methods.map((each) => value(each, each.rounds.at(-1)));
  const most = Math.max(plain.at(-1), ...ends);
  $(place).replaceChildren();
  for (const { name, kind, figure } of lanes) {
    add($(place), "span", "", name);
    const lane = add($(place), "span", "lane");
    add(lane, "i", kind).style.width = `${(100 * (figure ?? 0)) / most}%`;
    add($(place), "span", "figure", figure === null ? "shorter answer" : print(figure));
  }
}

function showRace() {
  const round = current();
  const plain = run().plain.seconds; // up to each token
  const plainForwards = plain.map((_, n) => n + 1);
  showLanes(
    "forwards",
    plainForwards,
    (each, there) => each.rounds.indexOf(there) + 1,
    String,
  );
  const print = (seconds) => `${seconds.toFixed(2)} s`;
  showLanes("seconds", plain, (_, there) => there.ends, print);
  showTimes(round, plain);

  const past = method().rounds.slice(0, state.round);
  const figures = {
    emitted: round.end,
    rounds: state.round,
    tau: (round.end / state.round).toFixed(2),
    accepted: sum(past.map((each) => each.path.length)),
    drafted: sum(past.map((each) => each.tokens.length)),
  };
  const figure = (name) => {
    const made = add(null, "b", "", String(figures[name]));
    made.dataset.figure = name;
    return made;
  };
  $("totals").replaceChildren(
    "So far ",
    figure("emitted"),
    " tokens in ",
    figure("rounds"),
    " forwards, ",
    figure("tau"),
    " each; ",
    figure("accepted"),
    " of ",
    figure("drafted"),
    " draft tokens were accepted.",
  );
}

/** Where the time of this round went, beside what plain decoding takes for a token. */
function showTimes(round, plain) {
  const names = {
    prefill: "reading the prompt and first draft",
    draft: "drafting",
    verify: "verifying",
  };
  const ms = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  $("times").replaceChildren("This round: ");
  for (const name of Object.keys(names).filter((name) => round.seconds[name] > 0)) {
    const label = `${ms(round.seconds[name])} ${names[name]}, `;
    $("times").append(add(null, "span", `swatch ${name}`), label);
  }
  const token = (plain.at(-1) - plain[0]) / Math.max(1, plain.length - 1);
  const tokens = plural(round.committed.length, "token");
  $("times").append(`for ${tokens}. Plain decoding takes ${ms(token)} a token.`);
}

// ----------------------------------------------------------- going from round to round

/** Choose a round and mark its place; what it holds is not shown yet. */
function mark(number) {
  const count = method().rounds.length;
  state.round = Math.max(1, Math.min(count, number));
  $("number").textContent = state.round;
  $("rounds").textContent = count;
  for (const id of ["first", "back"]) $(id).disabled = state.round === 1;
  for (const id of ["next", "last"]) $(id).disabled = state.round === count;
  [...$("strip").children].forEach((bar, n) => {
    bar.className = n + 1 === state.round ? "now" : n + 1 < state.round ? "past" : "";
  });
}

function go(number) {
  mark(number);
  const count = method().rounds.length;
  showStory();
  showText();
  showDraft();
  showSlots();
  showRace();
  const words = [run().name, method().name, state.round];
  const address = `#${words.map(encodeURIComponent).join("/")}`;
  document.title = `${method().name}, round ${state.round} of ${count}`;
  clearTimeout(go.later); // browsers refuse many changes of the address in a row
  go.later = setTimeout(() => history.replaceState(null, "", address), 200);
}

/** A setting of a method, as a text. */
function setting(name, value) {
  if (!Array.isArray(value)) return `${name} ${value}`;
  if (value.some(Array.isArray)) return `${name} of ${value.length} nodes`;
  return `${name} ${value.join(" ")}`;
}

/** Show a method of a run at the same place of the text. */
function showMethod(index, runIndex = state.run) {
  const place = current().end;
  state.run = runIndex;
  state.method = index;
  const same = method().rounds.findIndex((round) => round.end >= place);
  const chosen = { runs: state.run, tabs: state.method };
  for (const [id, chosenOne] of Object.entries(chosen)) {
    [...$(id).children].forEach((tab, n) =>
      tab.setAttribute("aria-selected", n === chosenOne),
    );
  }
  const settings = Object.entries(method().settings).map((each) => setting(...each));
  const idea = method().idea.replace(/\.$/, "");
  $("idea").textContent = [idea, ...settings].join(" · ");
  const most = Math.max(...method().rounds.map((round) => round.committed.length));
  $("strip").replaceChildren();
  method().rounds.forEach((round, n) => {
    const bar = add($("strip"), "span");
    add(bar, "i").style.height = `${(100 * round.committed.length) / most}%`;
    bar.title = `round ${n + 1}: ${plural(round.committed.length, "token")}`;
    bar.addEventListener("click", () => go(n + 1));
  });
  showLegend();
  go(same < 0 ? method().rounds.length : same + 1);
}

// -------------------------------------------------------------------- the race in time

/** All answers of the run: [{name, tokens: [{text, kind}], times}], in seconds. */
function racers() {
  const plain = run().plain.tokens.map((text) => ({ text, kind: "own" }));
  const all = [{ name: "plain decoding", tokens: plain, times: run().plain.seconds }];
  for (const { name, rounds } of run().methods) {
    const tokens = [];
    const times = [];
    for (const round of rounds) {
      round.committed.forEach((text, place) => {
        tokens.push({ text, kind: kindOf(round, place) });
        times.push(round.ends);
      });
    }
    all.push({ name, tokens, times });
  }
  return all;
}

/** Start the race at the round that is shown, or stop it and show where it is. */
function play(on) {
  if (!on && !state.race) return;
  $("play").textContent = on ? "■ Stop" : "▶ Play";
  $("racing").hidden = !on;
  $("still").hidden = on;
  if (!on) {
    cancelAnimationFrame(state.race.frame);
    state.race = null;
    go(state.round);
    return;
  }
  if (state.round === method().rounds.length) mark(1);
  const from = method().rounds[state.round - 2]?.ends ?? 0;
  const all = racers();
  $("lanes").replaceChildren();
  for (const racer of all) {
    const lane = add($("lanes"), "div", "racer");
    add(lane, "b", "", racer.name);
    racer.bar = add(add(lane, "span", "lane"), "i", "ours");
    if (racer.name === method().name) lane.classList.add("shown");
    racer.figure = add(lane, "span", "figure");
    racer.text = add(lane, "p", "mono");
    racer.shown = 0;
  }
  const slower = Math.max(1, Math.ceil(PLAY_SECONDS / run().plain.seconds.at(-1)));
  state.race = { all, from, slower, began: performance.now(), frame: 0 };
  step();
}

/** Show what every racer has written by now, and come again. */
function step() {
  const { all, from, slower, began } = state.race;
  const now = from + (performance.now() - began) / 1000 / slower;
  const most = Math.max(...all.map((racer) => racer.tokens.length));
  const end = Math.max(...all.map((racer) => racer.times.at(-1)));
  for (const racer of all) {
    while (racer.times[racer.shown] <= now) {
      addToken(racer.text, racer.tokens[racer.shown]);
      racer.shown += 1;
    }
    racer.text.scrollTop = racer.text.scrollHeight;
    racer.bar.style.width = `${(100 * racer.shown) / most}%`;
    const done = racer.shown === racer.tokens.length;
    const after = done ? ` in ${racer.times.at(-1).toFixed(2)} s` : "";
    racer.figure.textContent = plural(racer.shown, "token") + after;
  }
  $("time").textContent =
    `${Math.min(now, end).toFixed(2)} s after the start, ` +
    `${slower} times slower than recorded`;
  const rounds = method().rounds;
  mark(rounds.findLastIndex((round) => round.ends <= now) + 1);
  if (now < end) state.race.frame = requestAnimationFrame(step);
}

/** Go where an address asks: #greedy/falcon/12. */
function goTo(address) {
  const [first, second, number] = new URL(address).hash.slice(1).split("/");
  const runIndex = data.runs.findIndex((one) => encodeURIComponent(one.name) === first);
  const methods = data.runs[runIndex]?.methods ?? [];
  const index = methods.findIndex((each) => encodeURIComponent(each.name) === second);
  if (index < 0 || !/^\d+$/.test(number)) return;
  play(false);
  if (runIndex !== state.run || index !== state.method) showMethod(index, runIndex);
  go(Number(number));
}

/** Where the page opens: at the smallest tree of which three tokens are accepted. */
function opening() {
  const all = run().methods.flatMap((each, index) =>
    each.rounds.map((round, n) => ({ index, number: n + 1, round })),
  );
  all.sort((a, b) => a.round.tokens.length - b.round.tokens.length);
  const branches = ({ parents }) => new Set(parents).size < parents.length;
  return (
    all.find(({ round }) => round.path.length >= 3 && branches(round)) ??
    all.find(({ round }) => round.path.length >= 3) ??
    all.find(({ round }) => round.path.length) ??
    all[0]
  );
}

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const buttons = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last" };
  if (buttons[event.key]) {
    $(buttons[event.key]).click();
  } else if (event.key === " " && !event.target.closest?.("button, summary")) {
    play(!state.race);
  } else {
    return;
  }
  event.preventDefault();
}

function listen() {
  const steps = {
    first: () => 1,
    back: () => state.round - 1,
    next: () => state.round + 1,
  };
  steps.last = () => method().rounds.length;
  for (const [id, number] of Object.entries(steps)) {
    $(id).addEventListener("click", () => {
      play(false);
      go(number());
    });
  }
  $("play").addEventListener("click", () => play(!state.race));
  document.addEventListener("keydown", onKey);
  document.addEventListener("pointerover", point);
  window.addEventListener("hashchange", (event) => goTo(event.newURL));
}

/** A row of tabs, one for each name. */
function addTabs(id, names, show) {
  names.forEach((name, index) => {
    const tab = add($(id), "button", "", name);
    tab.setAttribute("role", "tab");
    tab.addEventListener("click", () => {
      play(false);
      show(index);
    });
  });
}

function start() {
  const names = (items) => items.map((item) => item.name);
  addTabs("runs", names(data.runs), (index) => showMethod(state.method, index));
  addTabs("tabs", names(run().methods), (index) => showMethod(index));
  const { prompt, target, device } = data.about;
  const tokens = plural(data.prompt.length, "token");
  $("asked").firstElementChild.textContent =
    `Prompt (${tokens}): “${short(prompt, 90)}”`;
  $("prompt").textContent = data.prompt.join("");
  $("about").append(`${target} on ${device}. Keys: `);
  const keys = { "← →": "rounds", "Home End": "first and last", Space: "play" };
  for (const [key, does] of Object.entries(keys)) {
    $("about").append(add(null, "kbd", "", key), ` ${does} `);
  }
  $("main").hidden = false;
  const asked = location.href;
  listen();
  const { index, number } = opening();
  showMethod(index);
  go(number);
  goTo(asked);
}

start();
