// Live gauges: /metrics every two seconds, a line of the last two minutes for each.

import { element } from "./markdown.js";

const PERIOD = 2000;
const POINTS = 60;
const SVG = "http://www.w3.org/2000/svg";

const count = (value) => new Intl.NumberFormat("en", { maximumFractionDigits: value < 10 ? 1 : 0 }).format(value);
const percent = (value) => `${Math.round(100 * value)} %`;

// What is read from two scrapes, `seconds` apart; undefined is "nothing to say now".
const GAUGES = [
  { name: "Running", read: (now) => now("num_requests_running"), text: count },
  { name: "Waiting", read: (now) => now("num_requests_waiting"), text: count },
  { name: "Tokens/s", read: (now, before, seconds) => (now("generation_tokens_total") - before("generation_tokens_total")) / seconds, text: count },
  {
    name: "Hit rate",
    title: "Prompt tokens found in the prefix cache, since the last change",
    read(now, before) {
      const queries = now("prefix_cache_queries_total") - before("prefix_cache_queries_total");
      if (queries) return (now("prefix_cache_hits_total") - before("prefix_cache_hits_total")) / queries;
    },
    text: percent,
    keeps: true,
    scale: 1,
  },
  {
    name: "Replayed rows/s",
    title: "Cached rows fed again to rebuild windows",
    read: (now, before, seconds) => (now("leadline:replayed_tokens_total") - before("leadline:replayed_tokens_total")) / seconds,
    text: count,
  },
];
const STATES = ["used", "cached", "free"];

/** Samples of the text format: "name" or "name state" -> value; vLLM's names without prefix. */
export function parse(text) {
  const prefix = /^(\S*?)num_requests_running\{/m.exec(text)?.[1] ?? "vllm:";
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = /^([^#\s{]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const state = /(?:^|,)state="(\w+)"/.exec(match[2] ?? "")?.[1];
    const name = match[1].startsWith(prefix) ? match[1].slice(prefix.length) : match[1];
    samples.set(state ? `${name} ${state}` : name, Number(match[3]));
  }
  return samples;
}

export class Gauges {
  #before = null;
  #at = 0;

  constructor(list, health, api) {
    this.health = health;
    this.api = api;
    this.rows = GAUGES.map((gauge) => new Row(list, gauge));
    this.pages = new Pages(list);
  }

  start() {
    const tick = async () => {
      if (!document.hidden) await this.update();
      setTimeout(tick, PERIOD);
    };
    tick();
  }

  async update() {
    let samples;
    try {
      samples = parse(await this.api.metrics());
      if (!samples.has("num_requests_running")) throw new Error("The engine does not answer.");
    } catch (error) {
      this.#say("down", error.message);
      return;
    }
    this.#say("up", "live");
    const at = performance.now();
    const now = (name) => samples.get(name) ?? 0;
    const before = (name) => (this.#before ?? samples).get(name) ?? 0;
    for (const row of this.rows) row.push(row.gauge.read(now, before, (at - this.#at) / 1000));
    this.pages.show(STATES.map((state) => now(`leadline:kv_pages ${state}`)));
    this.#before = samples;
    this.#at = at;
  }

  #say(state, text) {
    this.health.dataset.state = state;
    if (this.health.textContent !== text) this.health.textContent = text;
  }
}

class Row {
  #points = [];

  constructor(list, gauge) {
    this.gauge = gauge;
    this.value = element("span", "–");
    this.value.className = "value";
    this.line = svg("polyline");
    this.area = svg("polygon");
    const chart = svg("svg", { viewBox: `0 0 ${POINTS - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" });
    chart.append(this.area, this.line);
    const name = element("dt", gauge.name);
    if (gauge.title) name.title = gauge.title;
    const cell = element("dd", chart, this.value);
    cell.dataset.gauge = gauge.name;
    list.append(element("div", name, cell));
  }

  push(value) {
    if (value === undefined && this.gauge.keeps) value = this.#points.at(-1);
    if (value === undefined) return;
    this.#points = [...this.#points, value].slice(-POINTS);
    this.value.textContent = this.gauge.text(value);
    const top = this.gauge.scale ?? Math.max(1, ...this.#points);
    const start = POINTS - this.#points.length;
    const points = this.#points.map((point, i) => `${start + i},${(19 - (18 * point) / top).toFixed(2)}`);
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${start},20 ${points.join(" ")} ${POINTS - 1},20`);
  }
}

/** Pages by state, as one bar. */
class Pages {
  constructor(list) {
    this.bars = STATES.map((state) => svg("rect", { class: state, height: "6" }));
    const bar = svg("svg", { class: "pages", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" });
    bar.append(...this.bars);
    this.values = STATES.map(() => element("b", "–"));
    const legend = element("span", ...STATES.flatMap((state, i) => [this.#key(state), " ", this.values[i], ` ${state} `]));
    legend.className = "legend";
    const cell = element("dd", bar, legend);
    cell.dataset.gauge = "Pages";
    const row = element("div", element("dt", "Pages"), cell);
    row.className = "wide";
    list.append(row);
  }

  #key(state) {
    const key = element("i");
    key.className = state;
    return key;
  }

  show(counts) {
    const all = Math.max(1, counts.reduce((sum, n) => sum + n, 0));
    let x = 0;
    counts.forEach((n, i) => {
      const width = (100 * n) / all;
      this.bars[i].setAttribute("x", x);
      this.bars[i].setAttribute("width", width);
      this.values[i].textContent = count(n);
      x += width;
    });
  }
}

function svg(name, attributes = {}) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}
