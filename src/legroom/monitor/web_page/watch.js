// Wires the stream of events to the page.

import {addDot, draw} from "./chart.js";
import * as page from "./cards_and_tables.js";
import * as perProcess from "./process_charts.js";
import {rounded, timeOfDay} from "./words.js";

const SPANS = [["5 min", 300], ["1 h", 3600], ["all", Infinity]];
const sorting = {key: "pss", down: true};
let span = 300, now = null, courses = {}, heard = 0, source = null;

function state(kind, words) {
  const node = page.byId("state");
  node.dataset.state = kind;
  if (node.textContent !== words) node.textContent = words;
}

function show() {
  if (!now) return;
  page.byId("watched").textContent = now.watched;
  document.title = now.alarms.length ? `(${now.alarms.length}) legroom watch` : "legroom watch";
  const last = now.when, first = Math.max(now.began, last - span);
  page.dropPools(new Set(now.pools.map((pool) => pool.name)));
  for (const pool of now.pools) {
    const here = now.alarms.filter((alarm) => alarm.pool === pool.name).map((alarm) => alarm.level);
    const dots = courses[pool.name] ?? [];
    const card = page.poolCard(pool, here.includes("critical") ? "critical" : here[0], dots.some((dot) => dot[1] !== null));
    card.axis.firstChild.textContent = `${rounded(last - first)} ago`;
    if (pool.size !== 0) draw(card.svg, pool, dots, {first, last, marks: now.marked, spells: now.spells});
  }
  page.alarms(now.alarms);
  page.kernel(now);
  page.script(now.said);
  page.processes(now, sorting, openProcess);
  perProcess.show(now, span);
  page.entries(now.entries);
  page.groups(now.groups ?? null);
  page.gpuCopies(now.gpu_copies ?? null);
  page.cost(now);
}

function take(moment) {
  heard = Date.now();
  if (moment.schema === undefined) return;  // nothing has been seen yet
  now = moment;
  state("live", `live, ${timeOfDay(now.when)}`);
  show();
}

function begin() {
  source = new EventSource("events");
  source.addEventListener("story", (event) => {
    const story = JSON.parse(event.data);
    courses = story.courses ?? {};
    perProcess.begin(story.process_courses);
    take(story);
  });
  source.addEventListener("moment", (event) => {
    const moment = JSON.parse(event.data);
    for (const pool of moment.pools) {
      courses[pool.name] = addDot(courses[pool.name] ?? [], [moment.when, pool.used, pool.size]);
    }
    perProcess.add(moment);
    take(moment);
  });
  source.addEventListener("end", () => {
    end();
    state("ended", now ? `the watch has ended, ${timeOfDay(now.when)}` : "the watch has ended");
  });
  source.onerror = () => state("lost", "connection lost, reconnecting");
}

function end() {
  if (source) source.close();
  source = null;
}

function spanButtons() {
  page.byId("spans").replaceChildren(...SPANS.map(([name, seconds]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.setAttribute("aria-pressed", seconds === span);
    button.onclick = () => { span = seconds; spanButtons(); show(); };
    return button;
  }));
}

function sort(key) {
  sorting.down = sorting.key === key ? !sorting.down : key !== "command" && key !== "pid";
  sorting.key = key;
  const focused = document.activeElement?.closest("#process-head") !== null;
  page.processHead(sorting, sort);
  if (focused) document.querySelector("th[aria-sort] button").focus();  // the one that was pressed was replaced
  show();
}

function openProcess(pid) {
  perProcess.open(perProcess.isOpen(pid) ? null : pid);
  show();
}

page.processHead(sorting, sort);
page.byId("close-process").onclick = () => openProcess(null);
spanButtons();
begin();
addEventListener("resize", show);
// A page that nobody sees asks for nothing: browsers allow few connections to one address.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) end();
  else if (page.byId("state").dataset.state !== "ended") { end(); begin(); }
});
setInterval(() => {
  if (source && now && page.byId("state").dataset.state === "live" && Date.now() - heard > 5000 * now.interval + 5000) {
    state("late", `no sample since ${timeOfDay(now.when)}`);
  }
}, 1000);
