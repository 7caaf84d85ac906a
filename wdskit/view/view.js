// The page of `wdskit view`. Content of shards becomes text or attributes of elements, never markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const NUM_COLOURS = 6;
const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

const state = {
  numSamples: 0,
  start: 0,        // first row of the page; in a search, index of the page's first row in `search.rows`
  search: null,    // {text, filter, rows, next, numUnanswered, problem} while a search is shown
  rows: [],        // rows of the page
  opened: -1,      // index in `rows` of the sample in the dialog
  turn: 0,         // number of the last request for a page; answers to earlier requests are not shown
};

function make(name, settings = {}, ...children) {
  const element = document.createElement(name);
  Object.assign(element, settings);
  element.append(...children);
  return element;
}

function draw(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

async function ask(path, parameters = {}) {
  const response = await fetch(`${path}?${new URLSearchParams(parameters)}`);
  const answer = (response.headers.get("content-type") ?? "").startsWith("application/json") ? await response.json() : {};
  if (!response.ok) throw new Error(answer.error ?? `${path}: ${response.status}`);
  return answer;
}

function say(problem) {
  $("problem").textContent = problem;
  $("problem").hidden = !problem;
}

// Return an event handler that shows the errors of `action`.
const guarded = (action) => async (...values) => {
  try {
    await action(...values);
  } catch (error) {
    say(error instanceof TypeError ? "wdskit view does not answer any more. Start it again." : error.message);
  }
};

// Return an event handler that waits for earlier actions: keys may be pressed faster than samples arrive.
let last = Promise.resolve();
const inTurn = (action) => (...values) => { last = last.then(() => guarded(action)(...values)); };

function colourOf(label) {
  let sum = 0;
  for (const char of label) sum = (sum * 31 + char.codePointAt(0)) % 65521;
  return `c${sum % NUM_COLOURS}`;
}

const counted = (count, one, several) => `${number.format(count)} ${count === 1 ? one : several}`;

function describeImage(sample) {
  const parts = [];
  if (sample.boxes.length) parts.push(counted(sample.boxes.length, "box", "boxes"));
  if (sample.masks.length) parts.push(counted(sample.masks.length, "mask", "masks"));
  return parts.length ? `Image with ${parts.join(" and ")}` : "Image";
}

// Return the image with its masks and boxes, or the problem of the sample. Coordinates are pixels of the image.
function drawSample(sample, side, withLabels) {
  const frame = make("div", { className: "frame" });
  if (!sample.image) {
    frame.append(make("p", { textContent: sample.problem }));
    return frame;
  }
  const { field, width, height } = sample.image;
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describeImage(sample) });
  const layer = (path, name, className) => {
    const parameters = new URLSearchParams({ row: sample.row, field: name, side });
    const image = draw("image", { href: `${path}?${parameters}`, width, height, preserveAspectRatio: "none", class: className });
    image.addEventListener("error", () => {
      if (path === "image") frame.replaceChildren(make("p", { textContent: "The image cannot be decoded." }));
      else image.remove();
    });
    picture.append(image);
  };
  layer("image", field, "");
  for (const mask of sample.masks) layer("mask", mask, "mask");
  for (const box of sample.boxes) {
    const place = { x: box.x, y: box.y, width: box.width, height: box.height };
    picture.append(draw("rect", { ...place, class: `box ${colourOf(box.label)}` }));
  }
  for (const box of withLabels ? sample.boxes : []) {
    const size = Math.max(width, height) / 40;
    const tag = draw("text", { x: box.x, y: Math.max(size, box.y - size / 3), "font-size": size, class: "tag" });
    tag.textContent = box.label;
    picture.append(tag);
  }
  frame.append(picture);
  return frame;
}

function makeCard(sample, place) {
  const caption = make("span", { className: "caption" }, make("span", { textContent: sample.key || sample.problem, title: sample.key }));
  caption.append(make("span", { className: "soft", textContent: sample.class || `#${number.format(sample.row + 1)}` }));
  const card = make("button", { type: "button", className: "card", tabIndex: place ? -1 : 0 }, drawSample(sample, 256, false), caption);
  card.addEventListener("click", guarded(() => open(place)));
  return make("li", {}, card);
}

const cards = () => [...document.querySelectorAll(".card")];
const perPage = () => Number($("count").value);

