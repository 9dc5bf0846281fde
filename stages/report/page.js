"use strict";
// The page: reads the facts that lie in it and draws them. Names are set as text, never as markup.

const facts = JSON.parse(document.getElementById("facts").textContent);
const AXES = 6;
const PHASES = {
  forward: "--forward", recompute: "--recompute", backward: "--backward", loss: "--backward",
  "weight gradients": "--axis-2", waiting: "--rest",
};
const PARTS = {
  compute: "--forward", communication: "--axis-1", recompute: "--recompute", optimizer: "--once", waiting: "--rest",
};
const KINDS = {
  parameters: "--axis-0", gradients: "--axis-1", "optimizer state": "--once", buffers: "--axis-5",
  activations: "--backward", rest: "--rest",
};
const MARKS = { chosen: "--bad", frontier: "--axis-0", baseline: "--axis-1", alternative: "--rest" };

// ---- small helpers

const byId = (id) => document.getElementById(id);
const colour = (name) => `var(${name || "--once"})`;
const axisColour = (axis) => `var(--axis-${axis % AXES})`;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") made.style.cssText = value; else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "fill" || name === "stroke") made.style[name] = value; else made.setAttribute(name, value);
  }
  if (text !== undefined) made.textContent = text;
  return made;
}

function scaled(value, units) {
  const size = Math.abs(value);
  const [factor, unit] = units.find(([factor]) => size >= factor) || units[units.length - 1];
  return `${Number((value / factor).toPrecision(4))} ${unit}`;
}

const seconds = (value) => value === null || value === undefined ? "-" : value === 0 ? "0"
  : scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]);
const bytes = (value) => value === 0 ? "0" : scaled(value, [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)}%` : "";
const sum = (list) => list.reduce((total, one) => total + one, 0);

function legend(entries) {
  return element("div", { class: "legend" }, ...entries.map(([name, paint]) =>
    element("span", {}, element("i", { style: `background:${paint}` }), name)));
}

function nothing(section, why) {
  section.append(element("p", { class: "quiet" }, why));
}

// ---- the tip that follows the pointer

document.addEventListener("pointermove", (event) => {
  const tip = byId("tip"), owner = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !owner;
  if (!owner) return;
  tip.textContent = owner.getAttribute("data-tip");
  const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - tip.offsetWidth - 12 : event.clientX + 14)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 6)}px`;
});

// ---- charts: an x axis that zooms with the wheel, pans when dragged, and is whole again after a double click

const LEFT = 74, RIGHT = 14, TOP = 10, BOTTOM = 24, LEAST_ZOOM = 1e-4;

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

