// The replay page: draws one round of one method at a time from the data in #data.
//
// Token text goes into the page through textContent only, never as markup. A node of the token tree
// is named by its number; -1 is the root (the newest committed token), "bonus" the target's own.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const ROOT = -1;
const BLANK = -1; // the CTC blank among the symbols of a slot
const BONUS = "bonus";
const PLAY_MS = 1500; // a round is shown for so long

const state = { method: 0, round: 1, chosen: null, timer: null };

// ------------------------------------------------------------------------------- small helpers

const $ = (id) => document.getElementById(id);
const method = () => data.methods[state.method];
const told = () => method().rounds[state.round - 1]; // what the record tells of this round
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function fill(parent, namespace, tag, attributes, children) {
  const made = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children); // strings become text
  parent?.append(made);
  return made;
}

const html = (parent, tag, attributes, ...children) => fill(parent, null, tag, attributes, children);
const svg = (parent, tag, attributes, ...children) =>
  fill(parent, "http://www.w3.org/2000/svg", tag, attributes, children);

/** A token's text; spaces and line ends can be seen where `signs`. */
function word(id, signs = true) {
  if (id === BLANK) return "ε";
  const text = data.texts[id];
  return signs ? text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥") : text;
}

const short = (text, most) => ([...text].length > most ? [...text].slice(0, most - 1).join("") + "…" : text);
/** Tokens in a sentence, without the space before; with signs where nothing else would be left. */
function quoted(...ids) {
  const text = ids.map((id) => word(id, false)).join("");
  return `“${text.trim() ? text.trim().replaceAll("\n", "↵") : ids.map((id) => word(id)).join("")}”`;
}

/** A probability in three letters: .07, 1.0. */
function chance(value) {
  if (value === null || value === undefined) return "–";
  return value < 0.995 ? value.toFixed(2).slice(1) : "1.0";
}