async function showPage(start, focusOn = null) {
  const turn = ++state.turn;
  const count = perPage();
  let rows;
  if (state.search) {
    rows = await findRows(start, count, turn);
  } else {
    rows = Array.from({ length: Math.max(0, Math.min(count, state.numSamples - start)) }, (_, at) => start + at);
  }
  if (turn !== state.turn) return;
  const samples = rows.length ? await ask("api/page", rows.map((row) => ["row", row])) : [];
  if (turn !== state.turn) return;
  state.start = start;
  state.rows = rows;
  $("grid").replaceChildren(...samples.map(makeCard));
  showPlace();
  if (focusOn !== null) focusCard(focusOn === "last" ? rows.length - 1 : focusOn);
}

// Return rows `start` to `start + count` of the search; continue the search until it has found these rows.
async function findRows(start, count, turn) {
  const search = state.search;
  while (search.rows.length < start + count && search.next !== null && turn === state.turn) {
    const parameters = { text: search.text, filter: search.filter, start: search.next, count };
    const found = await ask("api/find", parameters);
    search.rows.push(...found.rows);
    search.next = found.next;
    search.numUnanswered += found.num_unanswered;
    search.problem ||= found.problem;
    const share = search.next === null ? 1 : search.next / state.numSamples;
    $("place").textContent = `Searching: ${number.format(search.rows.length)} found in ${Math.floor(100 * share)}% of all`;
  }
  return search.rows.slice(start, start + count);
}

function showPlace() {
  const { start, rows, search, numSamples } = state;
  const isOpen = search && search.next !== null;
  const total = search ? search.rows.length : numSamples;
  const of = isOpen ? `more than ${number.format(total)} found` : number.format(total) + (search ? " found" : "");
  const range = rows.length ? `${number.format(start + 1)} to ${number.format(start + rows.length)} of ${of}` : "No sample";
  $("place").textContent = range;
  $("back").disabled = start === 0;
  $("next").disabled = start + rows.length >= total && !isOpen;
  $("row").max = String(total);
  $("clear").hidden = !search;
  const num = search ? search.numUnanswered : 0;
  say(num ? `${counted(num, "sample has", "samples have")} no answer, the first: ${search.problem}` : "");
}

const turnPage = (by, focusOn = null) => showPage(Math.max(0, state.start + by * perPage()), focusOn);

function focusCard(place) {
  const all = cards();
  if (!all.length) return;
  const at = Math.min(Math.max(place, 0), all.length - 1);
  all.forEach((card, index) => { card.tabIndex = index === at ? 0 : -1; });
  all[at].focus();
}

async function moveFocus(key) {
  const all = cards();
  const at = all.indexOf(document.activeElement);
  if (at < 0) return;
  const columns = all.filter((card) => card.offsetTop === all[0].offsetTop).length;
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key];
  if (at + by < 0 && !$("back").disabled) await turnPage(-1, "last");
  else if (at + by >= all.length && !$("next").disabled) await turnPage(1, 0);
  else if (at + by >= 0 && at + by < all.length) focusCard(at + by);
}

async function open(place) {
  const sample = await ask("api/sample", { row: state.rows[place] });
  state.opened = place;
  $("key").textContent = sample.key;
  const details = [`#${number.format(sample.row + 1)}`, sample.shard];
  if (sample.class) details.push(`class ${sample.class}`);
  if (sample.image) details.push(`${sample.image.width} x ${sample.image.height}`);
  const fields = make("div", {}, make("p", { className: "soft field", textContent: details.join(", ") }));
  for (const field of sample.fields) {
    const head = make("h3", {}, field.name, make("span", { className: "soft", textContent: ` ${counted(field.num_bytes, "byte", "bytes")}` }));
    const part = make("section", { className: "field" }, head);
    if (field.text !== null) {
      const text = make("pre", { textContent: field.text, tabIndex: 0 });
      text.setAttribute("aria-label", field.name);
      text.setAttribute("role", "region");
      part.append(text);
    }
    fields.append(part);
  }
  $("sample").replaceChildren(drawSample(sample, 1024, true), fields);
  $("before").disabled = place === 0 && $("back").disabled;
  $("after").disabled = place === state.rows.length - 1 && $("next").disabled;
  if (!$("dialog").open) $("dialog").showModal();
  if (!$("dialog").contains(document.activeElement) || document.activeElement.disabled) $("close").focus();
}