function chart(parent, options) {
  const { height, x, y, name, xLabel, yLabel, draw } = options;
  const box = element("div", { class: "chart" }), svg = drawn("svg", { height, role: "img", "aria-label": name });
  box.append(svg);
  parent.append(box);
  const whole = [x[0], x[1] > x[0] ? x[1] : x[0] + 1];
  let shown = [...whole], queued = false;

  function render() {
    queued = false;
    const width = box.clientWidth - 14 || 900, inner = width - LEFT - RIGHT, tall = height - TOP - BOTTOM;
    const toX = (value) => LEFT + inner * (value - shown[0]) / (shown[1] - shown[0]);
    const toY = (value) => TOP + tall * (1 - (value - y[0]) / ((y[1] - y[0]) || 1));
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const clip = `clip-${name.replace(/\W/g, "")}`, area = drawn("g", { "clip-path": `url(#${clip})` });
    const hole = drawn("clipPath", { id: clip });
    hole.append(drawn("rect", { x: LEFT, y: 0, width: Math.max(1, inner), height }));
    svg.append(hole);
    for (const at of ticks(shown[0], shown[1], Math.max(2, inner / 120))) {
      svg.append(drawn("line", { class: "grid", x1: toX(at), x2: toX(at), y1: TOP, y2: TOP + tall }));
      svg.append(drawn("text", { x: toX(at), y: height - 8, "text-anchor": "middle" }, xLabel(at)));
    }
    for (const at of yLabel ? ticks(Math.min(...y), Math.max(...y), 5) : []) {
      svg.append(drawn("line", { class: "grid", x1: LEFT, x2: LEFT + inner, y1: toY(at), y2: toY(at) }));
      svg.append(drawn("text", { x: LEFT - 6, y: toY(at) + 4, "text-anchor": "end" }, yLabel(at)));
    }
    svg.append(drawn("rect", { class: "frame", x: LEFT, y: TOP, width: Math.max(1, inner), height: tall }), area);
    draw({ area, svg, toX, toY, shown, width, inner, tall });
    svg.dataset.shown = `${shown[0]} ${shown[1]}`;
  }

  function later() {
    if (!queued) { queued = true; requestAnimationFrame(render); }
  }

  function show(low, high) {
    const span = Math.min(whole[1] - whole[0], Math.max(high - low, (whole[1] - whole[0]) * LEAST_ZOOM));
    const from = Math.min(Math.max(low, whole[0]), whole[1] - span);
    shown = [from, from + span];
    later();
  }

  const at = (event) => {
    const frame = svg.getBoundingClientRect();
    const share = (event.clientX - frame.left - LEFT) / Math.max(1, frame.width - LEFT - RIGHT);
    return shown[0] + Math.min(1, Math.max(0, share)) * (shown[1] - shown[0]);
  };
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const centre = at(event), factor = Math.exp(event.deltaY * 0.002);
    show(centre - (centre - shown[0]) * factor, centre + (shown[1] - centre) * factor);
  }, { passive: false });
  svg.addEventListener("pointerdown", (event) => {
    const start = event.clientX, [low, high] = shown, inner = svg.clientWidth - LEFT - RIGHT;
    const move = (next) => {
      const by = (start - next.clientX) / Math.max(1, inner) * (high - low);
      show(low + by, high + by);
    };
    const stop = () => removeEventListener("pointermove", move);
    addEventListener("pointermove", move);
    addEventListener("pointerup", stop, { once: true });
  });
  svg.addEventListener("dblclick", () => show(...whole));
  addEventListener("resize", later);
  render();
  return svg;
}

function block(frame, from, to, top, height, paint, tip) {
  const x = Math.max(frame.toX(from), LEFT - 2), end = Math.min(frame.toX(to), frame.width);
  if (end < LEFT || x > frame.width - RIGHT) return null;
  const made = drawn("rect", {
    x, y: top, width: Math.max(0.6, end - x), height: Math.max(0.8, height), fill: paint, class: "hover",
    "data-tip": tip,
  });
  frame.area.append(made);
  return made;
}

// ---- head

function head() {
  const predicted = facts.prediction, report = facts.report;
  byId("title").textContent = facts.title;
  byId("subtitle").textContent =
    `${facts.ranks} ranks on ${facts.device}, ${facts.links} links, plan ${facts.digest.slice(7, 19)}`;
  const pipeline = facts.schedule ? `${facts.schedule}, ${facts.partitions.length} partitions` : "none";
  const regions = sum(facts.partitions.map((part) => part.regions.filter((region) => region.recompute).length));
  const meshes = [...new Set(facts.partitions.map((part) => part.axes.map(([n, s]) => `${n}=${s}`).join(" x ")))];
  const tiles = [
    ["predicted step", seconds(predicted.step_seconds)],
    ...(report ? [["measured step", seconds(report.median_step_seconds)]] : []),
    ["predicted peak", `${bytes(predicted.peak_bytes)} of ${bytes(facts.memory.budget_bytes)}`],
    ...(report ? [["measured peak", bytes(Math.max(...report.peak_bytes))]] : []),
    ["mesh", meshes.join(", ")],
    ["pipeline", pipeline],
    ["micro-batches", String(facts.micro_batches)],
    ["recompute regions", String(regions)],
  ];
  byId("tiles").append(...tiles.map(([name, text]) =>
    element("div", { class: "tile" }, element("b", {}, text), element("span", {}, name))));
  byId("notes").append(...facts.notes.map((note) => element("p", {}, note)));
}

// ---- the model

