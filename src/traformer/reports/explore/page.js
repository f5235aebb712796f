"use strict";
// Draws one exploration. The page's data is JSON in #data; all text reaches the page as textContent, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const WINDOW = 400; // tokens shown at once; longer inputs are walked through in windows
  const TOP_KEYS = 8;
  const state = { view: 0, query: null, heads: data.runs.map((run) => [...run.opening]), start: data.runs.map(() => 0) };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const parts = (name) => css(name).match(/[0-9a-f]{2}/gi).map((pair) => parseInt(pair, 16)); // "#0072b2" -> 0, 114, 178
  const make = (tag, attributes = {}, text = null) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== null) element.textContent = text;
    return element;
  };
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const share = (value) => `${(100 * value).toFixed(1)} %`;

  // Decoding. A head's rows lie one after another in the order of view.queries. -------------------------------------
  const decoded = new WeakMap();
  function decodeHead(view, head) {
    if (decoded.has(head)) return decoded.get(head);
    const raw = bytes(head.weights);
    const words = new DataView(raw.buffer);
    const rows = [];
    let place = 0;
    for (let r = 0; r < view.queries.length; r++) {
      const count = words.getUint16(place, true);
      place += 2;
      const keys = new Uint32Array(count);
      const weights = new Float32Array(count);
      for (let e = 0; e < count; e++, place += 6) {
        keys[e] = words.getUint32(place, true);
        weights[e] = words.getInt16(place + 4, true) / 32767;
      }
      rows.push({ keys, weights });
    }
    const found = { rows, kept: head.kept ? bytes(head.kept) : null, buckets: head.buckets ? bytes(head.buckets) : null };
    decoded.set(head, found);
    return found;
  }

  // What one head does at one query: weights by key, kept keys and contextual distances up to the query.
  function readRow(view, head, row) {
    const query = view.queries[row];
    const found = decodeHead(view, head);
    const weights = new Map();
    found.rows[row].keys.forEach((key, e) => weights.set(key, found.rows[row].weights[e]));
    if (!found.kept) return { query, weights, kept: null, distance: null, gate: null, reach: null };
    const stride = (view.tokens.length + 7) >> 3;
    const kept = new Uint8Array(query + 1);
    const distance = new Uint32Array(query + 1);
    let count = 0;
    for (let key = query; key >= 0; key--) {
      kept[key] = (found.kept[row * stride + (key >> 3)] >> (key & 7)) & 1;
      if (kept[key]) distance[key] = ++count;
    }
    const gate = head.gates ? head.gates[row] : null;
    // The gate's reach: how many kept keys until it has taken 99 % of a weight.
    const reach = gate === null ? null : gate < 0 ? Math.ceil(Math.log(0.01) / gate) : Infinity;
    return { query, weights, kept, distance, gate, reach };
  }

  // At most 55 % opaque, so that the text on it keeps its contrast.
  function colour(weight) {
    return `rgba(${parts(weight < 0 ? "--s1" : "--s0")},${Math.min(0.55, 0.55 * Math.sqrt(Math.abs(weight)))})`;
  }

  function nearestRow(view, query) {
    let best = 0;
    view.queries.forEach((q, r) => {
      if (Math.abs(q - query) < Math.abs(view.queries[best] - query)) best = r;
    });
    return best;
  }

  // Building ------------------------------------------------------------------------------------------------------
  const name = (id) => data.vocabulary[id] ?? `#${id}`;
  const shown = (id) => name(id).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const panels = data.runs.map(buildRun);
  buildControls();
  draw();

  function buildControls() {
    const slider = document.getElementById("length");
    const lengths = data.runs[0].views.length;
    slider.max = lengths - 1;
    if (lengths < 2) slider.closest("label").hidden = true;
    slider.addEventListener("input", () => {
      state.view = Number(slider.value);
      state.query = null;
      state.start.fill(0);
      draw();
    });
    document.addEventListener("keydown", (event) => {
      if (event.target.matches("input,select,summary") || event.ctrlKey || event.metaKey || event.altKey) return;
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const move = moves[event.key];
      if (move) {
        event.preventDefault();
        if (move[0]) moveQuery(move[0]);
        else moveHead(event.target.closest(".run"), move[1]);
      } else if (event.key === "[" || event.key === "]") {
        slider.value = state.view + (event.key === "]" ? 1 : -1);
        slider.dispatchEvent(new Event("input"));
      }
    });
  }

  function moveQuery(step) {
    const view = data.runs[0].views[state.view];
    const row = Math.min(view.queries.length - 1, Math.max(0, nearestRow(view, state.query) + step));
    setQuery(view.queries[row]);
  }

  function moveHead(where, step) {
    panels.forEach((panel, index) => {
      if (where && panel.section !== where) return;
      const run = data.runs[index];
      const [layer, head] = state.heads[index];
      const flat = (layer * run.heads + head + step + run.layers * run.heads) % (run.layers * run.heads);
      state.heads[index] = [Math.floor(flat / run.heads), flat % run.heads];
    });
    draw();
  }

  function setQuery(query) {
    state.query = query;
    state.start.fill(Math.max(0, query - WINDOW + 20));
    draw();
  }

  function buildRun(run, index) {
    const section = make("section", { class: "run", "aria-labelledby": `run-${index}` });
    section.append(make("h2", { id: `run-${index}` }, run.label), make("p", { class: "sub" }, run.summary));
    const verdict = make("p", {});
    section.append(verdict, make("h3", { id: `heads-${index}` }, "Layers and heads"));
    const grid = make("div", { class: "heads", role: "radiogroup", "aria-labelledby": `heads-${index}` });
    if (run.heads <= 8) grid.style.gridTemplateColumns = `repeat(${run.heads}, minmax(0, 96px))`; // a row per layer
    const buttons = [];
    for (let layer = 0; layer < run.layers; layer++) {
      for (let head = 0; head < run.heads; head++) {
        const button = make("button", { class: "head", type: "button", role: "radio" });
        const canvas = make("canvas", { "aria-hidden": "true" });
        button.append(canvas, document.createTextNode(`L${layer + 1} H${head + 1}`));
        button.setAttribute("aria-label", `layer ${layer + 1}, head ${head + 1}`);
        button.addEventListener("click", () => {
          state.heads[index] = [layer, head];
          draw();
        });
        grid.append(button);
        buttons.push({ button, canvas, layer, head });
      }
    }
    section.append(grid);
    const enlarged = make("details", {});
    const enlarge = make("summary", {});
    const large = make("canvas", { class: "large", role: "img" });
    const pointed = make("p", { class: "sub" }, "Keys from left to right, queries from top to bottom; the line is the query.");
    large.addEventListener("mousemove", (event) => {
      const view = run.views[state.view];
      const box = large.getBoundingClientRect();
      const cell = (at, start, size) => Math.max(0, Math.min(view.cells - 1, Math.floor(((at - start) / size) * view.cells)));
      const column = cell(event.clientX, box.left, box.width);
      const line = cell(event.clientY, box.top, box.height);
      const [layer, head] = state.heads[index];
      const weight = bytes(view.layers[layer][head].map)[line * view.cells + column] / 255;
      const block = Math.ceil(view.tokens.length / view.cells);
      const span = (at) => (block === 1 ? `${at}` : `${at * block}–${Math.min(view.tokens.length, (at + 1) * block) - 1}`);
      pointed.textContent = `query ${span(line)}, key ${span(column)}: ${block === 1 ? "weight" : "largest weight"} ${share(weight)}`;
    });
    enlarged.append(enlarge, large, pointed);
    enlarged.addEventListener("toggle", draw);
    section.append(enlarged);
    const strip = make("canvas", { class: "strip", role: "img" });
    strip.addEventListener("click", (event) => {
      const box = strip.getBoundingClientRect();
      const tokens = run.views[state.view].tokens.length;
      const key = Math.floor(((event.clientX - box.left) / box.width) * (state.query + 1));
      state.start[index] = Math.max(0, Math.min(tokens - WINDOW, key - WINDOW / 2));
      draw();
    });
    const stripText = make("p", { class: "sub" });
    section.append(make("h3", {}, "Every key up to the query"), strip, stripText);
    const walk = make("div", { class: "window" });
    const back = make("button", { type: "button" }, "earlier tokens");
    const on = make("button", { type: "button" }, "later tokens");
    const range = make("span", { class: "sub" });
    for (const [button, step] of [[back, -WINDOW / 2], [on, WINDOW / 2]]) {
      button.addEventListener("click", () => {
        const tokens = run.views[state.view].tokens.length;
        state.start[index] = Math.max(0, Math.min(tokens - WINDOW, state.start[index] + step));
        draw();
      });
    }
    walk.append(back, on, range);
    const tokens = make("div", {
      class: "tokens", tabindex: "0", role: "group",
      "aria-label": `tokens of ${run.label}; left and right arrows choose the query`,
    });
    section.append(make("h3", {}, "Tokens"), walk, tokens);
    const said = make("p", { "aria-live": "polite" });
    const table = make("table", {});
    const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `strongest keys, ${run.label}, model ${index + 1}` });
    scroll.append(table);
    section.append(said, scroll);
    document.getElementById("runs").append(section);
    return { section, verdict, buttons, strip, stripText, walk, range, tokens, said, table, enlarged, enlarge, large };
  }

  // Drawing -------------------------------------------------------------------------------------------------------
  function draw() {
    const views = data.runs[0].views;
    const view = views[state.view];
    document.getElementById("length").value = state.view;
    document.getElementById("length").setAttribute("aria-valuetext", `${view.tokens.length} tokens`);
    document.getElementById("length-text").textContent = `${view.tokens.length.toLocaleString("en")} tokens`;
    if (state.query === null || !view.queries.includes(state.query)) {
      state.query = view.queries[state.query === null ? view.opening : nearestRow(view, state.query)];
      state.start.fill(Math.max(0, state.query - WINDOW + 20));
    }
    data.runs.forEach((run, index) => drawRun(run, index));
  }

  function drawRun(run, index) {
    const panel = panels[index];
    const view = run.views[state.view];
    const [layer, head] = state.heads[index];
    const chosen = view.layers[layer][head];
    const row = nearestRow(view, state.query);
    const seen = readRow(view, chosen, row);
    drawVerdict(panel, view);
    for (const item of panel.buttons) {
      const active = item.layer === layer && item.head === head;
      item.button.setAttribute("aria-checked", String(active));
      item.button.tabIndex = active ? 0 : -1;
      drawMap(item.canvas, view.layers[item.layer][item.head].map, view.cells);
    }
    drawStrip(panel, view, chosen, seen, row);
    drawTokens(panel, run, index, view, seen, row);
    drawWords(panel, view, seen, row, layer, head);
    panel.enlarge.textContent = `Enlarge the map of layer ${layer + 1}, head ${head + 1}`;
    panel.large.setAttribute("aria-label", `attention map of layer ${layer + 1}, head ${head + 1}`);
    if (panel.enlarged.open) {
      drawMap(panel.large, chosen.map, view.cells);
      const context = panel.large.getContext("2d");
      context.fillStyle = css("--soft");
      context.globalAlpha = 0.35;
      context.fillRect(0, Math.floor(seen.query / Math.ceil(view.tokens.length / view.cells)), view.cells, 1);
      context.globalAlpha = 1;
      delete panel.large.dataset.map; // so that the line moves with the query
    }
  }

  function drawVerdict(panel, view) {
    panel.verdict.replaceChildren();
    if (!view.answers.length) return;
    const right = view.answers.filter((answer) => answer.predicted === answer.truth).length;
    const all = right === view.answers.length;
    panel.verdict.append(
      make("span", { class: all ? "good" : "bad" }, `${right} of ${view.answers.length}`),
      document.createTextNode(" answers of this sequence are right."),
    );
  }

  function drawMap(canvas, map, cells) {
    const values = bytes(map);
    if (canvas.dataset.map === map && canvas.dataset.tone === css("--s0")) return;
    canvas.dataset.map = map;
    canvas.dataset.tone = css("--s0");
    canvas.width = canvas.height = cells;
    const context = canvas.getContext("2d");
    const image = context.createImageData(cells, cells);
    const tone = parts("--s0");
    values.forEach((value, place) => {
      image.data.set([...tone, value], 4 * place);
    });
    context.putImageData(image, 0, 0);
  }

  // Above: every key at its ordinary place. Below, where the head removes keys: the kept ones alone, which is where
  // contextual distance has them. A line leads from each kept key to its place among the kept.
  function drawStrip(panel, view, chosen, seen, row) {
    const canvas = panel.strip;
    const ratio = window.devicePixelRatio || 1;
    const tall = seen.kept ? 168 : 64;
    canvas.style.height = `${tall}px`;
    const width = (canvas.width = Math.max(200, Math.round(canvas.clientWidth * ratio)));
    canvas.height = Math.round(tall * ratio);
    const context = canvas.getContext("2d");
    const count = seen.query + 1;
    const x = (key) => (key / count) * width; // the left edge of a key; the query is the last
    const bar = Math.max(1, width / count);
    const base = 58 * ratio; // of the bars above
    const floor = (tall - 4) * ratio; // of the bars below
    const high = 52 * ratio;
    const kept = [];
    if (seen.kept) for (let key = seen.query; key >= 0; key--) if (seen.kept[key]) kept.push(key);
    const slot = Math.min(48 * ratio, width / Math.max(1, kept.length));
    const among = (distance) => width - distance * slot; // the left edge of the kept key at a contextual distance
    if (kept.length && seen.reach !== null) {
      const within = Math.min(seen.reach, kept.length);
      context.fillStyle = css("--beyond");
      if (within) {
        context.fillRect(x(kept[within - 1]), 0, width - x(kept[within - 1]), base);
        context.fillRect(among(within), floor - high, width - among(within), high);
      }
    }
    if (chosen.buckets) {
      const buckets = decodeHead(view, chosen).buckets;
      const size = view.tokens.length / view.buckets;
      context.fillStyle = `rgba(${parts("--s0")},.35)`;
      for (let b = 0; b * size < count; b++) {
        const rise = (buckets[row * view.buckets + b] / 255) * high;
        context.fillRect(x(b * size), base - rise, (size / count) * width, rise);
      }
    }
    if (kept.length) {
      const most = 300; // lines; of more kept keys those with weight
      kept.forEach((key, place) => {
        const weight = Math.abs(seen.weights.get(key) ?? 0);
        if (kept.length > most && weight < 0.01) return;
        context.strokeStyle = `rgba(${parts("--s0")},${0.18 + 0.7 * Math.sqrt(weight)})`;
        context.lineWidth = ratio;
        context.beginPath();
        context.moveTo(x(key) + bar / 2, base + 5 * ratio);
        context.lineTo(among(place + 1) + slot / 2, floor - high - 4 * ratio);
        context.stroke();
      });
    }
    seen.weights.forEach((weight, key) => {
      context.fillStyle = css(weight < 0 ? "--s1" : "--s0");
      const rise = Math.max(ratio, Math.abs(weight) * high);
      context.fillRect(x(key), base - rise, bar, rise);
      if (seen.kept && seen.kept[key]) context.fillRect(among(seen.distance[key]), floor - rise, Math.max(1, slot - (slot > 4 ? 1 : 0)), rise);
    });
    context.fillStyle = css("--soft");
    context.fillRect(0, base, width, ratio);
    if (seen.kept) {
      context.fillRect(0, floor, width, ratio);
      for (let key = 0; key <= seen.query; key++) if (!seen.kept[key]) context.fillRect(x(key), base, bar, 4 * ratio);
    }
    panel.stripText.textContent = seen.kept
      ? "Above: the weight of each key at its place; thick grey below the line: removed. Below: the kept keys alone, as contextual" +
        " distance counts them. The query is at the right end" + (seen.reach === null ? "." : "; shaded: the gate's reach.")
      : "The weight of each key at its place; the query is at the right end.";
    canvas.setAttribute("aria-label", `weights of ${count} keys for query ${seen.query}; the table below has the largest`);
  }

  function drawTokens(panel, run, index, view, seen, row) {
    const tokens = view.tokens.length;
    const start = tokens <= WINDOW ? 0 : Math.max(0, Math.min(tokens - WINDOW, state.start[index]));
    const end = Math.min(tokens, start + WINDOW);
    panel.walk.hidden = tokens <= WINDOW;
    panel.range.textContent = `tokens ${start}–${end - 1} of ${tokens}`;
    const answers = new Map(view.answers.map((answer) => [answer.place, answer]));
    const rows = new Set(view.queries);
    const pieces = [];
    for (let key = start; key < end; key++) {
      const token = make("span", { class: "token" }, shown(view.tokens[key]));
      const classes = token.classList;
      if (key > seen.query) classes.add("later");
      else {
        const weight = seen.weights.get(key) ?? 0;
        if (weight) token.style.backgroundColor = colour(weight);
        if (seen.kept && !seen.kept[key]) classes.add("removed");
        if (seen.kept && seen.reach !== null && seen.kept[key] && seen.distance[key] <= seen.reach) classes.add("reach");
        token.title = describe(view, seen, key);
      }
      if (key === seen.query) classes.add("query");
      if (view.sources[row].includes(key)) classes.add("source");
      const answer = answers.get(key);
      if (answer) classes.add("answer", answer.predicted === answer.truth ? "right" : "wrong");
      if (rows.has(key)) token.addEventListener("click", () => setQuery(key));
      else classes.add("silent");
      pieces.push(token);
    }
    panel.tokens.replaceChildren(...pieces);
  }

  function describe(view, seen, key) {
    const parts = [`key ${key} “${shown(view.tokens[key])}”`, `weight ${(seen.weights.get(key) ?? 0).toFixed(4)}`];
    if (seen.kept) parts.push(seen.kept[key] ? `contextual distance ${seen.distance[key]}` : "removed");
    parts.push(`ordinary distance ${seen.query - key}`);
    return parts.join(", ");
  }

  function drawWords(panel, view, seen, row, layer, head) {
    const query = seen.query;
    const words = [`Layer ${layer + 1}, head ${head + 1}, query ${query} “${shown(view.tokens[query])}”.`];
    const answer = view.answers.find((item) => item.place === query + 1);
    if (answer) words.push(`It predicts “${shown(answer.predicted)}”; the answer is “${shown(answer.truth)}”.`);
    if (seen.kept) {
      const kept = seen.kept.reduce((sum, bit) => sum + bit, 0);
      words.push(`It keeps ${kept} of ${query + 1} keys.`);
    }
    if (seen.reach !== null) {
      words.push(`Its gate has taken 99 % after ${seen.reach === Infinity ? "no number of" : seen.reach} kept keys.`);
    }
    const deciding = view.sources[row];
    if (deciding.length) {
      const weight = deciding.reduce((sum, key) => sum + (seen.weights.get(key) ?? 0), 0);
      words.push(`Weight on what decides the answer (key ${deciding.join(" and ")}): ${share(weight)}.`);
    }
    panel.said.textContent = words.join(" ");
    const header = ["key", "token", "weight", ...(seen.kept ? ["contextual distance"] : []), "ordinary distance"];
    const rows = [...seen.weights].sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, TOP_KEYS);
    const line = (cells, tag) => {
      const tr = make("tr");
      cells.forEach((cell) => tr.append(make(tag, tag === "th" ? { scope: "col" } : {}, String(cell))));
      return tr;
    };
    const body = rows.map(([key, weight]) =>
      line([key, shown(view.tokens[key]), weight.toFixed(4), ...(seen.kept ? [seen.distance[key]] : []), query - key], "td"),
    );
    panel.table.replaceChildren(make("caption", {}, "Strongest keys"), line(header, "th"), ...body);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("resize", draw);
})();
