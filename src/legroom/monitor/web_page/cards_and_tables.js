// Everything on the page but charts: alarms, pool cards, tables of entries, groups and processes. Whatever a process is
// called is set as text, never as markup.

import {duration, percent, size, timeOfDay} from "./words.js";

export const byId = (id) => document.getElementById(id);

function make(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "data") Object.assign(node.dataset, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

function barOf(share) {
  const filled = make("span");
  filled.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
  return make("div", {className: "bar"}, filled);
}

// Alarms: the list is rewritten at every moment; only what is new is said aloud.
let told = new Set();
export function alarms(list) {
  byId("no-alarms").hidden = list.length > 0;
  byId("no-alarms").textContent = "none";
  byId("alarms").replaceChildren(...list.map((alarm) => make("li", {data: {level: alarm.level}},
    make("strong", {textContent: alarm.level}),
    make("span", {textContent: alarm.message}),
    make("span", {className: "soft", textContent: `${alarm.code}, since ${timeOfDay(alarm.since)}`}))));
  const fresh = list.filter((alarm) => !told.has(`${alarm.code} ${alarm.pool} ${alarm.level}`));
  told = new Set(list.map((alarm) => `${alarm.code} ${alarm.pool} ${alarm.level}`));
  if (fresh.length) byId("alarm-news").textContent = fresh.map((alarm) => `${alarm.level}: ${alarm.message}`).join(". ");
}

// One card a pool; kept from moment to moment, so that a pointer over a chart stays over it.
const cards = new Map();
export function poolCard(pool, worst, everKnown) {
  let card = cards.get(pool.name);
  if (!card) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("role", "img");
    const share = make("span", {className: "share"}), figures = make("figcaption"), meter = make("div");
    const axis = make("div", {className: "axis soft"}, make("span"), make("span", {textContent: "now"}));
    const node = make("figure", {className: "pool", data: {pool: pool.name}},
      make("div", {className: "top"}, make("h3", {textContent: pool.name}), share), meter, figures, svg, axis);
    card = {node, svg, share, figures, meter, axis};
    cards.set(pool.name, card);
    byId("pools").append(node);
  }
  const share = pool.used === null || !pool.size ? null : pool.used / pool.size;
  const none = pool.size === 0, drawn = !none && (share !== null || everKnown);
  card.node.dataset.level = worst ?? "";
  card.share.textContent = none ? "none" : percent(share);
  card.share.classList.toggle("unknown", share === null);
  card.svg.style.display = card.axis.style.display = drawn ? "" : "none";
  card.figures.textContent = none ? "none on this machine"
    : share === null ? (pool.reason || pool.source)
    : `${size(pool.used)} of ${size(pool.size)} used, ${size(pool.free)} free`;
  card.figures.title = pool.source;
  card.meter.replaceChildren();
  if (share !== null) {
    const bar = barOf(share);
    bar.setAttribute("role", "meter");
    bar.setAttribute("aria-label", `${pool.name} used`);
    bar.setAttribute("aria-valuenow", Math.round(share * 100));
    bar.setAttribute("aria-valuemin", 0);
    bar.setAttribute("aria-valuemax", 100);
    card.meter.append(bar);
  }
  return card;
}

export function dropPools(names) {
  for (const [name, card] of cards) {
    if (!names.has(name)) { card.node.remove(); cards.delete(name); }
  }
}

export function kernel(now) {
  const words = [];
  const rate = (value) => (value === null ? "unknown" : `${size(Math.round(value))}/s`);
  words.push(`swap traffic: ${rate(now.swap_in)} in, ${rate(now.swap_out)} out`);
  for (const one of now.pressure) words.push(`${one.scope}: tasks stalled on memory ${one.some_avg10}% of the last 10 s`);
  const count = (value) => (value === null ? "unknown" : value);
  words.push(`${now.events.scope}: OOM kills ${count(now.events.oom_kills)}, limit hits ${count(now.events.at_limit)}`);
  byId("kernel").textContent = words.join(" · ");
}

export function script(said) {
  const parts = Object.entries(said.components);
  byId("script").hidden = !parts.length && said.phase === null && said.steps === null;
  const words = [];
  if (said.phase !== null) words.push(said.phase);
  if (said.steps !== null) words.push(`${said.steps} steps`);
  if (said.steps_per_second !== null) words.push(`${said.steps_per_second.toFixed(2)} steps/s`);
  byId("phase").textContent = words.join(" · ");
  const most = Math.max(1, ...parts.map(([, held]) => held));
  byId("components").replaceChildren(...parts.map(([name, held]) => make("tr", {},
    make("td", {textContent: name}), make("td", {className: "number", textContent: size(held)}),
    make("td", {}, barOf(held / most)))));
  byId("components").closest("table").hidden = !parts.length;
}

const td = (text, className = "") => make("td", {className, textContent: String(text)});
const tr = (...cells) => make("tr", {}, ...cells);

export function entries(list) {
  byId("no-entries").hidden = Boolean(list && list.length);
  byId("no-entries").textContent = list === null ? "not read" : "none";
  byId("cache").hidden = !(list && list.length);
  byId("entries").replaceChildren(...(list ?? []).map((one) => tr(td(one.source, "command"),
    td(size(one.bytes), "number"), td(one.backing), td(one.in_use === null ? "unknown" : one.in_use ? "yes" : "no"))));
}