const HERE = "{}";
const placed = (text, link) => text.replace(HERE, link.at);
const linkName = (link) => link.number === null ? "prologue" : `link ${link.number}`;
const axesOf = (body) => facts.partitions[body.partition].axes;

function states(layout, body) {
  const axes = axesOf(body);
  return layout.split(",").filter(Boolean).map((state, axis) => element("span", {
    class: state === "R" ? "state" : "state on", style: `--own:${axisColour(axis)}`,
    "data-tip": `axis ${axes[axis][0]} of ${axes[axis][1]}: ${MEANING[state[0]]}`,
  }, state));
}

const MEANING = {
  R: "replicated", B: "replicated, its gradient partial", S: "split", P: "partial: each rank holds a summand",
};

function tensor(one, link, body) {
  const local = one.local.join("x") || "scalar", whole = one.shape.join("x") || "scalar";
  return element("span", { class: "tensor", "data-tip": `${one.dtype}, ${whole} in all, ${local} on a rank` },
    `${placed(one.name, link)} `, ...states(one.layout, body),
    element("span", { class: "quiet" }, local === whole ? whole : `${local} of ${whole}`));
}

function stepRow(step, link, body) {
  const conversion = step.kind === "conversion";
  const what = conversion ? `${step.name} over ${axesOf(body)[step.axis][0]}` : step.name;
  const cells = [
    element("td", { "data-tip": step.moves || step.source || step.kind }, what),
    element("td", {}, placed(step.module, link)),
    element("td", {}, ...step.reads.map((one) => tensor(one, link, body))),
    element("td", {}, ...step.writes.map((one) => tensor(one, link, body))),
    element("td", { class: "number" }, seconds(step.forward)),
    element("td", { class: "number" }, seconds(step.backward)),
  ];
  return element("tr", conversion ? { class: "conversion", style: `--own:${axisColour(step.axis)}` } : {}, ...cells);
}

function header(...names) {
  return element("tr", {}, ...names.map((name) => element("th", {}, name)));
}

function contents(link, body) {
  const table = element("table", {}, header("op", "module", "reads", "writes", "forward", "backward"),
    ...body.steps.map((step) => stepRow(step, link, body)));
  const rows = body.parameters.map((one) => element("tr", {},
    element("td", {}, placed(one.name, link)),
    element("td", {}, ...states(one.stored, body)),
    element("td", {}, ...(one.state ? states(one.state, body) : ["as stored"])),
    element("td", {}, one.shape.join("x") + (one.regathered ? ", gathered again in backward" : ""))));
  const parameters = rows.length
    ? element("table", {}, header("parameter", "stored", "optimizer state", "shape"), ...rows) : null;
  return element("div", { class: "links" }, table, parameters);
}

let slowest = 0;

function linkCard(link) {
  const body = facts.model.bodies[link.body], conversions = body.steps.filter((step) => step.kind === "conversion");
  const spent = body.forward === null ? null : body.forward + body.backward;
  const dots = element("span", { class: "dots", "data-tip": conversions.map((step) =>
    `${step.name} over ${axesOf(body)[step.axis][0]}: ${placed(step.reads[0].name, link)}`).join("\n") || "no conversion" },
  ...conversions.map((step) => element("i", { style: `background:${axisColour(step.axis)}` })));
  const bar = element("div", { "data-tip": spent === null ? "not priced"
    : `${seconds(body.forward)} forward, ${seconds(body.backward)} backward, of a micro-batch` },
  element("div", { class: "bar", style: `background:var(--forward);width:${slowest ? 100 * spent / slowest : 0}%` }));
  const card = element("details", { class: "link", "data-link": link.number === null ? "before" : link.number },
    element("summary", {}, element("span", { class: "quiet" }, linkName(link)),
      element("span", {}, placed(body.title, link)), dots, bar));
  card.addEventListener("toggle", () => {
    if (card.open && card.children.length === 1) card.append(contents(link, body));
  });
  return card;
}

function searchable(link) {
  const body = facts.model.bodies[link.body];
  const names = [body.title, ...body.steps.map((step) => `${step.module} ${step.name}`),
    ...body.parameters.map((one) => one.name)];
  return `${linkName(link)} ${[...new Set(names)].map((name) => placed(name, link)).join(" ")}`.toLowerCase();
}

