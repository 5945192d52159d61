// Memory of each process over time, and one process opened: its kinds of memory, and the lines that make it grow.

import {pssEstimate} from "./cards_and_tables.js";
import {shape, titled} from "./chart.js";
import {size} from "./words.js";

const HEIGHT = 180, TOP = 8, FOOT = 18, LEFT = 2, RIGHT = 64;
const MOST_FRAMES = 2000, MOST_LAYERS = 7;
const KINDS = [["anonymous", 2], ["shared memory", 4], ["files", 3], ["swap", 5]];
const byId = (id) => document.getElementById(id);
let frames = [], opened = null;

// The same as in timeline.py: PSS with what RssAnon changed since, and swap; anonymous memory before PSS is read.
const taken = (row) => ((row.pss === null ? row.rss_anon : null) ?? pssEstimate(row) ?? 0) + (row.swap ?? 0);
const point = (row, steps) => [row.pid, taken(row), row.rss_anon, row.rss_file, row.rss_shmem, row.swap, steps.get(row.pid) ?? null];

export function begin(story) { frames = story ?? []; }

export function add(moment) {
  const used = moment.pools.find((pool) => pool.name === "ram")?.used ?? null;
  const steps = new Map((moment.said.process_steps ?? []).map((one) => [one.pid, one.steps]));
  frames.push([moment.when, used, moment.processes.map((row) => point(row, steps)), moment.others]);
  if (frames.length > MOST_FRAMES) frames = frames.filter((_, at) => at >= MOST_FRAMES / 2 || at % 2 === 0);
}

export function open(pid) { opened = pid; }
export const isOpen = (pid) => opened === pid;

// The samples of one process by its steps, as over_steps in timeline.py does it; null where they are not known.
function overSteps(points) {
  const all = points.map((one, at) => [at, one?.[6] ?? null]).filter((one) => one[1] !== null);
  const known = all.slice(Math.max(0, all.findLastIndex((one, at) => at && one[1] < all[at - 1][1])));
  if (!known.length || known[known.length - 1][1] === known[0][1]) return null;
  const found = [];
  for (let at = 0, end; at < known.length; at = end) {
    for (end = at + 1; end < known.length && known[end][1] === known[at][1];) end++;
    const from = known[at][1], to = end < known.length ? known[end][1] : from;
    for (let place = at; place < end; place++) found.push([known[place][0], from + (to - from) * (place - at) / (end - at)]);
  }
  return found;
}

function stacked(svg, legend, label, times, layers, whole, ends) {
  const width = Math.max(200, svg.clientWidth || 600), first = times[0], last = times[times.length - 1];
  const sums = times.map((_, at) => layers.reduce((sum, layer) => sum + (layer.values[at] ?? 0), 0));
  const top = Math.max(1, ...sums, ...whole.map((value) => value ?? 0)) * 1.05;
  const x = (when) => LEFT + (width - LEFT - RIGHT) * (when - first) / Math.max(1, last - first);
  const y = (value) => TOP + (HEIGHT - TOP - FOOT) * (1 - value / top);
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(share * top);
    parts.push(shape("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at}));
    const text = shape("text", {x: width - RIGHT + 4, y: at + 3});
    text.textContent = share ? size(Math.round(share * top)) : "0";
    parts.push(text);
  }
  let below = times.map(() => 0);
  layers.forEach((layer, number) => {
    const above = below.map((low, at) => low + (layer.values[at] ?? 0));
    const edge = times.map((when, at) => `${x(when).toFixed(1)},${y(above[at]).toFixed(1)}`);
    const foot = times.map((when, at) => `${x(when).toFixed(1)},${y(below[at]).toFixed(1)}`).reverse();
    parts.push(shape("polygon", {class: `layer layer${number}`, points: [...edge, ...foot].join(" ")}, titled(layer.name)));
    below = above;
  });
  const line = times.map((when, at) => (whole[at] === null || whole[at] === undefined ? null : `${x(when).toFixed(1)},${y(whole[at]).toFixed(1)}`));
  if (line.some((one) => one)) parts.push(shape("polyline", {class: "whole", points: line.filter((one) => one).join(" ")}));
  ends.forEach((text, at) => {
    const end = shape("text", {x: at ? width - RIGHT : LEFT, y: HEIGHT - 4, "text-anchor": at ? "end" : "start"});
    end.textContent = text;
    parts.push(end);
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.setAttribute("aria-label", label);
  svg.replaceChildren(...parts);
  legend.replaceChildren(...layers.map((layer, number) => {
    const item = document.createElement("li"), mark = document.createElement("span");
    mark.className = `mark layer${number}`;
    item.append(mark, layer.name);
    return item;
  }).reverse());
}

export function show(now, span) {
  const seen = frames.filter((frame) => frame[0] >= now.when - span);
  if (seen.length < 2) return;
  const times = seen.map((frame) => frame[0]);
  const commands = new Map(now.processes.map((row) => [row.pid, row.command]));
  const peaks = new Map();
  for (const frame of seen) for (const one of frame[2]) peaks.set(one[0], Math.max(peaks.get(one[0]) ?? 0, one[1]));
  const largest = [...peaks.keys()].sort((a, b) => peaks.get(b) - peaks.get(a)).slice(0, MOST_LAYERS);
  const byPid = seen.map((frame) => new Map(frame[2].map((one) => [one[0], one])));
  const layers = largest.map((pid) => ({name: `pid ${pid} ${(commands.get(pid) ?? "(ended)").slice(0, 90)}`,
    values: byPid.map((found) => found.get(pid)?.[1] ?? null)}));
  const rest = seen.map((frame) => frame[2].reduce((sum, one) => sum + (largest.includes(one[0]) ? 0 : one[1]), frame[3]));
  if (rest.some((value) => value)) layers.push({name: "other watched processes", values: rest});
  stacked(byId("process-chart"), byId("process-legend"), `memory of ${peaks.size} processes over time`, times, layers,
    seen.map((frame) => frame[1]), clockTimes(times));
  showOpened(now, times, byPid, commands);
}

const clockTimes = (times) => [times[0], times[times.length - 1]].map((when) => new Date(when * 1000).toLocaleTimeString());

function showOpened(now, times, byPid, commands) {
  byId("opened").hidden = opened === null;
  if (opened === null) return;
  byId("opened-title").textContent = `pid ${opened} ${commands.get(opened) ?? "(ended)"}`;
  const points = byPid.map((found) => found.get(opened)), steps = overSteps(points);
  const places = steps ? steps.map((one) => one[1]) : times, shown = steps ? steps.map((one) => points[one[0]]) : points;
  const layers = KINDS.map(([name, at]) => ({name, values: shown.map((one) => one?.[at] ?? null)}));
  const ends = steps ? [`step ${Math.round(places[0])}`, `step ${Math.round(places[places.length - 1])}`] : clockTimes(times);
  stacked(byId("kinds-chart"), byId("kinds-legend"), `kinds of memory of pid ${opened} over ${steps ? "its steps" : "time"}`,
    places, layers, [], ends);
  const growing = (now.said.growing ?? []).filter((one) => one.pid === opened);
  byId("growing").replaceChildren(...growing.map((one) => {
    const item = document.createElement("li"), where = document.createElement("strong");
    where.textContent = one.where;
    item.append(where, ` ${one.what}: ${size(Math.round(one.rate))} per ${one.per} (sure: ${one.certainty})`);
    return item;
  }));
  if (!growing.length) byId("growing").textContent = "No line of code is known to make it grow (see legroom leak).";
}