const ordinal = (n) => n + (n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th");

// ------------------------------------------------------------------- what follows from the record

for (const each of data.methods) {
  let end = 0;
  for (const round of each.rounds) {
    round.start = end; // new tokens before this round
    round.kept = round.committed.slice(0, each.answer.length - end); // the rest: after the end
    end += round.kept.length;
    round.end = end;
    round.root = round.start ? each.answer[round.start - 1] : data.prompt.at(-1);
    round.taken = new Set(round.path);
  }
}

/** The node, its ancestors and the root: what its row of the mask sees of the tree. */
function lineage(node) {
  const round = told();
  const found = [];
  if (node === BONUS) {
    found.push(BONUS);
    node = round.path.at(-1) ?? ROOT;
  }
  while (node !== ROOT) {
    found.push(node);
    node = round.parents[node];
  }
  return [...found, ROOT];
}

/** Children of every node, the target's own token first where it stands. */
function children(round) {
  const of = { [ROOT]: [] };
  round.tokens.forEach((_, node) => (of[node] = []));
  of[round.path.at(-1) ?? ROOT].push(BONUS);
  round.parents.forEach((parent, node) => of[parent].push(node));
  return of;
}

const tokenOf = (round, node) =>
  node === ROOT ? round.root : node === BONUS ? round.committed.at(-1) : round.tokens[node];

/** The classes of a node: what became of it, and where it is from. */
function classes(round, node) {
  if (node === ROOT) return "root";
  if (node === BONUS) return "bonus";
  return `${round.taken.has(node) ? "taken" : "refused"} ${round.kind[node]}`;
}

/** One sentence on a node, for the line below the tree and for screen readers. */
function sentence(round, node) {
  if (node === ROOT) {
    return `${quoted(round.root)} is the newest token of the text. The target reads it in this round together with the draft.`;
  }
  if (node === BONUS) {
    return `${quoted(round.committed.at(-1))} is the target's own token, which comes free with every round. It was not drafted, so the mask has no row for it; it is read in the next round.`;
  }
  const from = {
    draft: "Drafted",
    extra: "Listed beside the trajectory",
    copy: "Copied from earlier in the text",
  }[round.kind[node]];
  const q = round.q[node] === null ? "" : ` with probability ${chance(round.q[node])}`;
  const rank = round.rank[node] ? `, the drafter's ${ordinal(round.rank[node])} choice` : "";
  const above = lineage(node).slice(1, -1).reverse().map((n) => quoted(round.tokens[n]));
  const sees = [`the ${round.prefix} before`, quoted(round.root), ...above].join(", ");
  const end = round.taken.has(node) ? "accepted" : "not taken";
  return `${quoted(round.tokens[node])}: ${from}${q}${rank}. The target gave it ${chance(round.p[node])}: ${end}. It sees ${sees} and itself.`;
}

// ------------------------------------------------------------------------------- the text so far

/** All tokens of the answer once per method; `showText` then only changes classes. */
function makeText() {
  const line = $("text");
  line.replaceChildren();
  const add = (id, kind) => html(line, "span", { class: `token ${kind}` }, ...withSigns(id));
  data.prompt.forEach((id) => html(line, "span", { class: "token prompt" }, word(id, false).replaceAll("\n", "↵")));
  line.append("\n");
  method().rounds.forEach((round, index) => {
    round.kept.forEach((id, place) => {
      const node = round.path[place];
      const kind = node === undefined ? "own" : round.kind[node] === "copy" ? "copied" : "accepted";
      add(id, kind).dataset.round = index + 1;
    });
  });
}

/** The text of a token with a sign where a line ends. */
function withSigns(id) {
  const parts = word(id, false).split("\n");
  return parts.flatMap((part, n) => (n ? [html(null, "span", { class: "sign" }, "↵"), "\n", part] : [part]));
}

function showText() {
  for (const token of $("text").querySelectorAll("[data-round]")) {
    const round = Number(token.dataset.round);
    token.classList.toggle("new", round === state.round);
    token.classList.toggle("later", round > state.round);
  }
}

function showStory() {
  const round = told();
  const count = round.tokens.length;
  const taken = round.path.length;
  const text = taken ? quoted(...round.path.map((node) => round.tokens[node])) : "";
  const own = quoted(round.committed.at(-1));
  let story = `The drafter offers ${plural(count, "token")}. `;
  if (!count) story = "Nothing was drafted. ";
  else if (!taken) story += "The target takes none of them ";
  else story += `The target takes ${taken < count ? taken : ["", "it", "both"][count] ?? `all ${count}`}, ${text}, `;
  story += count ? `and adds its own, ${own}: ` : `The target writes its own, ${own}: `;
  story += `${plural(round.committed.length, "token")} from one forward.`;
  if (round.kept.length < round.committed.length) {
    story += ` The answer ends after ${plural(round.kept.length, "token")} of them.`;
  }
  $("story").textContent = story;
}

// -------------------------------------------------------------------------------------- the tree

const BOX = { width: 120, height: 54, across: 38, down: 12, head: 30, edge: 4 };

/** Places {node: {column, y}} of the tree: the first child beside its parent, the others below. */
function layout(round) {
  const of = children(round);
  const free = []; // the first free y in every column
  const places = {};
  const put = (node, column, least) => {
    const y = Math.max(least, free[column] ?? 0);
    free[column] = y + BOX.height + BOX.down;
    places[node] = { column, y };
    for (const child of of[node] ?? []) put(child, column + 1, y);
  };
  put(ROOT, 0, 0);
  const size = { columns: free.length, height: Math.max(...free) - BOX.down };
  return { places, size };
}

function showTree() {
  const round = told();
  const { places, size } = layout(round);
  const left = (column) => BOX.edge + column * (BOX.width + BOX.across);
  const top = BOX.head + BOX.edge;
  const width = left(size.columns) - BOX.across + BOX.edge;
  const height = top + size.height + BOX.edge;
  $("tree").replaceChildren();
  const picture = svg($("tree"), "svg", {
    viewBox: `0 0 ${width} ${height}`,
    style: `width:${width / 16}rem`,
    role: "group",
    "aria-label": "Token tree. Arrow up and down go from node to node.",
  });
  showColumns(picture, round, size, left, height);

  for (const [name, { column, y }] of Object.entries(places)) {
    if (Number(name) === ROOT) continue;
    const node = name === BONUS ? BONUS : Number(name);
    const parent = node === BONUS ? round.path.at(-1) ?? ROOT : round.parents[node];
    const [x1, y1] = [left(column - 1) + BOX.width, top + places[parent].y + BOX.height / 2];
    const [x2, y2] = [left(column), top + y + BOX.height / 2];
    const middle = (x1 + x2) / 2;
    const kind = node === BONUS ? "to-bonus" : round.taken.has(node) ? "taken" : "";
    const d = `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
    svg(picture, "path", { class: `edge ${kind}`, d, "data-edge": node });
  }
  const order = [ROOT, ...round.tokens.keys(), BONUS];
  for (const node of order) {
    const { column, y } = places[node];
    showNode(picture, round, node, left(column), top + y);
  }
  onlyOneTabStop(picture);
}

/** Above every column how far ahead it looks; for Falcon also the passes, every other as a band. */
function showColumns(picture, round, size, left, height) {
  for (let column = 0; column < size.columns; column++) {
    const node = round.pass ? nodeOfColumn(round, column) : null;
    let label = column ? `+${column}` : "newest";
    if (node !== null) {
      label = `pass ${round.pass[node]}, slot ${round.slot[node]}`;
      const x = left(column) - BOX.across / 2;
      const width = BOX.width + BOX.across;
      if (round.pass[node] % 2) svg(picture, "rect", { class: "band", x, y: 0, width, height });
    }
    const x = left(column) + BOX.width / 2;
    svg(picture, "text", { class: "small", x, y: 19, "text-anchor": "middle" }, label);
  }
}

/** A drafted node in this column, which tells the column's pass and slot; null if there is none. */
function nodeOfColumn(round, column) {
  const found = round.tokens.findIndex(
    (_, node) => round.kind[node] === "draft" && depth(round, node) === column,
  );
  return found < 0 ? null : found;
}

function depth(round, node) {
  let levels = 0;
  for (; node !== ROOT; node = round.parents[node]) levels++;
  return levels;
}

function showNode(picture, round, node, x, y) {
  const group = svg(picture, "g", {
    class: `node ${classes(round, node)}`,
    transform: `translate(${x},${y})`,
    role: "img",
    "data-node": node,
    "aria-label": sentence(round, node),
  });
  const { width, height } = BOX;
  svg(group, "rect", { class: "box", width, height, rx: node === BONUS ? 14 : 7 });
  if (node === BONUS) {
    svg(group, "rect", { class: "inner", x: 4, y: 4, width: width - 8, height: height - 8, rx: 11 });
  }
  const left = node === BONUS ? 12 : 9;
  svg(group, "text", { class: "word mono", x: left, y: 21 }, short(word(tokenOf(round, node)), 11));
  if (node === ROOT || node === BONUS) {
    const label = node === ROOT ? "newest token" : "target's own";
    svg(group, "text", { class: "small", x: left, y: 41 }, label);
    return;
  }
  [["q", round.q[node], left], ["p", round.p[node], 48]].forEach(([kind, value, x]) => {
    svg(group, "text", { class: "small", x, y: 38 }, `${kind} ${chance(value)}`);
    svg(group, "rect", { class: "bar-back", x, y: 43.5, width: 32, height: 4, rx: 2 });
    svg(group, "rect", { class: `bar-${kind}`, x, y: 43.5, width: 32 * (value ?? 0), height: 4, rx: 2 });
  });
  const rank = round.rank[node] ? ordinal(round.rank[node]) : "copy";
  const mark = round.kind[node] === "extra" ? `+${rank}` : rank;
  svg(group, "text", { class: "small from", x: width - 8, y: 38, "text-anchor": "end" }, mark);
}

function showLegend() {
  const kinds = new Set(method().rounds.flatMap((round) => round.kind));
  const lines = [
    "q: the drafter's probability, p: the target's",
    "1st, 2nd: the drafter's choice",
    "filled: accepted",
    "dashed: not taken",
    "double edge: the target's own",
  ];
  if (kinds.has("extra")) lines.push("dotted, +: beside the trajectory");
  if (kinds.has("copy")) lines.push("long dashes, copy: from the context");
  $("tree-legend").replaceChildren(...lines.map((line) => html(null, "li", {}, line)));
}

// -------------------------------------------------------------------------------------- the mask

const MASK = { left: 104, top: 92, prefix: 62 }; // room for heads of rows and columns, folded prefix

function maskSize(rows) {
  const cell = Math.max(13, Math.min(24, 520 / rows));
  const width = MASK.left + MASK.prefix + rows * cell + 46; // the last slanted head leans out
  return { cell, width, height: MASK.top + rows * cell + 4 };
}

function showMask() {
  const round = told();
  const nodes = [ROOT, ...round.tokens.keys()];
  const { cell, width, height } = maskSize(nodes.length);
  const columnX = (n) => MASK.left + MASK.prefix + n * cell;
  $("mask").replaceChildren();
  const picture = svg($("mask"), "svg", {
    viewBox: `0 0 ${width} ${height}`,
    style: `width:${width / 16}rem`,
    role: "group",
    "aria-label": "Attention mask. Arrow up and down go from row to row.",
  });
  const slanted = (x, text, column) =>
    svg(picture, "text", {
      class: "column-head mono",
      transform: `translate(${x},${MASK.top - 6}) rotate(-50)`,
      "data-column": column,
    }, text);
  slanted(MASK.left + MASK.prefix / 2, `${round.prefix} before`, "prefix");
  nodes.forEach((node, n) => slanted(columnX(n) + cell / 2 + 3, short(word(tokenOf(round, node)), 11), node));

  nodes.forEach((node, n) => {
    const y = MASK.top + n * cell;
    const row = svg(picture, "g", {
      class: `mask-row ${classes(round, node)}`,
      role: "img",
      "data-node": node,
      "aria-label": `Row ${n + 1}. ${sentence(round, node)}`,
    });
    svg(row, "rect", { class: "rowband", x: 0, y, width: columnX(nodes.length), height: cell });
    const text = short(word(tokenOf(round, node)), 11);
    svg(row, "text", { class: "row-head mono", x: MASK.left - 8, y: y + cell / 2 + 4, "text-anchor": "end" }, text);
    svg(row, "rect", { class: "may", x: MASK.left + 1, y: y + 1, width: MASK.prefix - 2, height: cell - 2, rx: 3 });
    const sees = new Set(lineage(node));
    nodes.forEach((other, column) => {
      const box = { x: columnX(column) + 1, y: y + 1, width: cell - 2, height: cell - 2, rx: 3 };
      if (sees.has(other)) svg(row, "rect", { class: other === node ? "may self" : "may", ...box });
      else svg(row, "rect", { class: "grid", ...box });
    });
  });
  onlyOneTabStop(picture);
}

// ----------------------------------------------------------------------- pointing at a node

function choose(node) {
  state.chosen = node;
  const lit = new Set(node === null ? [] : lineage(node).map(String));
  for (const area of ["tree", "mask"]) $(area).classList.toggle("choosing", node !== null);
  $("mask").classList.toggle("choosing", node !== null && node !== BONUS);
  for (const item of document.querySelectorAll("[data-node], [data-edge], [data-column]")) {
    const name = item.dataset.node ?? item.dataset.edge ?? item.dataset.column;
    item.classList.toggle("lit", lit.has(name) || name === "prefix");
    item.classList.toggle("chosen", item.dataset.node === String(node));
  }
  const hint = "Point at a token here or in the mask, or go to it with Tab and the arrow keys, to see what it sees.";
  $("seen").textContent = node === null ? hint : sentence(told(), node);
}

const nodeAt = (target) => {
  const name = target?.closest?.("[data-node]")?.dataset.node;
  return name === undefined ? null : name === BONUS ? BONUS : Number(name);
};

/** Of a picture's nodes one is reached with Tab, the others from there with the arrow keys. */
function onlyOneTabStop(picture) {
  picture.querySelectorAll("[data-node]").forEach((item, n) => item.setAttribute("tabindex", n ? -1 : 0));
}

function listenForNodes(area) {
  area.addEventListener("pointerover", (event) => choose(nodeAt(event.target) ?? nodeAt(document.activeElement)));
  area.addEventListener("pointerleave", () => choose(nodeAt(document.activeElement)));
  area.addEventListener("focusin", (event) => choose(nodeAt(event.target)));
  area.addEventListener("focusout", () => choose(null));
  area.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const items = [...area.querySelectorAll("[data-node][tabindex]")];
    const next = items[items.indexOf(event.target) + step];
    if (!step || !next) return;
    event.target.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
    event.preventDefault();
  });
}

// ------------------------------------------------------------------- what is particular to a method

/** A bar with its number in it; `line` marks a threshold. */
function meter(value, line = null) {
  const made = html(null, "span", { class: "meter" });
  html(made, "i", { style: `width:${100 * (value ?? 0)}%` });
  if (line !== null) html(made, "em", { style: `left:${100 * line}%` });
  html(made, "b", {}, chance(value));
  return made;
}

/** A token in a box that lights its node. */
function chip(round, node) {
  const kind = round.taken.has(node) ? "taken" : round.kind[node];
  return html(null, "span", { class: `chip mono ${kind}`, "data-node": node }, word(round.tokens[node]));
}

/** A table from rows of cells, each a string or a list of elements. */
function table(heads, rows) {
  const made = html(null, "table");
  const head = html(html(made, "thead"), "tr");
  heads.forEach((name) => html(head, "th", { scope: "col" }, name));
  const body = html(made, "tbody");
  for (const cells of rows) {
    const row = html(body, "tr");
    cells.forEach((cell) => html(row, "td", {}, ...[cell].flat()));
  }
  return made;
}

/** Nodes that the drafter drafted in a chain: neither extras nor copies. */
const drafted = (round) => [...round.tokens.keys()].filter((node) => round.kind[node] === "draft");

const PANELS = {
  /** SpecDec++: the chance that all are accepted, after every token, and where it stopped. */
  stops: {
    applies: (each) => each.rounds.some((round) => round.chances),
    width: 24, // rem
    title: "When to stop drafting",
    says: () => {
      const { stop, threshold } = method().settings;
      const rule = stop === "head" ? ` It stops when the chance falls below 1 − h = ${(1 - threshold).toFixed(2)} (the line).` : "";
      return `A small head predicts, from the draft model's hidden state, whether each token will be accepted; the product is the chance that all are.${rule} The newest token is always submitted without a judgement.`;
    },
    draw: (round) => {
      const { stop, threshold } = method().settings;
      const line = stop === "head" ? 1 - threshold : null;
      const rows = drafted(round).map((node, n) => [
        String(n + 1),
        [chip(round, node)],
        round.chances?.[n] === undefined ? "not judged" : [meter(round.chances[n], line)],
        round.taken.has(node) ? "accepted" : "not taken",
      ]);
      const made = [table(["", "draft token", "chance that all are accepted", "in truth"], rows)];
      const reason = {
        head: "the chance fell below the line",
        fixed: "K tokens are drafted",
        confidence: "the drafter was not confident enough",
        entropy: "the drafter's entropy was too high",
        limit: "a round holds no more",
      }[round.stopped];
      if (round.stopped) made.push(html(null, "p", { class: "said" }, `Drafting stopped: ${reason ?? round.stopped}.`));
      return made;
    },
  },

  /** CAPE: confidence and set size per step. */
  extras: {
    applies: (each) => each.rounds.some((round) => round.counts),
    width: 40, // rem
    title: "The less sure, the more extras",
    says: () => "Beside each token of the trajectory CAPE lists further choices from the same distribution, many where the drafter was unsure. They cost no drafter pass, only rows in the verification.",
    draw: (round) => {
      const rows = drafted(round).map((node, n) => {
        const siblings = [...round.tokens.keys()].filter(
          (other) => round.kind[other] === "extra" && round.parents[other] === round.parents[node],
        );
        return [
          [chip(round, node)],
          [meter(round.confidences?.[n])],
          String(round.counts?.[n] ?? siblings.length),
          siblings.map((other) => chip(round, other)),
        ];
      });
      return [table(["trajectory", "confidence", "S(p)", "extras in the tree"], rows)];
    },
  },

  /** Falcon: which pass and block made which node. */
  passes: {
    applies: (each) => each.rounds.some((round) => round.pass),
    width: 26, // rem
    title: "Passes and blocks",
    says: () => "A pass of the drafter fills k slots at once. A block continues one branch; the candidates of its second slot are shared by all tokens of its first, as both were predicted together.",
    draw: (round) => {
      const blocks = new Map(); // the node that a block continues: {pass, slots}
      for (const node of drafted(round)) {
        let above = round.parents[node];
        for (let up = 1; up < round.slot[node]; up++) above = round.parents[above];
        if (!blocks.has(above)) blocks.set(above, { pass: round.pass[node], slots: [] });
        const slots = blocks.get(above).slots;
        (slots[round.slot[node] - 1] ??= []).push(node);
      }
      const most = Math.max(1, ...[...blocks.values()].map((block) => block.slots.length));
      const heads = ["pass", "continues", ...Array.from({ length: most }, (_, n) => `slot ${n + 1}`)];
      const rows = [...blocks].map(([above, { pass, slots }]) => [
        String(pass),
        lineage(above).slice(0, -1).reverse().map((node) => word(round.tokens[node])).join("") || quoted(round.root),
        ...Array.from({ length: most }, (_, n) => (slots[n] ?? []).map((node) => chip(round, node))),
      ]);
      return [table(heads, rows)];
    },
  },

  /** CTC-drafter: slots with their symbols, and the alignments behind every prefix. */
  slots: {
    applies: (each) => each.rounds.some((round) => round.ctc),
    width: 50, // rem
    title: "Slots, and what they collapse to",
    says: () => "One pass fills all slots, each with a token or a blank. Repeats merge, then blanks (ε) drop: the ways below become the same prefix, and their probabilities add up.",
    draw: (round) => {
      if (!round.ctc) return ["No slots in this round."];
      const symbol = (id) => html(null, "span", { class: `chip mono ${id === BLANK ? "blank" : ""}` }, word(id));
      const pair = (id, q) => html(null, "div", {}, symbol(id), chance(q));
      const count = Math.max(...round.ctc.slots.map((slot) => slot.filter(([, q]) => q >= 0.01).length));
      const slots = table(
        round.ctc.slots.map((_, n) => `slot ${n + 1}`),
        Array.from({ length: count }, (_, n) =>
          round.ctc.slots.map((slot) => (slot[n]?.[1] >= 0.01 ? [pair(...slot[n])] : "")),
        ),
      );
      if (!round.ctc.prefixes) return [slots];
      const rows = round.ctc.prefixes.map(({ worth, ways }, node) => [
        lineage(node).slice(0, -1).reverse().map((n) => chip(round, n)),
        [meter(worth)],
        ways.map(([way, value]) => html(null, "div", {}, ...way.map(symbol), ` ${chance(value)}`)),
      ]);
      return [slots, table(["prefix", "probability", "its likeliest ways"], rows)];
    },
  },

  /** GLIDE: which of the target's rows the drafter could read. */
  glimpse: {
    applies: (each) => each.reads.length > 0,
    width: 36, // rem
    title: "What the drafter could read of the target",
    says: () => `The drafter attends to the keys and values of the target's layer ${method().reads.join(", ")} (from 0). They end where the last verification ended: the newest token and the draft have none yet, so for those it has only its own.`,
    draw: (round) => {
      const inputs = [ROOT, ...drafted(round).slice(0, -1)];
      const rows = inputs.map((node, n) => [
        quoted(tokenOf(round, node)),
        [html(null, "span", { class: "chip taken" }, `rows 0 – ${round.prefix - 1}`)],
        inputs.slice(0, n + 1).map((other) => html(null, "span", { class: "chip mono" }, word(tokenOf(round, other)))),
        drafted(round)[n] === undefined ? "" : [chip(round, drafted(round)[n])],
      ]);
      return [table(["reading", "the target's rows", "only its own rows", "it drafts"], rows)];
    },
  },
};