class FoldBox {
  // Some links, or the links of one of several equal blocks.
  constructor(fold) {
    const all = facts.model.links.slice(fold.first, fold.first + fold.period * fold.times);
    this.blocks = Array.from({ length: fold.times }, (_, n) => all.slice(n * fold.period, (n + 1) * fold.period));
    this.texts = null;
    this.at = 0;
    this.unfolded = false;
    this.cards = element("div");
    this.box = fold.times > 1 ? element("div", { class: "fold" }, this.controls(), this.cards) : this.cards;
    this.render();
  }

  controls() {
    const count = this.blocks.length, [first, last] = [this.blocks[0][0], this.blocks[count - 1][0]];
    this.number = element("input", { type: "number", min: 1, max: count, value: 1, "aria-label": "which block" });
    this.number.addEventListener("change", () => this.choose(Number(this.number.value) - 1));
    const button = (text, act) => {
      const made = element("button", { type: "button" }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.switch = button("unfold all", () => { this.unfolded = !this.unfolded; this.render(); });
    this.switch.className = "unfold";
    return element("div", { class: "head" }, element("span", { class: "times" }, `x ${count}`),
      `${first.at || linkName(first)} … ${last.at || linkName(last)}, of ${this.blocks[0].length} links each; shown:`,
      button("‹", () => this.choose(this.at - 1)), this.number, button("›", () => this.choose(this.at + 1)),
      this.switch);
  }

  choose(number) {
    this.at = Math.min(this.blocks.length - 1, Math.max(0, number || 0));
    this.number.value = this.at + 1;
    this.render();
  }

  render() {
    const shown = this.unfolded ? this.blocks.flat() : this.blocks[this.at];
    if (this.switch) this.switch.textContent = this.unfolded ? "fold" : "unfold all";
    this.cards.replaceChildren(...shown.map(linkCard));
  }

  search(words) {
    // How many links have all the words; the first block that has one is shown.
    this.texts = this.texts || this.blocks.map((block) => block.map(searchable));
    const has = (text) => words.every((word) => text.includes(word));
    const hits = this.texts.map((block) => block.map(has)), found = sum(hits.flat().map(Number));
    const first = hits.findIndex((block) => block.some(Boolean));
    if (words.length && found && !this.unfolded && this.blocks.length > 1) this.choose(first);
    const shown = this.unfolded ? hits.flat() : hits[this.at];
    [...this.cards.children].forEach((card, n) => card.classList.toggle("hidden", words.length > 0 && !shown[n]));
    this.box.classList.toggle("hidden", words.length > 0 && !found);
    return found;
  }
}

function model() {
  const blocks = byId("blocks");
  if (!facts.model) { nothing(blocks, "graph.json is not there: the model cannot be drawn."); return; }
  slowest = Math.max(...facts.model.bodies.map((body) => (body.forward || 0) + (body.backward || 0)));
  const most = facts.partitions.reduce((one, two) => two.axes.length > one.axes.length ? two : one);
  byId("axes").append(legend(most.axes.map(([name, size], axis) => [`axis ${name}, ${size} devices`, axisColour(axis)])),
    element("span", { class: "quiet" }, "R replicated, B replicated with a partial gradient, S(d) split on dim d, P partial"));
  let partition = -1;
  const boxes = facts.model.folds.map((fold) => {
    const own = facts.model.bodies[facts.model.links[fold.first].body].partition;
    if (facts.partitions.length > 1 && own !== partition) {
      const part = facts.partitions[own];
      blocks.append(element("h3", {}, `partition ${own}: links ${part.first}..${part.last} on ` +
        part.axes.map(([name, size]) => `${name}=${size}`).join(" x ")));
    }
    partition = own;
    const box = new FoldBox(fold);
    blocks.append(box.box);
    return box;
  });
  const search = byId("search");
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = sum(boxes.map((box) => box.search(words)));
    byId("found").textContent = words.length ? `${found} links` : "";
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); }
  });
}

// ---- the seconds

