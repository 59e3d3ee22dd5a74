"use strict";
(() => {
  // Every text from the checkpoint goes into the page through textContent, never as HTML.
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const DEEPEST = 64; // levels of the tree: the rest of a longer key is one name
  const ROW = 28; // pixels, --row of the style sheet
  const COLORS = 8;
  const FILES_SHOWN = 40;
  const PIECES_SHOWN = 200;
  const CELLS = 1500; // of the treemap
  const CELL_AREA = 50; // pixels; what would be smaller shares a cell

  // --- text ---------------------------------------------------------------------------------------

  const number = new Intl.NumberFormat("en-US");
  const count = (n, noun) => `${number.format(n)} ${noun}${n === 1 ? "" : "s"}`;

  function size(bytes) {
    let unit = 0;
    for (; bytes >= 1023.95 && unit < 5; unit++) bytes /= 1024;
    return `${unit ? bytes.toFixed(1) : bytes} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
  }

  function percent(part, whole) {
    const value = whole ? (100 * part) / whole : 0;
    return value > 0 && value < 0.1 ? "<0.1 %" : `${value.toFixed(1)} %`;
  }

  // Control characters, and those that change the direction of text, are shown by their numbers.
  const visible = (text) =>
    text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]/gu,
      (c) => `\\u{${c.codePointAt(0).toString(16)}}`) || "(empty)";

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }

  const colored = (element, color) => {
    element.style.setProperty("--c", `var(--c${color})`);
    return element;
  };
  const dot = (color) => colored(make("span", { class: "dot" }), color);

  // --- the items, in columns ------------------------------------------------------------------------

  const items = data.form.length;
  const keys = new Array(items);
  for (let i = 0, before = ""; i < items; i++) {
    before = before.slice(0, data.keys[2 * i]) + data.keys[2 * i + 1];
    keys[i] = before;
  }
  const lower = keys.map((key) => key.toLowerCase());
  const form = (item) => data.forms[data.form[item]]; // [dtype or -1, shape, bytes]
  const bytesOf = (item) => form(item)[2];
  const pieces = new Map(data.pieces); // of the items that are not stored in one piece
  const stats = new Map(data.stats || []);
  const notes = new Map(data.notes || []); // values of scalars and small objects, and what tensors are tied to

  function piecesOf(item) {
    if (data.file[item] >= 0) return [[data.file[item], data.offset[item], data.length[item], null, null]];
    return pieces.get(item) || [];
  }

  const OBJECT = data.dtypes.length; // stands for objects in the list of dtypes
  const kindOf = (item) => (form(item)[0] < 0 ? OBJECT : form(item)[0]);
  const kindName = (kind) => (kind === OBJECT ? "object" : data.dtypes[kind]);
  const shapeText = (item) => {
    const [dtype, shape] = form(item);
    const text = dtype < 0 ? "" : data.shapes[shape].length ? data.shapes[shape].join(" × ") : "scalar";
    return [text, visible(notes.get(item) || " ").trim()].filter(Boolean).join(" ");
  };
  const kinds = [];
  for (let kind = 0; kind <= OBJECT; kind++) kinds.push({ kind, items: 0, elements: 0, bytes: 0 });
  for (let i = 0; i < items; i++) {
    const total = kinds[kindOf(i)];
    total.items++;
    total.bytes += bytesOf(i);
    if (form(i)[0] >= 0) total.elements += data.shapes[form(i)[1]].reduce((a, b) => a * b, 1);
  }
  const ranked = kinds.filter((total) => total.items).sort((a, b) => b.bytes - a.bytes);
  const colorOf = new Array(OBJECT + 1).fill(COLORS);
  ranked.filter(({ kind }) => kind !== OBJECT).forEach(({ kind }, place) => { colorOf[kind] = Math.min(place, COLORS - 1); });

  // --- the tree -------------------------------------------------------------------------------------
  // Node 0 is the root; a node comes after its parent. A key may be both an item and a container.

  const label = [""], parent = [-1], depth = [-1], itemAt = [-1], kids = [[]];
  const nodeOf = new Int32Array(items);
  {
    const known = [new Map()];
    const child = (at, name) => {
      let node = known[at].get(name);
      if (node === undefined) {
        node = label.length;
        label.push(name); parent.push(at); depth.push(depth[at] + 1); itemAt.push(-1); kids.push([]); known.push(new Map());
        known[at].set(name, node);
        kids[at].push(node);
      }
      return node;
    };
    for (let i = 0; i < items; i++) {
      let at = 0, start = 0;
      for (let level = 1; level < DEEPEST; level++) {
        const stop = keys[i].indexOf(".", start);
        if (stop < 0) break;
        at = child(at, keys[i].slice(start, stop));
        start = stop + 1;
      }
      at = child(at, keys[i].slice(start));
      nodeOf[i] = at;
      itemAt[at] = i;
    }
  }
  const nodes = label.length;
  const bytes = new Float64Array(nodes), leaves = new Int32Array(nodes);
  for (let node = nodes - 1; node >= 0; node--) {
    if (itemAt[node] >= 0) { bytes[node] += bytesOf(itemAt[node]); leaves[node]++; }
    if (node) { bytes[parent[node]] += bytes[node]; leaves[parent[node]] += leaves[node]; }
  }
  const isContainer = (node) => kids[node].length > 0;
  // The parts of the first level that has several, such as a model and an optimizer, have a color each.
  let top = 0;
  while (kids[top].length === 1) top = kids[top][0];
  const hue = new Int32Array(nodes).fill(COLORS);
  [...kids[top]].sort((a, b) => bytes[b] - bytes[a]).forEach((kid, place) => { hue[kid] = Math.min(place, COLORS - 1); });
  for (let node = 1; node < nodes; node++) if (hue[node] === COLORS) hue[node] = hue[parent[node]];
  const nameOf = (node) => {
    const parts = [];
    for (let at = node; at > 0; at = parent[at]) parts.push(label[at]);
    return parts.reverse().join(".");
  };

  const expanded = new Uint8Array(nodes);
  const closed = new Set(); // while the tree is filtered, everything is open but these
  const filter = { words: [], dtype: -1, file: -1 };
  let matching = null; // per node: how many items below it match; null: no filter
  let order = "stored";
  let shown = []; // the nodes that have a row, from top to bottom
  let selected = 0;

  const collator = new Intl.Collator("en", { numeric: true });
  function children(node) {
    const all = matching ? kids[node].filter((each) => matching[each]) : kids[node];
    if (order === "stored") return all;
    return [...all].sort(order === "size" ? (a, b) => bytes[b] - bytes[a] : (a, b) => collator.compare(label[a], label[b]));
  }
  const isOpen = (node) => (matching ? !closed.has(node) : expanded[node] === 1);

  function layOut() {
    shown = [];
    siblings.clear();
    const waiting = children(0).slice().reverse();
    while (waiting.length) {
      const node = waiting.pop();
      shown.push(node);
      if (isContainer(node) && isOpen(node)) {
        const below = children(node);
        for (let i = below.length - 1; i >= 0; i--) waiting.push(below[i]);
      }
    }
  }

  function toggle(node, open = !isOpen(node)) {
    if (!isContainer(node)) return;
    if (matching) closed[open ? "delete" : "add"](node);
    else expanded[node] = open ? 1 : 0;
    layOut();
    draw();
  }

  // --- rows: only those in view exist -----------------------------------------------------------------

  const tree = $("tree"), rows = tree.firstElementChild;
  const siblings = new Map(); // per parent: the position of each child, made when first asked for

  function position(node) {
    const at = parent[node];
    if (!siblings.has(at)) siblings.set(at, new Map(children(at).map((each, place) => [each, place + 1])));
    return [siblings.get(at).get(node) || 1, siblings.get(at).size];
  }

  function marked(text) {
    const words = filter.words.filter((word) => !/[*?]/.test(word)).flatMap((word) => word.split("."));
    const low = text.toLowerCase();
    const hit = words.filter((word) => word && low.includes(word)).sort((a, b) => b.length - a.length)[0];
    if (!hit || low.length !== text.length) return [visible(text)];
    const at = low.indexOf(hit), stop = at + hit.length;
    const shownPart = (part) => (part ? visible(part) : "");
    return [shownPart(text.slice(0, at)), make("mark", {}, visible(text.slice(at, stop))), shownPart(text.slice(stop))];
  }

  function row(place) {
    const node = shown[place], item = itemAt[node], container = isContainer(node);
    const element = make("div", {
      class: `row ${container ? (isOpen(node) ? "open" : "closed") : "leaf"}`,
      role: "treeitem", id: `node-${node}`, "aria-level": depth[node] + 1, "aria-selected": node === selected,
    });
    const [at, of] = position(node);
    element.setAttribute("aria-posinset", at);
    element.setAttribute("aria-setsize", of);
    if (container) element.setAttribute("aria-expanded", isOpen(node));
    element.style.top = `${place * ROW}px`;
    const name = make("span", { class: "name" }, make("span", { class: "twisty", "aria-hidden": "true" }), make("bdi", {}, ...marked(label[node])));
    name.style.paddingLeft = `${6 + 15 * Math.min(depth[node], 16)}px`;
    const shape = make("span", { class: "shape" }), dtype = make("span", { class: "dtype" });
    if (item >= 0 && !container) {
      shape.textContent = shapeText(item);
      dtype.append(dot(colorOf[kindOf(item)]), kindName(kindOf(item)));
    } else {
      shape.classList.add("count");
      shape.append(count(leaves[node], "key"));
      if (parent[node] === top) dtype.append(dot(hue[node]));
    }
    const share = make("span", { class: "share", "aria-hidden": "true" }, make("i"));
    const whole = bytes[parent[node]];
    share.firstElementChild.style.width = `${whole ? (100 * bytes[node]) / whole : 0}%`;
    element.append(name, shape, dtype, make("span", { class: "size" }, size(bytes[node])), share);
    element.title = visible(nameOf(node));
    return element;
  }

  function draw() {
    rows.style.height = `${shown.length * ROW}px`;
    const first = Math.max(0, Math.floor(tree.scrollTop / ROW) - 8);
    const last = Math.min(shown.length, Math.ceil((tree.scrollTop + tree.clientHeight) / ROW) + 8);
    const visibleRows = [];
    for (let place = first; place < last; place++) visibleRows.push(row(place));
    rows.replaceChildren(...visibleRows);
    if (!shown.length) rows.append(make("p", { class: "nothing" }, items ? "No key matches." : "The checkpoint is empty."));
    const active = document.getElementById(`node-${selected}`);
    if (active) tree.setAttribute("aria-activedescendant", active.id);
    else tree.removeAttribute("aria-activedescendant");
  }

  function reveal(node) {
    const place = shown.indexOf(node);
    if (place < 0) return;
    const top = place * ROW;
    if (top < tree.scrollTop) tree.scrollTop = top;
    else if (top + ROW > tree.scrollTop + tree.clientHeight) tree.scrollTop = top + ROW - tree.clientHeight;
  }

  function select(node) {
    selected = node;
    const path = [];
    for (let at = parent[node]; at > 0; at = parent[at]) path.push(at);
    const hidden = path.filter((at) => !isOpen(at));
    if (hidden.length) {
      for (const at of hidden) if (matching) closed.delete(at); else expanded[at] = 1;
      layOut();
    }
    rows.style.height = `${shown.length * ROW}px`;
    reveal(node);
    draw();
    showDetail();
    showMap();
  }

  function selectFree(node) { // also one that the filter hides
    if (matching && !matching[node]) clearFilter();
    select(node);
  }

  tree.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  tree.addEventListener("click", (event) => {
    const element = event.target.closest(".row");
    if (!element) return;
    const node = Number(element.id.slice(5));
    const hitTwisty = event.target.closest(".twisty") || node === selected;
    select(node);
    if (hitTwisty) toggle(node);
  });

  tree.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !shown.length) return;
    const place = shown.indexOf(selected), page = Math.max(1, Math.floor(tree.clientHeight / ROW) - 1);
    const go = (to) => select(shown[Math.max(0, Math.min(shown.length - 1, to))]);
    const node = selected;
    switch (event.key) {
      case "ArrowDown": go(place + 1); break;
      case "ArrowUp": go(place - 1); break;
      case "PageDown": go(place + page); break;
      case "PageUp": go(place - page); break;
      case "Home": go(0); break;
      case "End": go(shown.length - 1); break;
      case "ArrowRight":
        if (place < 0) go(0);
        else if (isContainer(node) && !isOpen(node)) toggle(node, true);
        else if (isContainer(node)) go(place + 1);
        break;
      case "ArrowLeft":
        if (place >= 0 && isContainer(node) && isOpen(node)) toggle(node, false);
        else if (place >= 0 && parent[node] > 0) select(parent[node]);
        break;
      case "Enter": case " ": if (place >= 0) toggle(node); else go(0); break;
      default: return;
    }
    event.preventDefault();
  });

  // --- search and filters -----------------------------------------------------------------------------

  const search = $("search");

  function matcher(word) {
    if (!/[*?]/.test(word)) return (key) => key.includes(word);
    const pattern = word.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, ".*").replace(/\?/g, ".");
    const whole = new RegExp(`^${pattern}$`, "s");
    return (key) => whole.test(key);
  }

  function applyFilter() {
    filter.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { words, dtype, file } = filter, tests = words.map(matcher);
    closed.clear();
    let found = items;
    if (!words.length && dtype < 0 && file < 0) {
      matching = null;
    } else {
      matching = new Int32Array(nodes);
      found = 0;
      for (let i = 0; i < items; i++) {
        if (dtype >= 0 && kindOf(i) !== dtype) continue;
        if (file >= 0 && data.file[i] !== file && !piecesOf(i).some((piece) => piece[0] === file)) continue;
        if (!tests.every((test) => test(lower[i]))) continue;
        found++;
        matching[nodeOf[i]]++;
      }
      for (let node = nodes - 1; node > 0; node--) matching[parent[node]] += matching[node];
    }
    const chip = (text, clear) => make("button", { class: "chip", "aria-label": `Remove the filter ${text}`, onclick: () => { clear(); applyFilter(); } }, `${text} ✕`);
    const status = make("span", { id: "found", role: "status" }, matching ? `${number.format(found)} of ${count(items, "key")}` : count(items, "key"));
    const chips = [];
    if (dtype >= 0) chips.push(chip(kindName(dtype), () => { filter.dtype = -1; }));
    if (file >= 0) chips.push(chip(visible(data.files[file][0]), () => { filter.file = -1; }));
    $("found").parentElement.replaceChildren(status, ...chips);
    for (const button of document.querySelectorAll("[data-dtype]")) button.setAttribute("aria-pressed", Number(button.dataset.dtype) === dtype);
    for (const button of document.querySelectorAll("[data-file]")) button.setAttribute("aria-pressed", Number(button.dataset.file) === file);
    layOut();
    tree.scrollTop = 0;
    draw();
    if (shown.includes(selected)) { reveal(selected); draw(); }
  }

  function clearFilter() {
    search.value = "";
    filter.dtype = filter.file = -1;
    applyFilter();
  }

  search.addEventListener("input", applyFilter);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (search.value) { search.value = ""; applyFilter(); } else tree.focus();
    } else if (event.key === "ArrowDown" || event.key === "Enter") {
      tree.focus();
      const first = matching ? shown.find((node) => itemAt[node] >= 0) : shown[0];
      if (first !== undefined) select(first);
    } else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.altKey || event.metaKey || event.target === search) return;
    search.focus();
    search.select();
    event.preventDefault();
  });
  $("order").addEventListener("change", (event) => {
    order = event.target.value;
    layOut();
    draw();
    reveal(selected);
  });

  // --- the selected key -------------------------------------------------------------------------------

  function fact(name, value, wide = false) {
    return make("div", wide ? { class: "wide" } : {}, make("dt", {}, name), make("dd", {}, value));
  }

  function showDetail() {
    const node = selected, item = itemAt[node], container = isContainer(node);
    const facts = make("dl", { class: "facts" });
    const parts = [make("p", { class: "full" }, make("bdi", {}, node ? visible(nameOf(node)) : "All keys")), facts];
    if (item >= 0 && form(item)[0] >= 0) {
      const shape = data.shapes[form(item)[1]];
      const dtype = make("span", {}, dot(colorOf[kindOf(item)]), kindName(kindOf(item)));
      facts.append(fact("dtype", dtype), fact("shape", shapeText(item)), fact("elements", number.format(shape.reduce((a, b) => a * b, 1))));
    } else if (item >= 0) {
      facts.append(fact("kind", "object"));
      if (notes.has(item)) facts.append(fact("value", shapeText(item), true));
    }
    if (container) facts.append(fact("keys", number.format(leaves[node])));
    facts.append(fact("size", size(bytes[node])));
    if (bytes[node] >= 1024) facts.append(fact("bytes", number.format(bytes[node])));
    if (node) facts.append(fact("share of all", percent(bytes[node], bytes[0])));
    if (item >= 0) {
      const where = piecesOf(item);
      if (where.length === 1) {
        const [file, offset, length] = where[0];
        facts.append(fact("offset in the file", number.format(offset)), fact("stored bytes", number.format(length)), fact("file", visible(data.files[file][0])));
      } else if (!where.length) {
        facts.append(fact("stored in", form(item)[0] < 0 ? "the index" : "no file: it has no elements", true));
      }
      const known = stats.get(item);
      if (known) {
        const [figures, low, high, counts] = known;
        if (!figures) facts.append(fact("values", "not computable"));
        else ["minimum", "maximum", "mean", "nan"].forEach((name, i) => { if (figures[i]) facts.append(fact(name, figures[i])); });
        if (counts.length) parts.push(histogram(low, high, counts, colorOf[kindOf(item)]));
      }
      if (where.length > 1) parts.push(pieceTable(where));
    }
    $("detail").replaceChildren(...parts);
  }

  function pieceTable(where) {
    const body = make("tbody");
    for (const [file, offset, length, first, sizes] of where.slice(0, PIECES_SHOWN)) {
      const stop = first.map((n, i) => n + sizes[i]);
      body.append(make("tr", {}, make("td", { class: "mono" }, `[${first.map((n, i) => `${n}:${stop[i]}`).join(", ")}]`),
        make("td", {}, visible(data.files[file][0])), make("td", { class: "n" }, number.format(offset)), make("td", { class: "n" }, number.format(length))));
    }
    if (where.length > PIECES_SHOWN) body.append(make("tr", {}, make("td", { colspan: 4 }, `and ${count(where.length - PIECES_SHOWN, "more piece")}`)));
    const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, count(where.length, "piece")), make("th", { scope: "col" }, "file"), make("th", { class: "n", scope: "col" }, "offset"), make("th", { class: "n", scope: "col" }, "bytes")));
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Pieces" }, make("table", {}, head, body));
  }

  const SVG = "http://www.w3.org/2000/svg";
  function svg(tag, attributes) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  }

  function histogram(low, high, counts, color) {
    const width = 600, height = 120, most = Math.max(...counts, 1), step = width / counts.length;
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Histogram of the values from ${low} to ${high}` });
    const edge = (i) => Number((low + ((high - low) * i) / counts.length).toPrecision(4));
    counts.forEach((value, i) => {
      const group = svg("g", {}), tall = value ? Math.max(1.5, (value / most) * (height - 2)) : 0;
      group.append(svg("rect", { class: "hit", x: i * step, y: 0, width: step, height }));
      group.append(svg("rect", { class: "bar", x: i * step + 1, y: height - tall, width: step - 2, height: tall }));
      const title = svg("title", {});
      title.textContent = `${edge(i)} to ${edge(i + 1)}: ${number.format(value)}`;
      group.append(title);
      chart.append(group);
    });
    chart.append(svg("line", { x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5, "vector-effect": "non-scaling-stroke" }));
    const axis = make("div", { class: "axis" }, make("span", {}, String(edge(0))), make("span", {}, `highest bar: ${number.format(most)}`), make("span", {}, String(edge(counts.length))));
    return colored(make("div", { class: "histogram" }, chart, axis), color);
  }

  // --- treemap ----------------------------------------------------------------------------------------

  const map = $("map");

  // Cut a rectangle into rows of cells with areas like the weights and sides as equal as possible
  // (Bruls, Huizing, van Wijk: Squarified Treemaps, 2000). The weights are in descending order.
  function squarify(weights, x, y, width, height) {
    const cells = [];
    let total = weights.reduce((a, b) => a + b, 0), at = 0;
    while (at < weights.length && width > 0 && height > 0) {
      const side = Math.min(width, height), scale = (width * height) / total;
      let sum = 0, stop = at, worst = Infinity;
      while (stop < weights.length) {
        const next = sum + weights[stop], area = next * scale, thick = area / side;
        const ratio = Math.max((thick * thick) / (weights[stop] * scale), (weights[at] * scale) / (thick * thick));
        if (ratio > worst) break;
        worst = ratio; sum = next; stop++;
      }
      const thick = (sum * scale) / side;
      let along = 0;
      for (; at < stop; at++) {
        const long = (weights[at] / sum) * side;
        cells.push(width <= height ? [x + along, y, long, thick] : [x, y + along, thick, long]);
        along += long;
      }
      if (width <= height) { y += thick; height -= thick; } else { x += thick; width -= thick; }
      total -= sum;
    }
    return cells;
  }

  function mapRoot() {
    let at = selected;
    while (at > 0 && !isContainer(at)) at = parent[at];
    return at;
  }

  function showMap() {
    const root = mapRoot(), width = map.clientWidth, height = map.clientHeight, drawn = `${root} ${width} ${height}`;
    if (map.dataset.drawn === drawn) {
      for (const element of map.children) element.classList.toggle("on", Number(element.dataset.node) === selected);
      return;
    }
    map.dataset.drawn = drawn;
    const path = [];
    for (let at = root; at > 0; at = parent[at]) path.push(at);
    path.push(0);
    $("crumbs").replaceChildren(...path.reverse().map((node) => {
      const button = make("button", { onclick: () => selectFree(node) }, node ? visible(label[node]) : "all");
      if (node === root) button.setAttribute("aria-current", "true");
      return button;
    }));
    const cells = [], waiting = [[root, 0, 0, width, height, null]];
    while (waiting.length && cells.length < CELLS) {
      const [node, x, y, w, h, header] = waiting.shift();
      if (header) header.classList.add("group"); // without its parts it has the color of most of them
      const own = itemAt[node] >= 0 && isContainer(node) ? [[-node - 1, bytesOf(itemAt[node])]] : [];
      let parts = [...kids[node].map((kid) => [kid, bytes[kid]]), ...own].filter((part) => part[1] > 0).sort((a, b) => b[1] - a[1]);
      const least = (CELL_AREA * bytes[node]) / (w * h), large = parts.filter((part) => part[1] >= least), small = parts.length - large.length;
      if (small > 1) {
        const rest = [null, parts.slice(large.length).reduce((sum, part) => sum + part[1], 0)];
        parts = [...large, rest].sort((a, b) => b[1] - a[1]);
      }
      const boxes = squarify(parts.map((part) => part[1]), x, y, w, h);
      for (let i = 0; i < boxes.length; i++) {
        const [left, top, wide, tall] = boxes[i];
        if (wide < 2 || tall < 2) continue;
        let kid = parts[i][0];
        if (kid === null) {
          cells.push(cell(node, `${number.format(small)} ${large.length ? "smaller" : "parts"}`, left, top, wide, tall));
          continue;
        }
        let text = kid < 0 ? label[node] : label[kid];
        while (kid >= 0 && kids[kid].length === 1 && itemAt[kid] < 0) { // one name for a chain
          kid = kids[kid][0];
          text += `.${label[kid]}`;
        }
        const group = kid >= 0 && isContainer(kid), headed = wide > 40 && tall > 40, split = group && wide > 7 && tall > 7;
        const element = cell(kid, split && !headed ? "" : text, left, top, wide, tall);
        cells.push(element);
        if (split) waiting.push(headed ? [kid, left + 3, top + 18, wide - 7.5, tall - 22.5, element] : [kid, left, top, wide, tall, null]);
      }
    }
    map.replaceChildren(...cells);
    if (!cells.length) map.append(make("p", { class: "nothing" }, "No bytes here."));
    const top = [...kids[root]].sort((a, b) => bytes[b] - bytes[a]).slice(0, 5);
    map.setAttribute("aria-label", `Treemap of ${root ? visible(nameOf(root)) : "all keys"}: ${top.map((kid) => `${visible(label[kid])} ${percent(bytes[kid], bytes[root])}`).join(", ") || "nothing"}`);
  }

  function cell(kid, text, left, top, wide, tall) {
    const node = kid < 0 ? -kid - 1 : kid;
    const element = colored(make("div", { class: `cell${node === selected ? " on" : ""}`, "data-node": node }), hue[node]);
    if (text && wide > 14 + 7 * Math.min(text.length, 4) && tall > 15) element.textContent = visible(text);
    else element.style.padding = "0";
    Object.assign(element.style, { left: `${left}px`, top: `${top}px`, width: `${Math.max(1, wide - 1.5)}px`, height: `${Math.max(1, tall - 1.5)}px` });
    return element;
  }

  map.addEventListener("click", (event) => {
    const element = event.target.closest(".cell");
    if (element) selectFree(Number(element.dataset.node));
  });
  new ResizeObserver(() => { showMap(); drawStrips(); draw(); }).observe(map);
  new ResizeObserver(draw).observe(tree);

  // --- dtypes -----------------------------------------------------------------------------------------

  function showDtypes() {
    $("stack").replaceChildren(...ranked.filter((total) => total.bytes).map((total) => {
      const part = colored(make("i"), colorOf[total.kind]);
      part.style.flex = `${total.bytes} 1 0`;
      return part;
    }));
    const head = make("tr", {}, ...["dtype", "keys", "elements", "size", "share"].map((name, i) => make("th", { scope: "col", class: `${i ? "n" : ""}${i === 2 ? " optional" : ""}` }, name)));
    const body = ranked.map((total) => make("tr", {},
      make("td", {}, dot(colorOf[total.kind]), make("button", {
        class: "link mono", "data-dtype": total.kind, "aria-pressed": "false", title: "Show only these keys",
        onclick: () => { filter.dtype = filter.dtype === total.kind ? -1 : total.kind; applyFilter(); },
      }, kindName(total.kind))),
      make("td", { class: "n" }, number.format(total.items)),
      make("td", { class: "n optional" }, total.kind === OBJECT ? "" : number.format(total.elements)),
      make("td", { class: "n" }, size(total.bytes)),
      make("td", { class: "n" }, percent(total.bytes, bytes[0]))));
    $("dtypes").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  }

  // --- files ------------------------------------------------------------------------------------------

  const inFile = data.files.map(() => []); // [offset, length, item], in the order of the offsets
  for (let i = 0; i < items; i++) for (const [file, offset, length] of piecesOf(i)) inFile[file].push([offset, length, i]);
  for (const list of inFile) list.sort((a, b) => a[0] - b[0]);
  const strips = [];

  function showFiles(most) {
    const list = $("files");
    const longest = data.files.reduce((most, file) => Math.max(most, file[1]), 1);
    for (let file = strips.length; file < Math.min(most, data.files.length); file++) {
      const [name, length] = data.files[file], canvas = make("canvas", { role: "img", "aria-label": `Map of ${visible(name)}: ${count(inFile[file].length, "item")} in ${size(length)}` });
      canvas.style.width = `max(40px, ${(100 * length) / longest}%)`;
      const hit = (event) => {
        const box = canvas.getBoundingClientRect();
        return itemNear(file, ((event.clientX - box.left) / box.width) * length, length / box.width);
      };
      canvas.addEventListener("mousemove", (event) => {
        const found = hit(event);
        if (found) tip(event, keys[found[2]], `${kindName(kindOf(found[2]))} ${shapeText(found[2])}, ${number.format(found[1])} bytes at ${number.format(found[0])}`);
        else tip(event, "", "nothing is stored here");
      });
      canvas.addEventListener("mouseleave", () => { $("tip").hidden = true; });
      canvas.addEventListener("click", (event) => {
        const found = hit(event);
        if (found) selectFree(nodeOf[found[2]]);
      });
      strips.push(canvas);
      const link = make("button", {
        class: "link mono", "data-file": file, "aria-pressed": filter.file === file, title: "Show only the keys in this file",
        onclick: () => { filter.file = filter.file === file ? -1 : file; applyFilter(); },
      }, visible(name));
      list.append(make("div", { class: "file" }, make("div", { class: "line" }, link, make("span", { class: "quiet" }, `${count(inFile[file].length, "item")}, ${size(length)}`)), canvas));
    }
    document.getElementById("more")?.remove();
    if (strips.length < data.files.length) {
      const next = Math.min(FILES_SHOWN, data.files.length - strips.length);
      list.append(make("button", { id: "more", class: "more", onclick: () => showFiles(strips.length + next) }, `Show ${next} more of ${count(data.files.length, "file")}`));
    }
    drawStrips();
  }

  function itemNear(file, offset, slack) {
    const list = inFile[file];
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle][0] <= offset) low = middle + 1; else high = middle;
    }
    const before = list[low - 1], after = list[low];
    if (before && offset < before[0] + Math.max(before[1], slack)) return before;
    return after && after[0] - offset < slack ? after : null;
  }

  function drawStrips() {
    const style = getComputedStyle(document.documentElement);
    const paints = Array.from({ length: COLORS + 1 }, (_, color) => style.getPropertyValue(`--c${color}`));
    strips.forEach((canvas, file) => {
      const scale = window.devicePixelRatio || 1, width = Math.round(canvas.clientWidth * scale), height = Math.round(22 * scale);
      if (!width) return;
      canvas.width = width;
      canvas.height = height;
      const context = canvas.getContext("2d"), length = data.files[file][1] || 1;
      let until = -1;
      for (const [offset, stored, item] of inFile[file]) {
        const from = (offset / length) * width, to = ((offset + stored) / length) * width;
        if (to < until && to - from < 1) continue; // this pixel has its colour already
        context.fillStyle = paints[hue[nodeOf[item]]];
        const gap = to - from > 4 * scale ? scale : 0; // between neighbours that are wide enough for it
        context.fillRect(from, 0, Math.max(1, to - from - gap), height);
        until = Math.max(to, from + 1);
      }
    });
  }

  function tip(event, key, text) {
    const element = $("tip");
    element.replaceChildren(...(key ? [make("b", {}, visible(key))] : []), text);
    element.hidden = false;
    const box = element.getBoundingClientRect();
    element.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 4))}px`;
    element.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
  }
  map.addEventListener("mousemove", (event) => {
    const element = event.target.closest(".cell");
    if (!element) { $("tip").hidden = true; return; }
    const node = Number(element.dataset.node), item = itemAt[node];
    const what = item >= 0 && !isContainer(node) ? `${kindName(kindOf(item))} ${shapeText(item)}` : count(leaves[node], "key");
    tip(event, nameOf(node), `${what}, ${size(bytes[node])}, ${percent(bytes[node], bytes[0])} of all`);
  });
  map.addEventListener("mouseleave", () => { $("tip").hidden = true; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawStrips);

  // --- the beginning ----------------------------------------------------------------------------------

  document.title = `${visible(data.path.split("/").filter(Boolean).pop() || data.path)} · aiockpt`;
  $("title").append(make("bdi", {}, visible(data.path)));
  const objects = kinds[OBJECT].items;
  for (const [value, noun] of [[items - objects, "tensor"], [objects, "object"], [data.files.length, "file"]]) {
    $("totals").append(make("li", {}, make("b", {}, number.format(value)), ` ${noun}${value === 1 ? "" : "s"}`));
  }
  $("totals").append(make("li", {}, make("b", {}, size(bytes[0] - kinds[OBJECT].bytes)), " of tensors"), make("li", {}, "format ", make("b", {}, data.format)));
  if (data.metadata) {
    $("metadata").hidden = false;
    $("metadata").querySelector("pre").textContent = data.metadata;
  }
  $("files-note").textContent = data.files.length ? "where each item lies; the bars are as long as the files" : "nothing is stored in files";
  if (nodes <= 200) expanded.fill(1); // small trees are open
  else for (const at of [...kids[top], ...Array.from(kids, (_, node) => node).slice(0, top + 1)]) expanded[at] = 1;
  showDtypes();
  showFiles(FILES_SHOWN);
  applyFilter();
  showDetail();
  showMap();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