function showMethod() {
  const panels = Object.values(PANELS).filter((panel) => panel.applies(method()));
  $("method-panel").hidden = !panels.length;
  if (!panels.length) return;
  $("method-panel").style.flexBasis = `min(100%, ${panels[0].width}rem)`;
  $("method-title").textContent = panels[0].title;
  $("method-says").textContent = panels[0].says();
  $("method").replaceChildren(...panels[0].draw(told()));
  for (const panel of panels.slice(1)) {
    html($("method"), "h2", { class: "next" }, panel.title);
    html($("method"), "p", { class: "said" }, panel.says());
    $("method").append(...panel.draw(told()));
  }
}

// --------------------------------------------------------------------------------- times and race

/** A bar: a name, parts [[class, width in percent]], and what it comes to. */
function lane(parent, name, parts, figure) {
  html(parent, "span", {}, name);
  const bar = html(parent, "span", { class: "lane", "aria-hidden": "true" });
  parts.forEach(([kind, width]) => html(bar, "i", { class: kind, style: `width:${width}%` }));
  html(parent, "span", { class: "figure" }, figure);
}

function showTimes() {
  const total = (round) => sum(Object.values(round.ms));
  const scale = 100 / Math.max(...method().rounds.map(total));
  const order = ["draft", "transform", "verify", "other"];
  const parts = order.filter((name) => name in told().ms);
  const bars = html(null, "div", { class: "bars" });
  lane(bars, "this round", parts.map((name) => [name, told().ms[name] * scale]), `${total(told()).toFixed(1)} ms`);
  const names = html(null, "ul", { class: "legend" });
  for (const name of parts) {
    html(names, "li", {}, html(null, "span", { class: `swatch ${name}` }), `${name} ${told().ms[name].toFixed(1)} ms`);
  }
  const first = state.round === 1 && !("draft" in told().ms);
  const note = first ? [html(null, "p", { class: "said" }, "The first draft is made while the prompt is read and counts as that.")] : [];
  $("times").replaceChildren(bars, names, ...note);
}