function bars(rows, total, text, paint) {
  const most = Math.max(...rows.map((row) => row.value), 0);
  return element("div", { class: "rows" }, ...rows.flatMap((row) => [
    element("span", { "data-tip": row.tip || row.name }, row.name),
    element("span", { class: "number" }, text(row.value)),
    element("span", { class: "number quiet" }, percent(row.value, total)),
    element("div", { class: "bar", style: `background:${paint(row)};width:${most ? 100 * row.value / most : 0}%` }),
  ]));
}

function stack(entries, total) {
  return element("div", { class: "stack" }, ...entries.map(([name, value, paint, text]) => element("div", {
    style: `background:${paint};width:${total ? 100 * value / total : 0}%`,
    "data-tip": `${name}: ${text}, ${percent(value, total)}`,
  })));
}

function time(section) {
  const { rows, total, scale } = facts.seconds, names = [...new Set(rows.map((row) => row.part))];
  const parts = names.map((name) => [name, sum(rows.filter((row) => row.part === name).map((row) => row.seconds))]);
  section.append(
    legend(parts.map(([name, value]) => [`${name} ${seconds(value)}`, colour(PARTS[name])])),
    stack(parts.map(([name, value]) => [name, value, colour(PARTS[name]), seconds(value)]), total),
    bars(rows.map((row) => ({ name: `${row.part}: ${row.name}`, value: row.seconds, part: row.part })), total, seconds,
      (row) => colour(PARTS[row.part])));
  if (facts.schedule) nothing(section, "Of the busiest devices of the pipeline.");
  if (facts.whole_ops.length) {
    section.append(element("h3", {}, "Ops that run whole on every rank for lack of a rule"), bars(facts.whole_ops.map(
      (op) => ({ name: op.count > 1 ? `${op.target} x ${op.count}` : op.target, value: op.seconds })), total, seconds,
      () => colour("--bad")));
    nothing(section, "Give them one: `shardwright docs how-to-add-an-op`.");
  }
  for (const [name, factor] of Object.entries(scale)) {
    nothing(section, `${name}: priced op by op and multiplied by ${factor.toFixed(3)}, so that it sums to the prediction.`);
  }
}

// ---- the memory

function eventTip(event) {
  const links = event.first === event.last ? `link ${event.first}` : `links ${event.first}..${event.last}`;
  const pass = event.micro_batch === null ? "" : `, micro-batch ${event.micro_batch}`;
  const held = event.held_bytes === null ? "" : `\nholds ${bytes(event.held_bytes)}`;
  return `${event.what}, ${links}${pass}\n${seconds(event.seconds)} from ${seconds(event.start)}${held}`;
}

const phaseColour = (event) => colour(PHASES[event.what] || "--once");
const end = (events) => Math.max(...events.map((event) => event.start + event.seconds), 0);

function memoryCurve(section) {
  const { budget_bytes: budget, peak_bytes: peak, peak_event: at } = facts.memory;
  const near = budget < 4 * peak, top = (near ? Math.max(budget, peak) : peak) * 1.1;
  section.append(legend([["forward", colour("--forward")], ["recompute", colour("--recompute")],
    ["backward", colour("--backward")], ["once a step", colour("--once")], ["budget", colour("--bad")]]));
  chart(section, {
    name: "memory over time", height: 260, x: [0, end(facts.events)], y: [0, top], xLabel: seconds, yLabel: bytes,
    draw: (frame) => {
      let held = facts.prediction.resident_bytes;
      facts.events.forEach((event, number) => {
        held = event.held_bytes === null ? Math.min(held, facts.prediction.resident_bytes) : event.held_bytes;
        const y = frame.toY(held), made = block(frame, event.start, event.start + event.seconds, y,
          frame.toY(0) - y, phaseColour(event), eventTip(event));
        if (made && number === at) { made.setAttribute("id", "peak"); made.style.stroke = "var(--ink)"; }
      });
      if (near) {
        frame.area.append(drawn("line", { class: "budget", id: "budget", x1: LEFT, x2: frame.width,
          y1: frame.toY(budget), y2: frame.toY(budget) }));
      }
      frame.area.append(drawn("text", { x: LEFT + 6, y: near ? frame.toY(budget) - 4 : TOP + 12 },
        near ? `budget ${bytes(budget)}` : `the budget, ${bytes(budget)}, lies above the chart`));
    },
  });
}

