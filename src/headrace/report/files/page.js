"use strict";
(function () {
  const SVG = "http://www.w3.org/2000/svg";
  const data = JSON.parse(document.getElementById("data").textContent);

  function make(tag, attributes, text) {
    const node = document.createElement(tag);
    for (const name in attributes || {}) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function draw(tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function number(value, digits) {
    if (value === null) return "not finite";
    const size = Math.abs(value);
    if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(digits)).toExponential();
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
  }
  function chart(panel) {
    const box = make("div", { class: "chart" });
    box.append(make("h3", {}, panel.title + (panel.unit ? ", " + panel.unit : "")));
    const holder = make("div");
    box.append(holder);
    if (panel.lines.length > 1) {
      const key = make("div", { class: "key" });
      for (const line of panel.lines) {
        const entry = make("span"), mark = make("i", { class: line.style });
        mark.style.setProperty("--own", "var(--c" + line.color + ")");
        mark.style.background = "var(--c" + line.color + ")";
        entry.append(mark, line.label);
        key.append(entry);
      }
      box.append(key);
    }
    box.redraw = function () { plot(panel, box, holder); };
    return box;
  }

  function plot(panel, box, holder) {
    const width = Math.max(box.clientWidth, 260), height = 230, left = 58, right = width - 10, top = 10, bottom = height - 38;
    const low = panel.ticks[0], high = panel.ticks[panel.ticks.length - 1], last = panel.last;
    const across = function (value) { return left + value / last * (right - left); };
    const up = function (value) {
      const share = panel.is_log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      return bottom - share * (bottom - top);
    };
    const label = panel.title + " over epochs";
    const svg = draw("svg", { viewBox: "0 0 " + width + " " + height, height: height, role: "img", "aria-label": label });
    for (const tick of panel.ticks) {
      svg.append(draw("line", { class: "grid", x1: left, x2: right, y1: up(tick), y2: up(tick) }));
      svg.append(draw("text", { x: left - 7, y: up(tick) + 4, "text-anchor": "end" }, number(tick, 6)));
    }
    for (const tick of panel.epochs) {
      svg.append(draw("line", { class: "grid", x1: across(tick), x2: across(tick), y1: bottom, y2: bottom + 4 }));
      svg.append(draw("text", { x: across(tick), y: bottom + 17, "text-anchor": "middle" }, number(tick, 6)));
    }
    svg.append(draw("text", { x: (left + right) / 2, y: height - 3, "text-anchor": "middle" }, "epoch"));
    for (const line of panel.lines) {
      let path = "", pen = "M", alone = 0;
      const color = "var(--c" + line.color + ")", places = [];
      for (let k = 0; k < line.x.length; k++) {
        const value = line.y[k] === null ? null : line.y[k] * panel.scale;
        if (value === null || (panel.is_log && value <= 0)) { pen = "M"; continue; }
        const place = across(line.x[k]).toFixed(1) + " " + up(value).toFixed(1);
        if (pen === "M" && (line.y[k + 1] === null || k === line.x.length - 1)) alone++;
        path += pen + place; pen = "L"; places.push(place.split(" "));
      }
      const dash = line.style === "dashed" ? "5 4" : "none";
      svg.append(draw("path", { d: path, fill: "none", style: "stroke:" + color, "stroke-width": line.style === "thin" ? 1.5 : 2, "stroke-linejoin": "round", "stroke-dasharray": dash }));
      if (line.dots || alone) for (const place of places) svg.append(draw("circle", { cx: place[0], cy: place[1], r: 2.6, style: "fill:" + color }));
    }
    const cross = draw("line", { class: "cross", y1: top, y2: bottom, visibility: "hidden" });
    svg.append(cross);
    holder.replaceChildren(svg);
    svg.addEventListener("pointermove", function (event) { hover(panel, box, cross, { event: event, left: left, right: right, width: width, last: last, across: across }); });
    svg.addEventListener("pointerleave", function () { leave(box, cross); });
  }

  function nearest(values, wanted) {
    let low = 0, high = values.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (values[middle] < wanted) low = middle; else high = middle; }
    return Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? low : high;
  }
  function leave(box, cross) {
    cross.setAttribute("visibility", "hidden");
    const old = box.querySelector(".tip");
    if (old) old.remove();
  }
  function hover(panel, box, cross, at) {
    leave(box, cross);
    const area = box.querySelector("svg").getBoundingClientRect(), scale = at.width / area.width;
    const wanted = ((at.event.clientX - area.left) * scale - at.left) / (at.right - at.left) * at.last;
    let epoch = null;
    for (const line of panel.lines) {
      const found = line.x[nearest(line.x, wanted)];
      if (found !== undefined && (epoch === null || Math.abs(found - wanted) < Math.abs(epoch - wanted))) epoch = found;
    }
    if (epoch === null) return;
    const tip = make("div", { class: "tip" });
    tip.append(make("div", {}, "epoch " + number(epoch, 6)));
    for (const line of panel.lines) {
      const k = nearest(line.x, epoch);
      if (line.x[k] === undefined) continue;
      const row = make("div"), name = make("span"), mark = make("i");
      mark.style.background = "var(--c" + line.color + ")";
      name.append(mark, line.label + (line.x[k] === epoch ? "" : " (epoch " + number(line.x[k], 5) + ")"));
      row.append(name, make("b", {}, number(line.y[k] === null ? null : line.y[k] * panel.scale, 5) + (panel.unit && line.y[k] !== null ? " " + panel.unit : "")));
      tip.append(row);
    }
    const x = at.across(epoch) / scale;
    cross.setAttribute("x1", at.across(epoch)); cross.setAttribute("x2", at.across(epoch)); cross.setAttribute("visibility", "visible");
    box.append(tip);
    const space = box.clientWidth - tip.offsetWidth;
    tip.style.left = Math.max(0, Math.min(space, x + 14 + tip.offsetWidth > box.clientWidth ? x - tip.offsetWidth - 14 : x + 14)) + "px";
    tip.style.top = "34px";
  }

  let boxes = [];
  function drawPanels(panels) {
    const place = document.getElementById("charts");
    if (!place) return;
    boxes = panels.map(chart);
    place.replaceChildren.apply(place, boxes);
    if (!panels.length) place.append(make("p", { class: "faint" }, "Nothing has been recorded yet."));
    for (const box of boxes) box.redraw();
  }
  let waiting = 0;
  addEventListener("resize", function () {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(function () { for (const box of boxes) box.redraw(); });
  });

  function key(cell) {
    const given = cell.dataset.sort, text = cell.textContent.trim();
    const value = parseFloat((given === undefined ? text : given).replace(/,/g, ""));
    return Number.isNaN(value) ? text.toLowerCase() : value;
  }
  function compare(a, b) {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a < b ? -1 : a > b ? 1 : 0;
  }
  function sortBy(head, up) {
    const table = head.closest("table"), column = head.cellIndex;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    for (const body of table.tBodies) {  // of each group alone, below its heading
      const rows = Array.from(body.rows).filter(function (row) { return !row.classList.contains("group"); }).map(function (row) { return [key(row.cells[column]), row]; });
      rows.sort(function (a, b) { return up ? compare(a[0], b[0]) : compare(b[0], a[0]); });
      body.append.apply(body, rows.map(function (pair) { return pair[1]; }));
    }
  }
  addEventListener("click", function (event) {
    const head = event.target.closest ? event.target.closest(".sortable thead th") : null;
    if (head) sortBy(head, head.getAttribute("aria-sort") !== "ascending");
  });

  function ask(address, then) {
    fetch(address, { cache: "no-store" }).then(function (answer) {
      if (!answer.ok) throw new Error(answer.status === 404 ? "the run is gone" : "the server answered " + answer.status);
      return answer.json();
    }).then(function (found) { say(""); then(found); }).catch(function (error) { say("No update: " + error.message + "."); });
  }
  function say(text) {
    const place = document.getElementById("connection");
    if (place && place.textContent !== text) place.textContent = text;
  }
  let version = data.version;
  function update() {
    if (document.hidden) return;
    ask(data.live + "&version=" + encodeURIComponent(version), function (found) {
      if (found.version === version) return;
      version = found.version;
      drawPanels(found.panels);
      for (const name in found.parts) {
        const old = document.getElementById(name);
        if (old) old.outerHTML = found.parts[name];
      }
    });
  }

  let asked = 0;
  function explain(file, name) {
    const told = document.getElementById("told"), number = ++asked;
    told.textContent = "Looking at " + (file.name || "the image") + " ...";
    const address = data.demo + (name === undefined ? "" : (data.demo.includes("?") ? "&" : "?") + "class=" + encodeURIComponent(name));
    fetch(address, { method: "POST", body: file, cache: "no-store" }).then(function (answer) {
      const kind = answer.headers.get("Content-Type") || "";
      if (!kind.includes("json")) throw new Error(answer.status === 413 ? "it is too large" : "the server answered " + answer.status);
      return answer.json();
    }).then(function (found) {
      if (number !== asked) return;
      say("");
      told.textContent = found.problem || file.name || "";
      document.getElementById("answer").hidden = Boolean(found.problem);
      if (!found.problem) show(found, file);
    }).catch(function (error) { if (number === asked) { told.textContent = ""; say("No answer: " + error.message + "."); } });
  }
  function show(found, file) {
    document.getElementById("scores").replaceChildren.apply(document.getElementById("scores"), found.best.map(function (row) {
      const line = make("button", { class: "score", "aria-pressed": String(row.name === found.name), title: "show where it saw " + row.name });
      const bar = make("i");
      bar.style.width = row.share === null ? "0" : (100 * row.share).toFixed(2) + "%";
      line.append(make("span", {}, row.name), make("b", {}, row.text), bar);
      line.addEventListener("click", function () { explain(file, row.name); });
      return line;
    }));
    document.getElementById("maps").replaceChildren.apply(document.getElementById("maps"), found.maps.map(function (map) {
      const figure = make("figure");
      figure.append(make("img", { src: map.image, alt: map.title }), make("figcaption", {}, map.title));
      return figure;
    }));
  }
  function takeImages() {
    const drop = document.getElementById("drop"), input = document.getElementById("file");
    input.addEventListener("change", function () { if (input.files.length) explain(input.files[0]); });
    addEventListener("dragover", function (event) { event.preventDefault(); drop.classList.add("over"); });
    addEventListener("dragleave", function () { drop.classList.remove("over"); });
    addEventListener("drop", function (event) {
      event.preventDefault(); drop.classList.remove("over");
      if (event.dataTransfer.files.length) explain(event.dataTransfer.files[0]);
    });
    addEventListener("paste", function (event) {
      const files = event.clipboardData ? event.clipboardData.files : [];
      if (files.length) explain(files[0]);
    });
  }

  const chosen = new Set();
  let known = [];
  function nameColumns(columns) {
    const heads = document.getElementById("runs").tHead.rows[0];
    const old = Array.from(heads.querySelectorAll("th.option"));
    if (old.map(function (head) { return head.textContent; }).join() === columns.join()) return;
    for (const head of old) head.remove();
    for (const name of columns) heads.insertBefore(make("th", { class: "option" }, name), heads.lastElementChild);
  }
  function offerGroups() {
    const select = document.getElementById("group"), heads = Array.from(document.getElementById("runs").tHead.rows[0].cells);
    const names = ["nothing", "tag", "model", "dataset", "state"].concat(heads.filter(function (head) { return head.className === "option"; }).map(function (head) { return head.textContent; }));
    if (Array.from(select.options).map(function (each) { return each.text; }).join() === names.join()) return;
    const before = select.value;
    select.replaceChildren.apply(select, names.map(function (name) { return make("option", {}, name); }));
    if (names.includes(before)) select.value = before;
  }
  function groupsOf(run, by) {
    if (by === "tag") return run.tags.length ? run.tags : ["no tag"];
    const heads = Array.from(document.getElementById("runs").tHead.rows[0].cells);
    const column = heads.findIndex(function (head) { return head.textContent === by; });
    return [by + " " + run.cells[column - 2].text];
  }
  function rowOf(run) {
    const row = make("tr"), tick = make("input", { type: "checkbox", "aria-label": "select " + run.name });
    tick.checked = chosen.has(run.id);
    tick.addEventListener("change", function () { if (tick.checked) chosen.add(run.id); else chosen.delete(run.id); offer(); });
    const first = make("td"), name = make("td"), link = make("a", { href: "run?id=" + encodeURIComponent(run.id) + data.token }, run.name);
    first.append(tick); name.append(link);
    if (data.edits) {
      const edit = make("button", { class: "edit", title: "name, tags and note", "aria-label": "edit " + run.name }, "\u270e");
      edit.addEventListener("click", function () { openEditor(run); });
      name.append(edit);
    }
    for (const tag of run.tags) name.append(make("span", { class: "tag" }, tag));
    if (run.note) name.append(make("div", { class: "said" }, run.note));
    row.append(first, name);
    for (const cell of run.cells) {
      const place = make("td", cell.sort === undefined ? {} : { class: "number", "data-sort": String(cell.sort) }, cell.sort === undefined && cell.state ? undefined : cell.text);
      if (cell.state) place.append(make("span", { class: "state " + cell.state.replace(/ /g, "-") }, cell.text));
      row.append(place);
    }
    row.dataset.text = row.textContent.toLowerCase();
    return row;
  }
  function groupHead(title, runs, width) {
    const best = runs.map(function (run) { return run.cells[0]; }).filter(function (cell) { return typeof cell.sort === "number"; }).sort(function (a, b) { return b.sort - a.sort; })[0];
    const row = make("tr", { class: "group" }), cell = make("th", { colspan: width, scope: "rowgroup" });
    cell.append(title, make("span", { class: "faint" }, "  " + (runs.length === 1 ? "1 run" : runs.length + " runs") + (best ? ", best top-1 " + best.text : "")));
    row.append(cell);
    return row;
  }
  function listRuns(runs) {
    const table = document.getElementById("runs");
    if (!table) return;
    known = runs;
    offerGroups();
    const head = table.querySelector("th[aria-sort]"), by = document.getElementById("group").value, groups = new Map();
    for (const run of runs) for (const title of by === "nothing" ? [""] : groupsOf(run, by)) groups.set(title, (groups.get(title) || []).concat([run]));
    for (const body of Array.from(table.tBodies)) body.remove();
    for (const pair of Array.from(groups).sort(function (a, b) { return compare(a[0], b[0]); })) {
      const body = make("tbody");
      if (pair[0]) body.append(groupHead(pair[0], pair[1], table.tHead.rows[0].cells.length));
      body.append.apply(body, pair[1].map(rowOf));
      table.append(body);
    }
    if (head) sortBy(head, head.getAttribute("aria-sort") === "ascending");
    search();
    for (const id of Array.from(chosen)) if (!runs.some(function (run) { return run.id === id; })) chosen.delete(id);
    document.getElementById("count").textContent = runs.length === 1 ? "1 run" : runs.length + " runs";
    offer();
  }
  function search() {
    const filter = document.getElementById("filter").value.toLowerCase();
    for (const body of document.getElementById("runs").tBodies) {
      let some = false;
      for (const row of body.rows) if (!row.classList.contains("group")) { row.hidden = !row.dataset.text.includes(filter); some = some || !row.hidden; }
      if (body.rows.length && body.rows[0].classList.contains("group")) body.rows[0].hidden = !some;
    }
  }
  function offer() {
    const button = document.getElementById("compare"), removal = document.getElementById("delete");
    button.disabled = chosen.size < 2;
    button.textContent = chosen.size < 2 ? "Compare" : "Compare " + chosen.size + " runs";
    if (removal) { removal.disabled = !chosen.size; removal.textContent = chosen.size < 2 ? "Delete" : "Delete " + chosen.size + " runs"; }
  }
  function change(what, sent, then) {
    fetch("api/" + what + "?" + data.token.slice(1), { method: "POST", body: JSON.stringify(sent), cache: "no-store" }).then(function (answer) {
      return (answer.headers.get("Content-Type") || "").includes("json") ? answer.json() : { problem: "The server answered " + answer.status + "." };
    }).catch(function (error) { return { problem: error.message + "." }; }).then(function (found) { then(found.problem || ""); });
  }
  function again() {
    ask("api/runs?" + data.token.slice(1), function (found) { nameColumns(found.columns); listRuns(found.runs); });
  }
  let edited = null;
  function openEditor(run) {
    edited = run;
    document.getElementById("edited").textContent = run.name;
    document.getElementById("name").value = run.id.split("/").pop();
    document.getElementById("tags").value = run.tags.join(", ");
    document.getElementById("note").value = run.note;
    document.getElementById("refused").hidden = true;
    document.getElementById("editor").showModal();
  }
  function refuse(problem) {
    const place = document.getElementById("refused");
    place.textContent = problem; place.hidden = !problem;
    if (!problem) { document.getElementById("editor").close(); again(); }
  }
  function editRuns() {
    document.getElementById("save").addEventListener("click", function (event) {
      event.preventDefault();
      const name = document.getElementById("name").value.trim(), tags = document.getElementById("tags").value.split(",");
      change("label", { ids: [edited.id], note: document.getElementById("note").value, tags: tags }, function (problem) {
        if (problem || name === edited.id.split("/").pop()) refuse(problem);
        else change("rename", { ids: [edited.id], name: name }, refuse);
      });
    });
    document.getElementById("delete").addEventListener("click", function () {
      const names = Array.from(chosen);
      if (!confirm("Delete " + (names.length === 1 ? names[0] : names.length + " runs") + " with all checkpoints? This cannot be undone.")) return;
      change("delete", { ids: names }, function (problem) { again(); if (problem) say(problem); });
    });
  }
  if (data.demo) {
    takeImages();
  } else if (data.runs) {
    document.getElementById("filter").addEventListener("input", search);
    document.getElementById("group").addEventListener("change", function () { listRuns(known); });
    document.getElementById("compare").addEventListener("click", function () {
      location.href = "compare?" + Array.from(chosen).map(function (id) { return "id=" + encodeURIComponent(id); }).join("&") + data.token;
    });
    if (data.edits) editRuns();
    nameColumns(data.columns);
    listRuns(data.runs);
    setInterval(function () { if (!document.hidden) again(); }, 2000);
  } else {
    drawPanels(data.panels || []);
    if (data.live) setInterval(update, 2000);
  }
})();