function showRace() {
  const round = told();
  const bars = html(null, "div", { class: "bars" });
  const all = method().answer.length;
  lane(bars, "plain decoding", [["plain", (100 * round.end) / all]], plural(round.end, "forward"));
  data.methods.forEach((each) => {
    const needed = each.rounds.findIndex((other) => other.end >= round.end) + 1;
    const kind = each === method() ? "ours" : "theirs";
    if (needed) lane(bars, each.title, [[kind, (100 * needed) / all]], plural(needed, "forward"));
  });
  $("race").replaceChildren(bars);

  const before = method().rounds.slice(0, state.round);
  const figures = {
    forwards: state.round,
    emitted: round.end,
    drafted: sum(before.map((each) => each.tokens.length)),
    accepted: sum(before.map((each) => each.path.length)),
    tau: (round.end / state.round).toFixed(2),
  };
  const figure = (name) => html(null, "b", { "data-figure": name }, String(figures[name]));
  $("totals").replaceChildren(
    "So far ", figure("emitted"), " tokens in ", figure("forwards"), " target forwards, ",
    figure("tau"), " tokens per forward; ", figure("accepted"), " of ", figure("drafted"),
    " draft tokens accepted. A forward over a draft takes longer than one over a single token, so forwards are not yet seconds.",
  );
}