function memory(section) {
  const { budget_bytes: budget, devices } = facts.memory;
  if (facts.events.some((event) => event.held_bytes !== null)) memoryCurve(section);
  const used = [...new Set(devices.flatMap((device) => device.alive.map((one) => one.kind)))];
  section.append(element("h3", {}, "alive at the peak"),
    legend(used.map((kind) => [kind, colour(KINDS[kind])])));
  const most = Math.max(...devices.map((device) => device.peak_bytes));
  const whole = budget < 4 * most ? Math.max(budget, most) : most;
  devices.forEach((device, number) => {
    const label = devices.length > 1
      ? `devices of partition ${device.partitions.join(", ")}, ${device.in_flight} micro-batches in flight: ` : "";
    section.append(element("p", {}, `${label}${bytes(device.peak_bytes)} of ${bytes(budget)}`),
      stack(device.alive.map((one) => [one.name, one.nbytes, colour(KINDS[one.kind]), bytes(one.nbytes)]), whole));
    if (devices.length <= 4) {
      const list = element("details", number ? {} : { open: "" }, element("summary", {}, "what it is made of"),
        bars(device.alive.map((one) => ({ name: one.name, value: one.nbytes, kind: one.kind })), device.peak_bytes,
          bytes, (row) => colour(KINDS[row.kind])));
      section.append(list);
    }
  });
}

// ---- recompute

function nested(regions, depth = 0) {
  return regions.flatMap((region) => region.recompute
    ? [{ region, depth }, ...nested(region.inner, depth + 1)] : []);
}

function recompute(section) {
  const regions = facts.partitions.flatMap((part) => nested(part.regions));
  if (!regions.length) {
    nothing(section, "Nothing is computed again: every activation is kept until its backward.");
  } else {
    const depth = Math.max(...regions.map((one) => one.depth)) + 1;
    section.append(element("p", { class: "quiet" }, "Links from left to right. A bar drops what is inside it and computes "
      + "it again in backward; bars inside it do so once more."));
    chart(section, {
      name: "recompute regions", height: 60 + 22 * depth, x: [0, facts.links], y: [0, 1],
      xLabel: (at) => Number.isInteger(at) ? `link ${at}` : "", yLabel: null,
      draw: (frame) => regions.forEach(({ region, depth }) => {
        const kept = region.kept.length ? `\nkeeps the results of ${region.kept.length} steps` : "";
        block(frame, region.first + 0.06, region.last + 0.94, TOP + 6 + 22 * depth, 16,
          colour(region.kept.length ? "--axis-2" : "--recompute"),
          `links ${region.first}..${region.last}, depth ${depth + 1}${kept}`);
      }),
    });
  }
  const links = facts.events.filter((event) => event.micro_batch !== null);
  if (facts.schedule || !links.length) return;
  section.append(element("p", { class: "quiet" }, "Each link as it runs, first links on top."),
    legend([["forward", colour("--forward")], ["recompute", colour("--recompute")], ["backward", colour("--backward")]]));
  chart(section, {
    name: "links over time", height: Math.min(460, 90 + 9 * facts.links), x: [0, end(facts.events)],
    y: [facts.links, 0], xLabel: seconds, yLabel: (at) => Number.isInteger(at) ? `link ${at}` : "",
    draw: (frame) => links.forEach((event) => {
      const top = frame.toY(event.first);
      block(frame, event.start, event.start + event.seconds, top, frame.toY(event.last + 1) - top, phaseColour(event),
        eventTip(event));
    }),
  });
}

// ---- schedule

