// The page: connects, shows each event, and connects again. A key, where one is wanted, lives in this tab only.
"use strict";

const SILENCE = 8000; // milliseconds without an event after which the server counts as gone
const KEPT = 300;
const $ = (id) => document.getElementById(id);
const AT = { output: 1, prompt: 2, first: 3, between: 6, running: 9, waiting: 10, held: 11, cached: 12 }; // places in a point
let points = [];
let latest = null;
let leave = () => {}; // ends the loop that is connecting: there is one at most

// -- connecting

async function connect() {
  leave();
  let left = false;
  for (let wait = 1; ; wait = Math.min(wait * 2, 8)) {
    const abort = new AbortController();
    leave = () => { left = true; abort.abort(); };
    let timer = setTimeout(() => abort.abort(), SILENCE);
    try {
      const key = sessionStorage.getItem("llmjax-key");
      if (key && !/^[\x21-\x7e]+$/.test(key)) { // no header can hold it
        askForKey(true);
        return;
      }
      const headers = key ? { authorization: `Bearer ${key}` } : {};
      const response = await fetch("dashboard/events", { headers, signal: abort.signal, cache: "no-store" });
      if (response.status === 401) {
        abort.abort();
        askForKey(key !== null);
        return;
      }
      if (!response.ok) throw new Error(`status ${response.status}`);
      $("login").hidden = true;
      $("main").hidden = false;
      for await (const event of events(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE);
        wait = 1;
        take(event);
      }
    } catch {
      // The server has gone, or says nothing: told below.
    } finally {
      clearTimeout(timer);
    }
    for (let seconds = wait; seconds > 0; seconds--) {
      if (left) return;
      tell("lost", `no connection, trying again in ${seconds} s`);
      await new Promise((done) => setTimeout(done, 1000));
    }
    if (left) return;
    tell("lost", "no connection, trying again");
  }
}

function take(event) {
  try {
    if (event.name === "history") points = scaled(event.data);
    else show(event.data);
  } catch (error) {
    console.error(error); // a mistake of this page, not of the connection
  }
}

async function* events(body) {
  const decoder = new TextDecoder(), reader = body.getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
      if (fields.data) yield { name: fields.event || "message", data: JSON.parse(fields.data) };
    }
  }
}

function askForKey(wrong) {
  sessionStorage.removeItem("llmjax-key");
  $("main").hidden = true;
  $("login").hidden = false;
  $("login-error").textContent = wrong ? "The server does not know this key." : "";
  tell("", "a key is needed");
  $("key").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("llmjax-key", $("key").value.trim());
  $("key").value = "";
  connect();
});

function tell(state, text) {
  document.body.className = state;
  if ($("state-text").textContent !== text) $("state-text").textContent = text;
}

// -- showing

const milliseconds = (value) => (value === null || value === undefined ? null : value * 1000);
const percent = (value) => (value === null || value === undefined ? null : value * 100);
const sum = (by) => Object.values(by).reduce((total, value) => total + value, 0);
const put = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };

// Times in milliseconds and shares in percent, as they are drawn.
function scaled(list) {
  return list.map((point) => point.map((value, at) => (at >= AT.first && at < AT.running ? milliseconds(value) : at >= AT.held ? percent(value) : value)));
}

function show(data) {
  latest = data;
  const { health, engine, figures } = data;
  tell(health.state === "ready" ? "good" : "", health.state + (health.reason && health.state !== "ready" ? `: ${health.reason}` : ""));
  document.title = `${data.models[0]} – llmjax`;
  put("model", data.models[0]);
  const facts = [`llmjax ${data.version}`, `up ${duration(data.uptime)}`];
  if (engine) facts.push(`context ${short(Number(engine.config.max_context))}`, `prefix cache ${engine.config.prefix_cache}`);
  put("facts", facts.join(" · "));
  showErrors(data.errors);
  if (!engine) return;
  if (data.point) points = [...points, ...scaled([data.point])].slice(-KEPT);
  put("output-rate", short(figures.output_rate));
  put("prompt-rate", short(figures.prompt_rate));
  put("first-p95", short(milliseconds(figures.first.p95)));
  put("between-p95", short(milliseconds(figures.between.p95)));
  put("running", short(sum(engine.running)));
  put("rows", `of ${engine.config.max_sequences}`);
  put("waiting", short(sum(engine.waiting)));
  put("preempted", engine.preempted ? `${engine.preempted} preempted` : "");
  put("used", short(percent(engine.held / engine.pages)));
  put("hits", short(percent(figures.hit_rate)));
  table("lanes", Object.keys(engine.running).map((lane) => [lane, short(engine.running[lane]), short(engine.waiting[lane])]));
  counts("counts", [
    ["preemptions", engine.preemptions],
    ["refused, queue full", engine.refused],
    ["compiled after ready", engine.compiles_after_ready, engine.compiles_after_ready > 0],
    ["NaN in logits", engine.corrupted, engine.corrupted > 0],
    ["pages in sequence", `${short(percent(engine.contiguity))} %`],
  ]);
  const names = { stop: "stop", length: "length", abort: "aborted", timeout: "timed out in the queue", error: "error" };
  counts("ended", Object.entries(names).map(([reason, name]) => [name, engine.finished[reason] || 0, (reason === "error" || reason === "timeout") && engine.finished[reason] > 0]));
  showSpeculation(engine.speculation, figures);
  draw();
}