// ----------------------------------------------------------------------------- going from round to round

function show() {
  const rounds = method().rounds.length;
  state.round = Math.max(1, Math.min(rounds, state.round));
  $("number").textContent = state.round;
  $("rounds").textContent = rounds;
  $("slider").max = rounds;
  $("slider").value = state.round;
  $("slider").setAttribute("aria-valuetext", `round ${state.round} of ${rounds}`);
  for (const id of ["first", "back"]) $(id).disabled = state.round === 1;
  for (const id of ["next", "last"]) $(id).disabled = state.round === rounds;
  [...$("strip").children].forEach((bar, n) => {
    bar.className = n + 1 === state.round ? "now" : n + 1 < state.round ? "past" : "";
  });
  showStory();
  showText();
  showTree();
  showMask();
  showMethod();
  showTimes();
  showRace();
  choose(null);
  const name = data.methods.length > 1 ? `${encodeURIComponent(method().name)}/` : "";
  $("link").href = `#${name}${state.round}`;
  document.title = `${method().title}, round ${state.round} of ${rounds}`;
  clearTimeout(show.later); // browsers refuse too many changes of the address in a row
  show.later = setTimeout(() => history.replaceState(null, "", $("link").href), 200);
}

function showAnotherMethod(index) {
  const place = told()?.start ?? 0;
  state.method = index;
  const same = method().rounds.findIndex((round) => round.end > place); // the same place in the text
  state.round = same < 0 ? 1 : same + 1;
  [...$("tabs").children].forEach((tab, n) => {
    tab.setAttribute("aria-selected", n === index);
    tab.setAttribute("tabindex", n === index ? 0 : -1);
  });
  $("title").textContent = data.methods.length > 1 ? "Decoding, round by round" : `${method().title}, round by round`;
  const most = Math.max(...method().rounds.map((round) => round.committed.length));
  $("strip").replaceChildren();
  method().rounds.forEach((round, n) => {
    const bar = html($("strip"), "span", { style: `height:${(100 * round.committed.length) / most}%` });
    bar.title = `round ${n + 1}: ${plural(round.committed.length, "token")}`;
    bar.addEventListener("click", () => go(n + 1));
  });
  const used = Object.entries(method().settings).map(([name, value]) => `${name} ${Array.isArray(value) ? short(JSON.stringify(value), 40) : value}`);
  const { target, device, prompt, sampled } = data.about;
  $("about").textContent = `${method().title} on ${target} (${device}), asked: “${prompt}” ${sampled ? "Sampled; p is the target's before temperature and top-p. " : ""}${used.join(", ")}.`;
  html($("about"), "p", {}, "Keys: ", html(null, "kbd", {}, "←"), " ", html(null, "kbd", {}, "→"), " rounds, ", html(null, "kbd", {}, "Home"), " ", html(null, "kbd", {}, "End"), " first and last, ", html(null, "kbd", {}, "Space"), " play, ", html(null, "kbd", {}, "Tab"), " to the tree and the mask, ", html(null, "kbd", {}, "↑"), " ", html(null, "kbd", {}, "↓"), " from node to node.");
  reserveRoom();
  makeText();
  showLegend();
  show();
}