function schedule(section) {
  if (!facts.events.length) { nothing(section, "The plan lists no events."); return; }
  const rows = Math.max(1, facts.partitions.length / facts.chunks), tall = Math.max(14, Math.min(34, 520 / rows));
  const used = [...new Set(facts.events.map((event) => event.what))];
  section.append(element("p", { class: "quiet" }, facts.schedule
    ? `${facts.schedule}: ${facts.partitions.length} partitions, ${facts.micro_batches} micro-batches, waiting `
      + `${percent(facts.prediction.bubble_seconds, facts.prediction.step_seconds)} of the step`
    : "No pipeline: all devices do the same at the same time."),
  legend(used.map((what) => [what, phaseColour({ what })])));
  chart(section, {
    name: "schedule", height: TOP + BOTTOM + rows * (tall + 3) + 4, x: [0, end(facts.events)], y: [0, 1],
    xLabel: seconds, yLabel: null,
    draw: (frame) => {
      for (let row = 0; row < rows; row++) {
        frame.svg.append(drawn("text", { x: LEFT - 6, y: TOP + row * (tall + 3) + tall / 2 + 6, "text-anchor": "end" },
          rows > 1 ? `devices ${row}` : "devices"));
      }
      facts.events.forEach((event) => {
        const top = TOP + 3 + (event.partition % rows) * (tall + 3), stop = event.start + event.seconds;
        const made = block(frame, event.start, stop, top, tall, phaseColour(event),
          `partition ${event.partition}\n${eventTip(event)}`);
        if (made && facts.schedule) made.style.stroke = "var(--card)";
        if (made && facts.schedule && event.micro_batch !== null && made.width.baseVal.value > 16) {
          frame.area.append(drawn("text", { x: made.x.baseVal.value + 4, y: top + tall / 2 + 4, fill: "#fff",
            "pointer-events": "none" }, event.micro_batch));
        }
      });
    },
  });
}

// ---- the frontier

function frontier(section) {
  const marks = facts.marks, peaks = marks.map((mark) => mark.peak_bytes), budget = facts.memory.budget_bytes;
  const near = budget < 1.6 * Math.max(...peaks), low = Math.min(...peaks) * 0.92;
  const high = Math.max(...peaks, near ? budget : 0) * 1.05, chosen = marks.find((mark) => mark.kind === "chosen");
  section.append(legend(Object.entries(MARKS).filter(([kind]) => marks.some((mark) => mark.kind === kind))
    .map(([kind, paint]) => [kind, colour(paint)])));
  chart(section, {
    name: "time and memory", height: 320, x: [low, high], xLabel: bytes, yLabel: seconds,
    y: [Math.min(...marks.map((mark) => mark.seconds)) * 0.85, Math.max(...marks.map((mark) => mark.seconds)) * 1.05],
    draw: (frame) => {
      const labels = [];  // those that would lie on another are left to the pointer
      const free = (x, y, text) => {
        const own = [x, y, x + 7 * text.length, y + 13];
        const clear = labels.every((o) => own[0] > o[2] || own[2] < o[0] || own[1] > o[3] || own[3] < o[1]);
        if (clear) labels.push(own);
        return clear;
      };
      const path = marks.filter((mark) => mark.kind === "frontier").sort((a, b) => a.peak_bytes - b.peak_bytes);
      frame.area.append(drawn("polyline", { fill: "none", stroke: colour(MARKS.frontier),
        points: path.map((mark) => `${frame.toX(mark.peak_bytes)},${frame.toY(mark.seconds)}`).join(" ") }));
      if (near) {
        frame.area.append(drawn("line", { class: "budget", x1: frame.toX(budget), x2: frame.toX(budget), y1: TOP,
          y2: TOP + frame.tall }),
        drawn("text", { x: frame.toX(budget) - 4, y: TOP + 12, "text-anchor": "end" }, `budget ${bytes(budget)}`));
      }
      for (const mark of marks) {
        const x = frame.toX(mark.peak_bytes), y = frame.toY(mark.seconds);
        frame.area.append(drawn("circle", { cx: x, cy: y, r: mark.kind === "chosen" ? 8 : 5, class: `hover ${mark.kind}`,
          fill: colour(MARKS[mark.kind]), "data-tip":
          `${mark.name}\n${seconds(mark.seconds)} a step, peak ${bytes(mark.peak_bytes)}\n${mark.about}` }));
        if (mark.kind === "baseline" && free(x + 8, y, mark.name)) frame.area.append(drawn("text", { x: x + 8, y: y + 4 }, mark.name));
      }
    },
  });
  const rows = marks.filter((mark) => mark.kind !== "frontier").sort((a, b) => a.seconds - b.seconds);
  section.append(element("details", {}, element("summary", {}, `${rows.length} plans as a table`),
    element("table", {}, header("plan", "", "step", "to the plan", "peak", ""), ...rows.map((mark) => element("tr", {},
      element("td", {}, mark.name), element("td", { class: "quiet" }, mark.kind),
      element("td", { class: "number" }, seconds(mark.seconds)),
      element("td", { class: "number" }, `${(mark.seconds / chosen.seconds).toFixed(2)} x`),
      element("td", { class: "number" }, bytes(mark.peak_bytes)), element("td", { class: "quiet" }, mark.about))))));
}