async function openNeighbour(by) {
  const place = state.opened + by;
  if (place < 0) {
    if ($("back").disabled) return;
    await turnPage(-1);
    await open(state.rows.length - 1);
  } else if (place >= state.rows.length) {
    if ($("next").disabled) return;
    await turnPage(1);
    if (state.rows.length) await open(0);
  } else {
    await open(place);
  }
}

function showHistogram(chart) {
  const bars = make("div", { className: "bins" });
  for (const [level, title] of chart.bars) {
    const bar = make("span", { title });
    bar.style.height = `${level}%`;
    bars.append(bar);
  }
  bars.setAttribute("role", "img");
  bars.setAttribute("aria-label", chart.label);
  const ends = make("div", { className: "ends" }, ...chart.ends.map((text) => make("span", { textContent: text })));
  return make("div", {}, make("h2", { textContent: chart.title }), bars, ends);
}

function showClasses(counts) {
  const shown = make("div", {}, make("h2", { textContent: `Classes: ${number.format(counts.num_classes)}` }));
  for (const [name, count, level] of counts.classes) {
    const bar = make("span", { className: "length" });
    bar.style.width = `${level}%`;
    shown.append(make("div", { className: "counted" }, make("span", { textContent: name, title: name }), bar, make("span", { textContent: number.format(count) })));
  }
  const others = counts.num_classes - counts.classes.length;
  if (others) shown.append(make("p", { className: "soft", textContent: `and ${number.format(others)} with fewer samples` }));
  return shown;
}

async function showCounts() {
  const section = $("counts");
  section.hidden = !section.hidden;
  $("show-counts").setAttribute("aria-expanded", String(!section.hidden));
  if (section.hidden || section.childElementCount) return;
  section.append(make("p", { textContent: "Counting." }));
  const counts = await ask("api/counts");
  const spread = `${number.format(counts.num_read)} samples, spread evenly over ${number.format(counts.num_samples)}`;
  const what = counts.num_read === counts.num_samples ? `All ${number.format(counts.num_read)} samples` : spread;
  section.replaceChildren(make("p", { className: "soft", textContent: what + (counts.num_bad ? `; ${number.format(counts.num_bad)} cannot be read` : "") }));
  if (counts.num_classes) section.append(showClasses(counts));
  section.append(...counts.histograms.map(showHistogram));
}

async function begin() {
  const about = await ask("api/about");
  state.numSamples = about.num_samples;
  document.title = `${about.title} - wdskit view`;
  $("title").textContent = about.title;
  $("size").textContent = counted(about.num_samples, "sample", "samples");
  await showPage(0);
}

$("back").addEventListener("click", guarded(() => turnPage(-1)));
$("next").addEventListener("click", guarded(() => turnPage(1)));
$("count").addEventListener("change", guarded(() => showPage(state.start - (state.start % perPage()))));
$("row").addEventListener("change", guarded(() => {
  const row = Number($("row").value);
  if (Number.isInteger(row) && row >= 1 && row <= Number($("row").max)) return showPage(row - 1);
  say(`There is no sample ${$("row").value}: they are numbered 1 to ${number.format(Number($("row").max))}.`);
}));
$("search").addEventListener("submit", guarded((event) => {
  event.preventDefault();
  const [text, filter] = [$("text").value, $("filter").value.trim()];
  state.search = text || filter ? { text, filter, rows: [], next: 0, numUnanswered: 0, problem: "" } : null;
  return showPage(0);
}));
$("clear").addEventListener("click", guarded(() => {
  state.search = null;
  $("search").reset();
  return showPage(0);
}));
for (const name of ["boxes", "masks"]) {
  $(name).addEventListener("change", () => document.body.classList.toggle(`no-${name}`, !$(name).checked));
}
$("show-counts").addEventListener("click", guarded(showCounts));
const moveInTurn = inTurn(moveFocus);
const openInTurn = inTurn(openNeighbour);
$("grid").addEventListener("keydown", (event) => {
  if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
  moveInTurn(event.key);
});
$("before").addEventListener("click", () => openInTurn(-1));
$("after").addEventListener("click", () => openInTurn(1));
$("close").addEventListener("click", () => $("dialog").close());
$("dialog").addEventListener("close", () => focusCard(state.opened));
$("dialog").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by && document.activeElement.tagName !== "PRE") openInTurn(by);
});
guarded(begin)();