// Copies in GPU memory, with the processes that use them.
export function gpuCopies(list) {
  byId("gpu-copies").hidden = !(list && list.length);
  byId("gpu-copy-rows").replaceChildren(...(list ?? []).map((one) => tr(td(one.name, "command"),
    td(size(one.bytes), "number"), td(`GPU-${one.gpu.slice(0, 8)}`), td(one.users.join(", ")))));
}

// Groups that share batches: the producer with its window, then its trainers.
export function groups(list) {
  byId("groups").hidden = !(list && list.length);
  const text = (words) => td(words, "command"), number = (count) => td(count, "number");
  byId("group-rows").replaceChildren(...(list ?? []).flatMap((one) => [
    ...(one.producer === null ? [] : [tr(text(one.name), text(`${one.producer} makes the batches`),
      text(one.error ?? `${one.batches} of ${one.most_batches} batches ready, ${size(one.bytes)}`),
      number(""), number(""), number(""))]),
    ...one.trainers.map((who) => tr(text(one.name), text(`${who.pid} ${who.command}`), text(who.state),
      number(who.behind ?? "–"), number(who.shared), number(who.made_itself)))]));
}

// Processes, sorted by what they hold.
// The same as pss_estimate in watch_sample.py: PSS as read with what RssAnon changed since; RSS, its limit, before.
export function pssEstimate(row) {
  if (row.pss === null) return row.rss;
  if ((row.rss_anon ?? null) === null || (row.pss_anon ?? null) === null) return row.pss;
  return Math.min(Math.max(0, row.pss + row.rss_anon - row.pss_anon), Math.max(row.rss ?? Infinity, row.pss));
}

function pssText(row) {
  const estimate = pssEstimate(row);
  if (estimate === null) return row.pss_at === null ? "not yet read" : "unknown";
  if (row.pss === null) return `≤ ${size(estimate)}`;
  return 100 * Math.abs(estimate - row.pss) <= row.pss ? size(row.pss) : `~ ${size(estimate)}`;
}

const pssAge = (row, now) => row.pss !== null ? `read ${duration(now.clock - row.pss_at)} ago` : row.pss_at === null ? "RSS; PSS not yet read" : "RSS; PSS unknown";
export const COLUMNS = [
  {key: "command", name: "command", text: (row) => row.command},
  {key: "pid", name: "pid", number: true, text: (row) => String(row.pid)},
  {key: "pss", name: "PSS", number: true, note: pssAge, value: pssEstimate, text: pssText},
  {key: "rss_shmem", name: "RssShmem", number: true},
  {key: "swap", name: "VmSwap", number: true},
  {key: "rss", name: "RSS", number: true},
  {key: "gpu", name: "GPU", number: true, text: (row) => (row.gpu === null ? "–" : size(row.gpu))},
  {key: "fds", name: "files", number: true, text: (row) => (row.fds === null ? "unknown" : `${row.fds} of ${row.fd_limit ?? "unknown"}`)},
];

export function processHead(sorting, sort) {
  byId("process-head").replaceChildren(...COLUMNS.map((column) => {
    const head = make("th", {scope: "col", className: column.number ? "number" : ""},
      make("button", {type: "button", textContent: column.name, onclick: () => sort(column.key)}));
    head.setAttribute("role", "columnheader");
    if (column.key === sorting.key) head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    return head;
  }));
  const chooser = byId("sort");
  chooser.replaceChildren(...COLUMNS.map((column) => make("option",
    {value: column.key, textContent: column.name, selected: column.key === sorting.key})));
  chooser.onchange = () => sort(chooser.value);
}

export function inOrder(rows, {key, down}) {
  const sign = down ? -1 : 1, value = COLUMNS.find((column) => column.key === key).value ?? ((row) => row[key]);
  return [...rows].sort((one, other) => {
    const a = value(one), b = value(other);
    if (a === null || b === null) return (a === null) - (b === null) || one.pid - other.pid;  // unknown last, either way
    return sign * (a < b ? -1 : a > b ? 1 : 0) || one.pid - other.pid;
  });
}

export function processes(now, sorting, open) {
  const shown = now.processes.length, all = now.processes_in_all;
  byId("process-count").textContent = shown < all ? `the ${shown} largest of ${all}` : `${all} watched`;
  byId("process-rows").replaceChildren(...inOrder(now.processes, sorting).map((row) => {
    const line = make("tr", {}, ...COLUMNS.map((column) => {
      const text = (column.text ?? ((one) => size(one[column.key])))(row);
      const cell = make("td", {className: column.number ? "number" : "command", textContent: text});
      cell.setAttribute("role", "cell");
      if (column.number) cell.dataset.name = column.name;
      if (text === "unknown" || text === "not yet read") cell.classList.add("unknown");
      if (column.key === "command") {
        cell.replaceChildren(make("button", {type: "button", className: "opens", textContent: text, onclick: () => open(row.pid)}));
      }
      if (column.note && (column.value ?? ((one) => one[column.key]))(row) !== null) cell.append(make("small", {textContent: column.note(row, now)}));
      return cell;
    }));
    line.setAttribute("role", "row");
    return line;
  }));
}

export function cost(now) {
  byId("cost").textContent = `a sample every ${now.interval} s` +
    (now.cost === null ? "" : `, ${(now.cost * 1000).toFixed(1)} ms of CPU each`) + "; units are powers of 1024" +
    now.notes.map((note) => `; note: ${note}`).join("");
}