// ---- measured

function line(section, name, values, label, guide) {
  const all = guide === null ? values : [...values, guide], low = Math.min(...all), high = Math.max(...all);
  const room = (high - low || Math.abs(high) || 1) * 0.08;
  chart(section, {
    name, height: 190, x: [1, Math.max(2, 1 + (values.length - 1) * facts.every)], y: [low - room, high + room],
    xLabel: (at) => Number.isInteger(at) ? `${at}` : "", yLabel: label,
    draw: (frame) => {
      frame.area.append(drawn("polyline", { fill: "none", stroke: "var(--axis-0)",
        points: values.map((value, n) => `${frame.toX(1 + n * facts.every)},${frame.toY(value)}`).join(" ") }));
      if (guide !== null) {
        frame.area.append(drawn("line", { class: "budget", x1: LEFT, x2: frame.width, y1: frame.toY(guide),
          y2: frame.toY(guide) }));
      }
      const few = values.length <= 400;
      if (few) {
        values.forEach((value, n) => frame.area.append(drawn("circle", { cx: frame.toX(1 + n * facts.every), cy: frame.toY(value),
          r: 3, fill: "var(--axis-0)", class: "hover", "data-tip": `step ${1 + n * facts.every}: ${label(value)}` })));
      }
    },
  });
}

function measured(section) {
  const report = facts.report;
  if (!report) { nothing(section, "Not trained yet: `shardwright train`, and the page is written again."); return; }
  const number = (value) => Number(value.toPrecision(4)).toString();
  section.append(element("p", {}, `${report.steps} steps with the engine ${report.engine} on ${report.ranks} ranks`
    + `${report.module_edited ? ", module.py edited by hand" : ""}`),
  element("table", { id: "compared" }, header("", "predicted", "measured", "measured / predicted"),
    ...report.compared.map((row) => element("tr", {}, element("td", {}, row.what.replace(/_/g, " ")),
      element("td", { class: "number" }, number(row.predicted)), element("td", { class: "number" }, number(row.measured)),
      element("td", { class: "number" }, row.ratio === null ? "-" : row.ratio.toFixed(2))))));
  const columns = element("div", { class: "columns" }), [left, right] = [element("div"), element("div")];
  left.append(element("h3", {}, "loss"));
  right.append(element("h3", {}, "seconds of a step, and predicted"));
  columns.append(left, right);
  section.append(columns);
  line(left, "loss", report.losses, (value) => Number(value.toPrecision(4)).toString(), null);
  line(right, "step seconds", report.step_seconds, seconds, report.predicted_step_seconds);
}

// ---- light and dark

function theme() {
  const order = ["system", "light", "dark"], button = byId("theme"), key = "shardwright-theme";
  const remembered = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const set = (name) => {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = `theme: ${name}`;
    try { localStorage.setItem(key, name); } catch { /* a page from a file may have no store */ }
  };
  set(order.includes(remembered()) ? remembered() : "system");
  button.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || "system";
    set(order[(order.indexOf(now) + 1) % order.length]);
  });
}

theme();
head();
model();
for (const [id, draw] of Object.entries({ time, memory, recompute, schedule, frontier, measured })) {
  draw(document.querySelector(`#${id} .body`));
}
document.documentElement.dataset.ready = String(Math.round(performance.now()));