function showSpeculation(speculation, figures) {
  $("speculation").hidden = !speculation;
  if (!speculation) return;
  put("speculation-state", speculation.off ? `off: ${speculation.off}` : "where it pays");
  counts("speculation-counts", [
    ["accepted of drafted tokens, last minute", `${short(percent(figures.accepted))} %`],
    ["tokens a round, last minute", figures.round_tokens],
    ["tokens drafted", speculation.drafted],
    ...speculation.switches.map(([to, reason, count]) => [`switched ${to}, ${reason}`, count]),
  ]);
  const rates = [...Object.entries(speculation.by_lane).map(([lane, share]) => [`lane ${lane}`, share]), ...Object.entries(speculation.by_class)];
  table("acceptance", rates.map(([name, share]) => [name, `${short(percent(share))} %`]), () => {}, "nothing drafted yet");
}

function draw() {
  const percentiles = (at) => [["P50", "--c0"], ["P95", "--c1"], ["P99", "--c2"]].map(([name, colour], index) => ({ name, colour, at: at + index }));
  lineChart($("chart-rate"), "Tokens a second over time", points, [{ name: "output", colour: "--c0", at: AT.output }, { name: "prompts", colour: "--c1", at: AT.prompt }]);
  lineChart($("chart-first"), "Time to first token over time", points, percentiles(AT.first));
  lineChart($("chart-between"), "Time between tokens over time", points, percentiles(AT.between));
  lineChart($("chart-requests"), "Choices running and waiting over time", points, [{ name: "running", colour: "--c0", at: AT.running }, { name: "waiting", colour: "--c1", at: AT.waiting }]);
  lineChart($("chart-pool"), "Pages over time", points, [{ name: "in use", colour: "--c0", at: AT.held }, { name: "kept for prefixes", colour: "--c1", at: AT.cached }], { limit: 100 });
  const engine = latest && latest.engine;
  if (!engine) return;
  barChart($("bars-prompt"), "Finished requests by prompt length", engine.sizes.prompt);
  barChart($("bars-output"), "Finished requests by output length", engine.sizes.output);
  drawMap(engine);
}

function drawMap(engine) {
  const style = getComputedStyle(document.documentElement), found = {};
  const colour = (symbol) => (found[symbol] ||= style.getPropertyValue({ ".": "--empty", c: "--cached", s: "--shared" }[symbol] || `--p${symbol}`));
  pageMap($("map"), engine.map, colour);
  const own = engine.held - engine.shared, empty = engine.pages - engine.held - engine.cached;
  $("map").setAttribute("aria-label", `Of ${engine.pages} pages ${own} are held by one request, ${engine.shared} by several, ${engine.cached} are kept for prefixes, ${empty} are empty.`);
  put("map-scale", `${short(engine.pages)} of ${engine.config.page_size} tokens${engine.pages_per_cell > 1 ? `, ${engine.pages_per_cell} a square` : ""}`);
  const key = [["--p0", `one request (a colour each) ${short(own)}`], ["--shared", `shared prefix ${short(engine.shared)}`], ["--cached", `free, kept for prefixes ${short(engine.cached)}`], ["--empty", `empty ${short(empty)}`]];
  $("map-key").replaceChildren(...key.map(([name, text]) => {
    const entry = document.createElement("span");
    entry.append(swatch(name, "i"), text);
    return entry;
  }));
  const rows = engine.largest.map((one) => [one.id, one.lane, short(one.prompt), short(one.output), short(one.pages)]);
  table("largest", rows, (cell, row, column) => {
    cell.classList.toggle("id", column === 0);
    cell.classList.toggle("text", column === 1);
    if (column === 0) {
      cell.title = engine.largest[row].id;
      cell.prepend(swatch(`--p${engine.largest[row].colour}`, "span"));
    }
  }, "nothing runs");
}

function showErrors(errors) {
  put("error-count", errors.length ? `the last ${errors.length}` : "");
  const rows = errors.map((error) => [new Date(error.time * 1000).toLocaleTimeString(), String(error.status), error.message, error.id]);
  table("errors", rows, (cell, row, column) => cell.classList.toggle(["", "", "long", "id"][column] || "text", true), "none");
}

// -- pieces

function swatch(colour, kind) {
  const made = document.createElement(kind);
  made.className = "swatch";
  made.style.background = `var(${colour})`;
  return made;
}

function table(id, rows, finish = () => {}, none = "") {
  const made = rows.map((texts, row) => {
    const line = document.createElement("tr");
    texts.forEach((text, column) => {
      const cell = line.insertCell();
      cell.textContent = text;
      finish(cell, row, column);
    });
    return line;
  });
  if (!made.length && none) {
    const line = document.createElement("tr"), cell = line.insertCell();
    cell.colSpan = 9;
    cell.className = "soft";
    cell.textContent = none;
    made.push(line);
  }
  $(id).replaceChildren(...made);
}

function counts(id, entries) {
  $(id).replaceChildren(...entries.flatMap(([name, value, alarming]) => {
    const term = document.createElement("dt"), number = document.createElement("dd");
    term.textContent = name;
    number.textContent = typeof value === "number" ? short(value) : value;
    if (alarming) number.className = "bad";
    return [term, number];
  }));
}

function duration(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = Math.max(0, units.findIndex(([size]) => seconds >= size));
  const [size, unit] = units[seconds < 1 ? 3 : first], next = units[first + 1];
  const rest = next && seconds >= 60 ? Math.floor((seconds % size) / next[0]) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${next[1]}` : ""}`;
}

new ResizeObserver(() => { if (latest) draw(); }).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (latest) draw(); });
connect();