/** The tree's panel keeps the height and width of the method's largest tree, so that nothing jumps. */
function reserveRoom() {
  const sizes = method().rounds.map((round) => layout(round).size);
  const columns = Math.max(...sizes.map((size) => size.columns));
  const height = Math.min(700, BOX.head + 2 * BOX.edge + Math.max(...sizes.map((size) => size.height)));
  $("tree").style.minHeight = `${height / 16}rem`;
  const width = (columns * (BOX.width + BOX.across)) / 16 + 1;
  $("tree-panel").style.flexBasis = `min(100%, ${width}rem)`;
  const mask = maskSize(1 + Math.max(...method().rounds.map((round) => round.tokens.length)));
  $("mask").style.minHeight = `${mask.height / 16}rem`;
  $("mask-panel").style.flexBasis = `min(100%, ${mask.width / 16 + 2}rem)`;
}

function go(round) {
  state.round = round;
  show();
}

function play(on) {
  clearInterval(state.timer);
  state.timer = null;
  if (on) {
    if (state.round === method().rounds.length) go(1);
    state.timer = setInterval(() => {
      go(state.round + 1);
      if (state.round === method().rounds.length) play(false);
    }, PLAY_MS);
  }
  $("play").textContent = on ? "■ Stop" : "▶ Play";
}

