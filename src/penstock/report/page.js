"use strict";
// Adds zoom and tooltips to the pictures, which stand there without it.  Reads the JSON that
// lanes.py and charts.py left in the page, and draws by the rules of lanes.py.

(() => {
  const byId = (id) => document.getElementById(id);
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  const tip = byId("tip");

  // --- words -------------------------------------------------------------------------------

  const threeDigits = (value) => (Math.abs(value) < 999.5 ? value.toPrecision(3) : value.toFixed(0));

  function secondsText(seconds) {
    const size = Math.abs(seconds);
    if (seconds === 0) return "0 s";
    if (size >= 1e15) return seconds.toPrecision(3) + " s";
    if (size >= 120) return threeDigits(seconds / 60) + " min";
    for (const [unit, name] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]])
      if (size >= unit) return threeDigits(seconds / unit) + " " + name;
    return threeDigits(seconds * 1e9) + " ns";
  }

  function bytesText(bytes) {
    for (const [power, name] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]])
      if (Math.abs(bytes) >= 2 ** power) return threeDigits(bytes / 2 ** power) + " " + name;
    return bytes.toFixed(0) + " B";
  }

  const numberText = (value) =>
    Number.isInteger(value) && Math.abs(value) < 1e15
      ? value.toLocaleString("en-US") : String(Number(value.toPrecision(5)));

  const percentText = (fraction) => (fraction < 0 ? "\u2212" : "+") + Math.abs(100 * fraction).toFixed(1) + " %";
  const formats = { seconds: secondsText, bytes: bytesText, number: numberText };

  // --- the tooltip -------------------------------------------------------------------------

  function showTip(text, x, y) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth ? x - 14 - box.width : x + 14;
    const top = y + 14 + box.height > innerHeight ? y - 14 - box.height : y + 14;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, top)}px)`;
  }

  const hideTip = () => { tip.hidden = true; };

  function element(name, attributes, parent) {
    const made = document.createElementNS(parent.namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parent.append(made);
    return made;
  }

  // A point of the screen in the coordinates of an svg's viewBox.
  function pointIn(svg, event) {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return [(event.clientX - box.left) * view.width / box.width,
            (event.clientY - box.top) * view.height / box.height];
  }

  function onScreen(svg, x, y) {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return [box.left + x * box.width / view.width, box.top + y * box.height / view.height];
  }

  // --- charts: the point nearest to the pointer ---------------------------------------------

  function makeChart(svg) {
    const about = JSON.parse(svg.dataset.points);
    const pixels = ([low, high, start, end]) => (value) =>
      high > low ? start + (value - low) / (high - low) * (end - start) : start;
    const px = pixels(about.scales[0]), py = pixels(about.scales[1]);
    const curves = about.curves.filter((curve) => curve.x.length)
      .map((curve) => ({ ...curve, px: curve.x.map(px), py: curve.y.map(py) }));
    if (!curves.length) return;
    const [top, bottom] = [about.scales[1][3], about.scales[1][2]];
    const cross = element("path", { class: "cross", d: "" }, svg);
    const dots = curves.map(() => element("circle", { class: "dot", r: 0, cx: 0, cy: 0 }, svg));
    const longest = curves.reduce((a, b) => (b.px.length > a.px.length ? b : a));
    let current = -1;

    function nearest(xs, x) {
      let low = 0, high = xs.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (xs[middle] < x) low = middle + 1; else high = middle;
      }
      return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
    }

    function show(x, where) {
      const format = formats[about.y];
      const lines = [`${about.x[0]} ${formats[about.x[1]](longest.x[nearest(longest.px, x)])}`];
      curves.forEach((curve, k) => {
        const at = nearest(curve.px, x);
        dots[k].setAttribute("r", 3.5);
        dots[k].setAttribute("cx", curve.px[at]);
        dots[k].setAttribute("cy", Math.max(0, curve.py[at]));
        lines.push(`${curve.name} ${format(curve.y[at])}`);
      });
      for (const [name, value] of about.levels) lines.push(`${name} ${format(value)}`);
      cross.setAttribute("d", `M${x.toFixed(1)} ${top}V${bottom}`);
      showTip(lines.join("\n"), ...where);
    }

    function hide() {
      cross.setAttribute("d", "");
      dots.forEach((dot) => dot.setAttribute("r", 0));
      hideTip();
    }

    svg.addEventListener("pointermove", (event) => {
      const at = nearest(longest.px, pointIn(svg, event)[0]);
      current = at;
      show(longest.px[at], [event.clientX, event.clientY]);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.tabIndex = 0;
    svg.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 };
      if (event.key === "Escape") hide();
      if (!(event.key in moves)) return;
      event.preventDefault();
      current = clamp(current + moves[event.key], 0, longest.px.length - 1);
      const x = longest.px[current];
      show(x, onScreen(svg, x, (top + bottom) / 2));
    });
  }

  // --- timelines -----------------------------------------------------------------------------

  function makeTimelines(svg) {
    const about = JSON.parse(byId("data").textContent);
    const { ticks, left, kinds } = about;
    const tick_s = about.whole_s / ticks;
    if (!(about.whole_s > 0)) return;
    const rows = [];
    about.blocks.forEach((block, clock) => block.rows.forEach((row) => rows.push(makeRow(row, clock))));
    const tracks = [...svg.querySelectorAll(".tracks path")];
    const groups = [...svg.querySelectorAll("g.spans")].map((group) => [...group.querySelectorAll("path")]);
    const ends = [...svg.querySelectorAll(".end")];
    const height = svg.viewBox.baseVal.height;
    const selection = element("rect", { id: "selection", height: 0, width: 0, y: about.title - 4 }, svg);
    const marks = [0, 1].map(() => element("rect", { class: "mark", width: 0, height: 0 }, svg));
    const counterparts = about.blocks.map(() => new Map());
    rows.forEach((row) => row.keys.forEach((key, at) => counterparts[row.clock].set(key, [row, at])));
    let from = 0, to = ticks, width = svg.viewBox.baseVal.width, waiting = false;
    let current = null; // [row, index] of the span that is pointed at

    // A row of the data with its columns apart; `reach` is the latest end so far.
    function makeRow(row, clock) {
      const count = row.spans.length / 5, made = { ...row, clock, count, keys: [] };
      for (const name of ["kind", "stage", "number", "start", "end", "reach"]) made[name] = new Float64Array(count);
      let start = 0, reach = 0;
      const seen = new Map();
      for (let at = 0; at < count; at++) {
        const [kind, stage, number, since, length] = row.spans.slice(5 * at, 5 * at + 5);
        start += since;
        reach = Math.max(reach, start + length);
        Object.entries({ kind, stage, number, start, end: start + length, reach })
          .forEach(([name, value]) => { made[name][at] = value; });
        const key = [row.rank, row.lane, kind, stage, number].join();
        const times = seen.get(key) || 0; // the same action may occur again in a window
        seen.set(key, times + 1);
        made.keys.push(`${key},${times}`);
      }
      made.spans = null;
      return made;
    }

    const right = () => width - about.right;
    const x_of = (tick) => left + (tick - from) / (to - from) * (right() - left);
    const tick_of = (x) => from + (x - left) / (right() - left) * (to - from);

    // The first index of a row from which something may reach into the time after `tick`.
    function firstAfter(row, tick) {
      let low = 0, high = row.count;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (row.reach[middle] < tick) low = middle + 1; else high = middle;
      }
      return low;
    }

    function drawRow(row, paths, names) {
      const columns = new Map(), scale = (right() - left) / (to - from);
      const box = `v${row.height}`;
      for (let at = firstAfter(row, from); at < row.count && row.start[at] <= to; at++) {
        const x0 = Math.max(left, left + (row.start[at] - from) * scale);
        const x1 = Math.min(right(), left + (row.end[at] - from) * scale);
        const wide = x1 - x0;
        if (wide < 0) continue;
        if (wide >= 2) {
          const shown = (wide - Math.min(1, wide / 8)).toFixed(1);
          paths[row.kind[at]].push(`M${x0.toFixed(1)} ${row.top}h${shown}${box}h-${shown}z`);
          if (names && wide >= about.letter + 3) name(row, at, x0, wide, names);
        } else {
          for (let column = Math.floor(x0 - left); column < x1 - left; column++) {
            const part = Math.min(x1 - left, column + 1) - Math.max(x0 - left, column);
            if (!columns.has(column)) columns.set(column, new Float64Array(kinds.length));
            columns.get(column)[row.kind[at]] += part;
          }
        }
      }
      for (const [column, shares] of columns) drawColumn(row, paths, column, shares);
    }

    function drawColumn(row, paths, column, shares) {
      const sum = shares.reduce((a, b) => a + b, 0);
      if (!(sum > 1e-6)) return;
      let y = row.top + row.height;
      shares.forEach((share, kind) => {
        if (!(share > 0)) return;
        const high = row.height * Math.max(share / Math.max(sum, 1), 1 / row.height);
        y -= high;
        paths[kind].push(`M${column + left} ${y.toFixed(1)}h1v${high.toFixed(1)}h-1z`);
      });
    }

    function name(row, at, x, wide, names) {
      const kind = kinds[row.kind[at]], number = String(row.number[at]);
      const whole = about.short ? kind + number : `${kind}${row.stage[at]}.${number}`;
      const text = [whole, number].find((one) => one.length * about.letter + 3 <= wide);
      if (text) names.push([text, kind, x + wide / 2, row.top + row.height / 2 + 4]);
    }

    function redraw() {
      waiting = false;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const paths = groups.map(() => kinds.map(() => [])), names = [];
      rows.forEach((row) => {
        drawRow(row, paths[row.clock], row.lane === "compute" && row.height > 12 ? names : null);
      });
      tracks.forEach((path, clock) => {
        const end = clamp(x_of(about.blocks[clock].end), left, right()).toFixed(1);
        const own = about.blocks[clock].rows;
        path.setAttribute("d", own.map((row) => `M${left} ${row.top}H${end}v${row.height}H${left}z`).join(""));
      });
      groups.forEach((group, clock) => group.forEach((path, kind) => path.setAttribute("d", paths[clock][kind].join(""))));
      byId("names").replaceChildren();
      if (names.length <= about.max_labels)
        for (const [text, kind, x, y] of names)
          element("text", { x: x.toFixed(1), y, class: `on ${kind}` }, byId("names")).textContent = text;
      ends.forEach((path, clock) => {
        const end = about.blocks[clock].end, last = about.blocks.at(-1).bottom + 4;
        const inside = end >= from && end <= to;
        path.setAttribute("d", inside ? `M${x_of(end).toFixed(1)} ${about.title - 4}V${last}` : "");
      });
      drawGrid();
      drawMarks();
      const whole = from === 0 && to === ticks;
      byId("shown").textContent = whole ? "" : `${secondsText(from * tick_s)} to ${secondsText(to * tick_s)}`;
      for (const button of document.querySelectorAll("[data-do]"))
        button.disabled = whole && button.dataset.do !== "in";
    }

    function drawGrid() {
      const grid = byId("grid"), bottom = about.blocks.at(-1).bottom;
      const low = from * tick_s, high = to * tick_s, least = (high - low) / Math.max(2, width / 110);
      const power = 10 ** Math.floor(Math.log10(least) + 1e-9);
      const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= least * (1 - 1e-9));
      const [unit, word] = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]].find(([size]) => high >= 2 * size) || [1e-9, "ns"];
      const decimals = clamp(-Math.floor(Math.log10(step / unit) + 1e-9), 0, 9);
      grid.replaceChildren();
      const lines = [];
      for (let k = Math.ceil(low / step - 1e-9); k <= Math.floor(high / step + 1e-9); k++) {
        const x = x_of(k * step / tick_s).toFixed(1);
        lines.push(`M${x} ${about.title - 4}V${bottom + 4}`);
        element("text", { x, y: bottom + 19, "text-anchor": "middle" }, grid).textContent =
          `${(k * step / unit).toFixed(decimals)} ${word}`;
      }
      element("path", { class: "grid", d: lines.join("") }, grid);
    }

    const later = () => { if (!waiting) { waiting = true; requestAnimationFrame(redraw); } };

    // Show the ticks [low, high], as far as they are in the picture.
    function look(low, high) {
      const least = Math.min(ticks, 1e3);
      const length = clamp(high - low, least, ticks);
      from = clamp((low + high - length) / 2, 0, ticks - length);
      to = from + length;
      later();
    }

    const zoom = (factor, at = (from + to) / 2) => look(at - (at - from) * factor, at + (to - at) * factor);
    const pan = (part) => look(from + part * (to - from), to + part * (to - from));
    const commands = { in: () => zoom(0.5), out: () => zoom(2), left: () => pan(-0.4), right: () => pan(0.4), reset: () => look(0, ticks) };

    // --- what is pointed at

    // The counterpart of a span in the other clock, or null.
    function counterpart([row, at]) {
      const other = counterparts[1 - row.clock];
      return (other && other.get(row.keys[at])) || null;
    }

    function describe(found) {
      const [row, at] = found, kind = kinds[row.kind[at]];
      const words = { F: "forward", B: "backward", I: "gradient of the input", W: "gradient of the weights", U: "update" };
      const action = kind in words ? `${kind}${row.stage[at]}.${row.number[at]}` : `${kind} ${row.stage[at] < 0 ? row.number[at] : row.stage[at]}`;
      const what = { send: "sent: result of ", receive: "received: result of ", collective: "collective: " }[row.lane] || "";
      const which = kind === "U" || kind === "reduce" ? "step" : "micro-batch";
      const place = row.stage[at] < 0 ? "" : `stage ${row.stage[at]}, `;
      const length = row.end[at] - row.start[at], clock = about.blocks[row.clock].name;
      const lines = [
        `${what}${action}${kind in words ? ` (${words[kind]})` : ""}`,
        `rank ${row.rank}, ${place}${which} ${row.number[at]}`,
        `${clock}: start ${secondsText(row.start[at] * tick_s)}, length ${secondsText(length * tick_s)}`,
      ];
      const pair = counterpart(found);
      if (pair) {
        const [twin, k] = pair, other = twin.end[k] - twin.start[k];
        const [predicted, measured] = row.clock === 0 ? [length, other] : [other, length];
        const error = measured > 0 ? `, error ${percentText(predicted / measured - 1)}` : "";
        lines.push(`${about.blocks[twin.clock].name}: start ${secondsText(twin.start[k] * tick_s)}, length ${secondsText(other * tick_s)}${error}`);
      } else if (about.blocks.length > 1) {
        lines.push(`no counterpart in the ${about.blocks[1 - row.clock].name} timeline`);
      }
      return lines.join("\n");
    }

    function drawMarks() {
      const found = current ? [current, counterpart(current)] : [null, null];
      found.forEach((one, k) => {
        if (!one) return marks[k].setAttribute("width", 0);
        const [row, at] = one;
        const x0 = clamp(x_of(row.start[at]), left - 2, right() + 2), x1 = clamp(x_of(row.end[at]), left - 2, right() + 2);
        const seen = row.end[at] >= from && row.start[at] <= to;
        const box = { x: x0 - 1, y: row.top - 1, width: seen ? Math.max(3, x1 - x0 + 1) : 0, height: row.height + 2 };
        for (const [key, value] of Object.entries(box)) marks[k].setAttribute(key, value);
      });
    }

    function point(found, where) {
      current = found;
      drawMarks();
      if (found) showTip(describe(found), ...where); else hideTip();
    }

    // The span under a point, or the nearest one of that lane within 4 pixels.
    function spanAt(x, y) {
      const row = rows.find((one) => y >= one.top - 1 && y <= one.top + one.height + 1);
      if (!row || x < left - 4 || x > right() + 4) return null;
      const tick = tick_of(x), slack = 4 * (to - from) / (right() - left);
      let best = null, distance = slack;
      for (let at = firstAfter(row, tick - slack); at < row.count && row.start[at] <= tick + slack; at++) {
        const away = Math.max(row.start[at] - tick, tick - row.end[at], 0);
        if (away < distance || best === null) [best, distance] = [at, away];
        if (away === 0) break;
      }
      return best === null ? null : [row, best];
    }

    // --- pointer and keys

    let pressed = null;
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      pressed = clamp(pointIn(svg, event)[0], left, right());
    });
    svg.addEventListener("pointermove", (event) => {
      const [x, y] = pointIn(svg, event);
      const ends = pressed === null ? null : [pressed, clamp(x, left, right())].sort((a, b) => a - b);
      if (ends && ends[1] - ends[0] > 4) {
        if (!svg.hasPointerCapture(event.pointerId)) svg.setPointerCapture(event.pointerId);
        const box = { x: ends[0], width: ends[1] - ends[0], height: about.blocks.at(-1).bottom + 8 - about.title };
        for (const [key, value] of Object.entries(box)) selection.setAttribute(key, value);
        hideTip();
      } else {
        point(spanAt(x, y), [event.clientX, event.clientY]);
      }
    });
    function release(event, take) {
      const low = Number(selection.getAttribute("x")), wide = Number(selection.getAttribute("width"));
      if (take && wide > 4) look(tick_of(low), tick_of(low + wide));
      selection.setAttribute("width", 0);
      pressed = null;
    }
    svg.addEventListener("pointerup", (event) => release(event, true));
    svg.addEventListener("pointercancel", (event) => release(event, false));
    svg.addEventListener("pointerleave", () => point(null));
    svg.addEventListener("blur", () => point(null));
    svg.addEventListener("dblclick", () => commands.reset());
    svg.addEventListener("wheel", (event) => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !sideways) return; // the page scrolls
      event.preventDefault();
      if (event.ctrlKey) zoom(2 ** (event.deltaY / 200), tick_of(clamp(pointIn(svg, event)[0], left, right())));
      else pan(event.deltaX / (right() - left));
    }, { passive: false });

    // Go to the span `by` places on in its lane, or to the nearest one `down` lanes below.
    function step(by, down) {
      const filled = rows.filter((row) => row.count);
      if (!filled.length) return;
      const [row, at] = current || [filled[0], -1];
      if (by) current = [row, clamp(at + by, 0, row.count - 1)];
      else {
        const next = filled[clamp(filled.indexOf(row) + down, 0, filled.length - 1)];
        const start = at < 0 ? 0 : row.start[at];
        let best = 0;
        for (let k = 0; k < next.count; k++)
          if (Math.abs(next.start[k] - start) < Math.abs(next.start[best] - start)) best = k;
        current = [next, best];
      }
      const [now, k] = current;
      if (now.start[k] < from || now.end[k] > to) {
        const middle = (now.start[k] + now.end[k]) / 2, length = Math.max(to - from, now.end[k] - now.start[k]);
        look(middle - length / 2, middle + length / 2);
        redraw();
      }
      const x = clamp(x_of(now.end[k]), left, right());
      point(current, onScreen(svg, x, now.top + now.height));
    }

    const keys = {
      ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
      "+": commands.in, "=": commands.in, "-": commands.out, 0: commands.reset,
      PageUp: commands.left, PageDown: commands.right, Escape: () => point(null),
    };
    svg.addEventListener("keydown", (event) => {
      if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });

    for (const button of document.querySelectorAll("[data-do]"))
      button.addEventListener("click", commands[button.dataset.do]);
    svg.querySelectorAll("title").forEach((title) => title.remove()); // the tooltip says more
    document.querySelector(".buttons").hidden = false;
    svg.classList.add("live");
    svg.tabIndex = 0;
    svg.setAttribute("aria-describedby", "keys");
    function fit() {
      const now = Math.round(svg.parentElement.clientWidth);
      if (now > left + about.right + 50 && now !== width) { width = now; later(); }
    }
    new ResizeObserver(fit).observe(svg.parentElement);
    fit();
    later();
  }

  document.querySelectorAll(".chart").forEach(makeChart);
  if (byId("lanes")) makeTimelines(byId("lanes"));
})();
