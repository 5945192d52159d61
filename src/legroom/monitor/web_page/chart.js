// The course of one pool as a small picture. Names only ever become text nodes: nothing here reads markup.

import {percent} from "./words.js";

const HEIGHT = 84, TOP = 6, FOOT = 4, LEFT = 2, RIGHT = 36;
const MOST_DOTS = 4000;

export function shape(name, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function titled(text) {
  const node = shape("title", {});
  node.textContent = text;
  return node;
}

const share = ([, used, size]) => (used === null || !size ? null : used / size);

// One more dot, in bounded memory: beyond the bound, of every four older ones the highest and the lowest stay.
export function addDot(dots, dot) {
  dots.push(dot);
  if (dots.length <= MOST_DOTS) return dots;
  const older = dots.slice(0, MOST_DOTS / 2), kept = [];
  for (let start = 0; start < older.length; start += 4) {
    const four = older.slice(start, start + 4);
    const gap = four.find((one) => one[1] === null);
    const known = four.filter((one) => one[1] !== null).sort((a, b) => a[1] - b[1]);
    const pair = known.length ? [known[known.length - 1], gap ?? known[0]] : [gap];
    kept.push(...[...new Set(pair)].sort((a, b) => a[0] - b[0]));
  }
  return kept.concat(dots.slice(MOST_DOTS / 2));
}

function runs(dots) {
  const found = [[]];
  for (const dot of dots) {
    const value = share(dot);
    if (value !== null) found[found.length - 1].push([dot[0], value]);
    else if (found[found.length - 1].length) found.push([]);
  }
  return found.filter((run) => run.length);
}

// Draw into an <svg>; what it shows in words becomes its label.
export function draw(svg, pool, dots, {first, last, marks, spells}) {
  const width = Math.max(120, svg.clientWidth || 260);
  const x = (when) => LEFT + (width - LEFT - RIGHT) * Math.min(1, Math.max(0, (when - first) / Math.max(1, last - first)));
  const y = (value) => TOP + (HEIGHT - TOP - FOOT) * (1 - Math.min(1, Math.max(0, value)));
  const parts = [];
  for (const level of [0, 0.5, 1]) {
    parts.push(shape("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(level), y2: y(level)}));
    const label = shape("text", {x: width - RIGHT + 4, y: y(level) + 3});
    label.textContent = `${level * 100}%`;
    parts.push(label);
  }
  for (const spell of spells) {
    const from = x(spell.since), until = x(spell.until ?? last);
    if ((spell.until ?? last) < first || (spell.pool !== null && spell.pool !== pool.name)) continue;
    parts.push(shape("rect", {class: spell.level === "critical" ? "critical" : "warning", x: from, y: TOP,
      width: Math.max(2, until - from), height: HEIGHT - TOP - FOOT}, titled(`${spell.code}: ${spell.message}`)));
  }
  for (const mark of marks) {
    if (mark.when < first) continue;
    parts.push(shape("line", {class: "mark", x1: x(mark.when), x2: x(mark.when), y1: TOP, y2: HEIGHT - FOOT}, titled(mark.text)));
  }
  const seen = dots.filter((dot) => dot[0] >= first);
  for (const run of runs(seen)) {
    const points = run.map(([when, value]) => `${x(when).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    parts.push(shape("polygon", {class: "area", points: `${x(run[0][0])},${y(0)} ${points} ${x(run[run.length - 1][0])},${y(0)}`}));
    parts.push(shape("polyline", {class: "used", points}));
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  svg.setAttribute("aria-label", inWords(pool, seen));
  svg.replaceChildren(...parts);
}

function inWords(pool, dots) {
  const known = dots.map(share).filter((value) => value !== null);
  if (!known.length) return `${pool.name}: unknown`;
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  return `${pool.name} over time: now ${percent(share(dots[dots.length - 1]))}, between ${percent(low)} and ${percent(high)}`;
}