/** What the address asks for: #12, or #falcon/12 where there are several methods. */
function goTo(address) {
  const found = /^#(?:([^/]+)\/)?(\d+)$/.exec(new URL(address).hash);
  if (!found) return;
  const index = data.methods.findIndex((each) => encodeURIComponent(each.name) === found[1]);
  if (index >= 0 && index !== state.method) showAnotherMethod(index);
  go(Number(found[2]));
}

function listen() {
  const steps = { first: () => 1, back: () => state.round - 1, next: () => state.round + 1, last: () => method().rounds.length };
  for (const [id, where] of Object.entries(steps)) {
    $(id).addEventListener("click", () => {
      play(false);
      go(where());
    });
  }
  $("play").addEventListener("click", () => play(!state.timer));
  $("slider").addEventListener("input", () => {
    play(false);
    go(Number($("slider").value));
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const on = event.target.closest?.("input, [role=tab]") ? "its own keys" : "";
    const keys = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last" };
    if (!on && keys[event.key]) {
      $(keys[event.key]).click();
      event.preventDefault();
    }
    if (event.key === " " && !event.target.closest?.("button, input, a")) {
      play(!state.timer);
      event.preventDefault();
    }
  });
  for (const id of ["tree", "mask"]) listenForNodes($(id));
  $("method").addEventListener("pointerover", (event) => choose(nodeAt(event.target)));
  $("method").addEventListener("pointerleave", () => choose(null));
  // not location, which `show` may have changed since
  window.addEventListener("hashchange", (event) => goTo(event.newURL));
}

function makeTabs() {
  if (data.methods.length < 2) return;
  $("tabs").hidden = false;
  data.methods.forEach((each, index) => {
    const tab = html($("tabs"), "button", { type: "button", role: "tab", "aria-controls": "main" }, each.title);
    tab.addEventListener("click", () => {
      play(false);
      showAnotherMethod(index);
    });
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = $("tabs").children[index + (step ?? NaN)];
      next?.click();
      next?.focus();
    });
  });
}

makeTabs();
listen();
$("main").hidden = false;
const asked = location.href;
showAnotherMethod(0);
goTo(asked);
