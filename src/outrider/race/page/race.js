/**
 * A race of plain and speculative decoding, recorded in this page or live from the server: race/events.py makes its
 * events. Text of models and prompts becomes text nodes, never markup.
 */

const RETRY_MS = 1000; // while the model loads
const FADE_MS = 900;
const MOST_BARS = 60;
const MOST_K = 8; // of "auto"
const SLOWER = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const LEAST_SECONDS = 7; // that a race should take on screen
const ROUNDS_TO_TIME = 6; // of each lane, to estimate its speed

const at = (id) => document.getElementById(id);
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const shown = (token) => token.text || "▫"; // end tokens and partial characters have no text
const probability = (p) => (p >= 0.001 || p === 0 ? p.toFixed(3) : p.toExponential(1));
const pairs = (rows) => rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);

function element(name, attributes = {}, ...children) {
  const isDrawn = name === "svg" || name === "rect";
  const made = isDrawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** One arm on the page: the first `numPlayed` of its rounds, which may still arrive. */
class Lane {
  constructor(arm, start, index, rounds) {
    Object.assign(this, { arm, rounds, most: start.max_new_tokens, numPlayed: 0, ghosts: [] });
    this.counts = { accepted: 0, correction: 0, bonus: 0 };
    // Whole rounds only: a round cut by the end of the text would have accepted an unknown number.
    this.numWhole = this.numDrafted = this.numAccepted = 0;
    this.height = 1 + Math.max(...start.arms.map(({ k }) => (k === "auto" ? MOST_K : Number(k))));
    this.figures = ["tokens", "s", "tokens/s"].map((unit) => [element("b", {}, "0"), unit]);
    this.runner = element("div", { class: "runner" });
    this.output = element("p", { class: "text" }, element("span", { class: "prompt" }, start.prompt));
    const box = `0 0 ${MOST_BARS * 4} ${this.height * 10}`;
    this.bars = element("svg", { role: "img", preserveAspectRatio: "none", viewBox: box });
    this.facts = element("dl", { class: "pairs" });
    this.node = element(
      "article",
      { class: arm.draft === null ? "lane plain" : "lane", "aria-labelledby": `lane-${index}` },
      element("h2", { id: `lane-${index}` }, arm.name),
      element("p", { class: "figures" }, ...this.figures.map(([b, unit]) => element("span", {}, b, ` ${unit}`))),
      element("div", { class: "track", "aria-hidden": "true" }, this.runner),
      this.output,
      element("div", { class: "spark" }, element("p", { class: "quiet" }, "Tokens per round"), this.bars),
      this.facts,
    );
    this.summarise();
  }

  get hasEnded() {
    return (this.rounds.at(-1)?.finish_reason ?? null) !== null;
  }

  get isPlayed() {
    return this.numPlayed === this.rounds.length;
  }

  get seconds() {
    return this.rounds.at(-1)?.seconds ?? 0;
  }

  get ids() {
    return this.rounds.flatMap((round) => round.tokens.map((token) => token.id));
  }

  /** Show the rounds up to a time. */
  play(time) {
    const due = this.rounds.slice(this.numPlayed).filter((round) => round.seconds <= time);
    const isAtEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 40;
    for (const round of due) this.#take(round);
    if (due.length) this.summarise();
    if (due.length && isAtEnd) this.output.scrollTop = this.output.scrollHeight;
    const seconds = this.isPlayed && this.hasEnded ? this.seconds : time;
    const numTokens = sum(Object.values(this.counts));
    const rate = seconds > 0 ? numTokens / seconds : 0;
    const texts = [String(numTokens), seconds.toFixed(seconds < 10 ? 3 : 1), rate.toFixed(rate < 100 ? 1 : 0)];
    this.figures.forEach(([figure], i) => (figure.textContent = texts[i]));
    this.runner.style.setProperty("width", `${(100 * numTokens) / this.most}%`);
  }

  #take(round) {
    const number = ++this.numPlayed;
    const hasDraft = this.arm.draft !== null;
    for (const token of round.tokens) this.counts[token.origin] += 1;
    if (!round.is_truncated) {
      this.numWhole += 1;
      this.numDrafted += round.drafted.length;
      this.numAccepted += round.tokens.length - 1;
    }
    this.ghosts.forEach(fade);
    const numAccepted = round.tokens.filter((token) => token.origin === "accepted").length;
    // After the end of the text it is unknown whether the drafts would have been accepted.
    this.ghosts = round.drafted.slice(numAccepted).map((drafted, i) => {
      // A rejected line break must not break the line.
      const ghost = element("del", { class: "ghost", tabindex: "-1" }, shown(drafted).replaceAll("\n", "↵"));
      tips.set(ghost, { token: { ...drafted, origin: i ? "discarded" : "rejected" }, drafted, number });
      return ghost;
    });
    const tokens = round.tokens.map((token, i) => {
      const span = element("span", { class: "token", tabindex: "-1", "data-origin": token.origin }, shown(token));
      const drafted = token.origin === "accepted" && round.drafted[i];
      tips.set(span, { token, drafted, number, rejected: round.drafted[numAccepted], hasDraft });
      return span;
    });
    if (number === 1) tokens[0]?.setAttribute("tabindex", "0");
    if (numAccepted < tokens.length) tokens.splice(numAccepted, 0, ...this.ghosts);
    else this.ghosts = [];
    this.output.append(element("span", { class: "round" }, ...tokens));
  }

  /** Draw the tokens of the last rounds, accepted ones below, and count. */
  summarise() {
    const { arm, counts, numDrafted, numAccepted, numWhole } = this;
    const played = this.rounds.slice(Math.max(0, this.numPlayed - MOST_BARS), this.numPlayed);
    const tau = numWhole ? (1 + numAccepted / numWhole).toFixed(2) : null;
    this.bars.setAttribute(
      "aria-label",
      `Tokens of the last ${played.length} rounds${tau === null ? "" : `, ${tau} on average`}`,
    );
    const bars = played.flatMap((round, i) =>
      round.tokens.map(({ origin }, j) => {
        const place = { x: i * 4, y: (this.height - j - 1) * 10, width: 3, height: 10 };
        return element("rect", arm.draft === null ? place : { ...place, "data-origin": origin });
      }),
    );
    this.bars.replaceChildren(...bars);
    const share = numDrafted ? ` (${Math.round((100 * numAccepted) / numDrafted)}%)` : "";
    const ofDraft = [
      ["τ measured", tau ?? "–"],
      ["Drafted", `${numDrafted}, ${numAccepted} accepted${share}`],
      ["Tokens", `${counts.accepted} accepted, ${counts.correction} corrections, ${counts.bonus} bonus`],
    ];
    const rows = arm.draft === null ? [["τ", "1 (no draft)"]] : ofDraft;
    this.facts.replaceChildren(...pairs([["Rounds", String(this.numPlayed)], ...rows]));
  }
}

function fade(ghost) {
  // A focused one stays until it loses focus.
  if (ghost === document.activeElement) ghost.addEventListener("blur", () => fade(ghost), { once: true });
  else if (ghost.classList.contains("fading")) ghost.classList.add("gone");
  else {
    ghost.classList.add("fading");
    setTimeout(fade, FADE_MS, ghost);
  }
}

/** Plays rounds at their recorded times, all lanes by one clock, perhaps slowed down. */
class Show {
  constructor(start) {
    Object.assign(this, { start, rounds: start.arms.map(() => []), isComplete: false, measured: [], scale: null });
    at("target").textContent = start.target;
    this.raise();
  }

  /** Begin, or begin again. */
  raise() {
    this.lanes = this.start.arms.map((arm, i) => new Lane(arm, this.start, i, this.rounds[i]));
    at("lanes").replaceChildren(...this.lanes.map((lane) => lane.node));
    this.time = 0;
    this.setPaused(false);
    at("pause").disabled = false;
    at("again").disabled = true;
    this.say(["The race is running."]);
    this.last = performance.now();
    requestAnimationFrame((now) => this.tick(now));
  }

  receive(event) {
    if (event.type === "round") this.rounds[event.arm].push(event);
    else if (event.type === "end") Object.assign(this, { isComplete: true, measured: event.measured });
  }

  /** No more events will come. */
  breakOff() {
    show = null;
    at("pause").disabled = true;
    this.say(["The race was interrupted."]);
  }

  setPaused(isPaused) {
    this.isPaused = isPaused;
    at("pause").textContent = isPaused ? "Continue" : "Pause";
  }

  say(sentences, isOver = false) {
    at("verdict").className = isOver ? "over" : "";
    at("verdict").replaceChildren(...sentences.map((sentence) => element("p", {}, sentence)));
  }

  /** Scale of the lanes' time to the watcher's at which the race can be watched; null until it is known. */
  get watchable() {
    const { isComplete, lanes } = this;
    if (!isComplete && !lanes.every((lane) => lane.hasEnded || lane.rounds.length >= ROUNDS_TO_TIME)) return null;
    const seconds = lanes.map((lane) =>
      lane.hasEnded ? lane.seconds : (this.start.max_new_tokens * lane.seconds) / lane.ids.length,
    );
    return 1 / (SLOWER.find((slower) => Math.max(...seconds) * slower >= LEAST_SECONDS) ?? SLOWER.at(-1));
  }

  tick(now) {
    if (show !== this) return; // another race is shown, or this one was interrupted
    const { lanes, isComplete } = this;
    const chosen = at("speed").value;
    // Kept once known, so that the pace does not change.
    const scale = chosen === "auto" ? (this.scale ??= this.watchable) : Number(chosen);
    if (!this.isPaused && scale !== null) {
      // Stop where a lane has no more rounds yet.
      const open = lanes.filter((lane) => !lane.hasEnded && !isComplete).map((lane) => lane.seconds);
      const end = open.length ? Math.min(...open) : Math.max(...lanes.map((lane) => lane.seconds));
      this.time = scale === Infinity ? end : Math.min(this.time + ((now - this.last) / 1000) * scale, end);
      for (const lane of lanes) lane.play(this.time);
    }
    this.last = now;
    at("scale").textContent = [null, 1, Infinity].includes(scale) ? "" : `slowed ${Math.round(1 / scale)} times`;
    if (isComplete && lanes.every((lane) => lane.isPlayed)) {
      at("pause").disabled = true;
      at("again").disabled = false;
      this.say(this.verdict(), true);
    } else requestAnimationFrame((later) => this.tick(later));
  }

  verdict() {
    const { start } = this;
    const [base, ...others] = this.lanes;
    const texts = this.lanes.map((lane) => lane.ids);
    const rates = this.lanes.map((lane, i) => texts[i].length / lane.seconds);
    const sentences = others.map(
      ({ arm }, i) => `${arm.name} is ${(rates[i + 1] / rates[0]).toFixed(2)} times as fast as ${base.arm.name} in this race.`,
    );
    this.measured.forEach(({ speed_up: speed, num_cases }, i) => {
      if (!speed) return;
      const ends = speed.low === null ? "" : ` [${speed.low.toFixed(2)}, ${speed.high.toFixed(2)}]`;
      const runs = `Measured separately, ${num_cases} runs of each arm in turn`;
      sentences.push(`${runs}, ${start.arms[i].name}: ${speed.value.toFixed(2)}${ends} times as fast, without prefill.`);
    });
    const differing = texts.map((ids) => ids.findIndex((id, i) => id !== texts[0][i])).filter((place) => place >= 0);
    const isSame = !differing.length && texts.every((ids) => ids.length === texts[0].length);
    const same = `${others.length > 1 ? "All" : "Both"} texts are the same`;
    const place = Math.min(...differing, ...texts.map((ids) => ids.length));
    const isFixed = start.temperature === 0 || start.acceptance === "gumbel";
    const why = start.temperature === 0 ? "at temperature 0 decoding is deterministic" : `under gumbel the seed ${start.seed} determines the text for any draft and K`;
    if (isSame) sentences.push(isFixed ? `${same}, token for token: ${why}.` : `${same}.`);
    else if (isFixed) sentences.push(`The texts differ after ${place} tokens, by rounding (a near tie).`);
    else sentences.push(`Different samples, same distribution: under ${start.acceptance} the samples depend on the draft. (With gumbel a seed gives the same text.)`);
    return sentences;
  }
}

/** What a token's tooltip tells. */
const tips = new WeakMap();
const ABOUT = {
  accepted: () => "drafted and accepted",
  rejected: () => "drafted and rejected",
  discarded: () => "drafted after a rejected token, and dropped with it",
  bonus: ({ hasDraft }) => (hasDraft ? "bonus: drawn from p after all drafts were accepted" : "drawn from p"),
  correction: ({ rejected }) => `correction: replaces “${shown(rejected)}”`,
};
let owner = null; // of the tooltip

function hideTip() {
  at("tip").hidden = true;
  owner?.removeAttribute("aria-describedby");
  owner = null;
}

/** Show a token's probabilities, on hover and focus. */
function showTip(target) {
  const found = tips.get(target);
  if (!found) return;
  hideTip();
  const { token, drafted, number } = found;
  const tip = at("tip");
  const numbers = drafted && { p: drafted.p, q: drafted.q, "min(1, p/q)": Math.min(1, drafted.p / drafted.q) };
  const rows = Object.entries(numbers || {}).map(([name, value]) => [name, probability(value)]);
  tip.replaceChildren(
    element("p", {}, element("b", {}, `“${shown(token)}”`), ` ${ABOUT[token.origin](found)}`),
    ...(rows.length ? [element("dl", { class: "pairs" }, ...pairs(rows))] : []),
    element("p", { class: "quiet" }, `round ${number}, token ${token.id}`),
  );
  owner = target;
  target.setAttribute("aria-describedby", tip.id);
  tip.hidden = false;
  const box = target.getClientRects()[0] ?? target.getBoundingClientRect();
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const isBelow = box.bottom + tip.offsetHeight + 8 < document.documentElement.clientHeight;
  tip.style.setProperty("left", `${Math.max(8, left)}px`);
  tip.style.setProperty("top", `${isBelow ? box.bottom : box.top - tip.offsetHeight}px`);
}

/** Move between tokens by the arrow keys; one token per lane is in the Tab order. */
function move(event) {
  const focused = document.activeElement;
  const text = focused?.closest(".lane .text");
  if (!text || event.altKey || event.ctrlKey || event.metaKey) return;
  const all = [...text.querySelectorAll(".token, .ghost")].filter((one) => one.getClientRects().length > 0);
  const place = all.indexOf(focused);
  const target = all[{ ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: all.length - 1 }[event.key]];
  if (!target) return;
  event.preventDefault();
  for (const one of text.querySelectorAll("[tabindex='0']")) one.setAttribute("tabindex", "-1");
  // Rejected drafts fade, so Tab stops at the token after them.
  const stop = target.classList.contains("token") ? target : target.parentElement.lastElementChild;
  stop.setAttribute("tabindex", "0");
  target.focus();
}

/** An error response. */
class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, init = {}) {
  const key = at("key").value;
  const response = await fetch(path, { ...init, headers: key ? { authorization: `Bearer ${key}` } : {} });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server returned ${response.status}`;
  const seconds = response.headers.get("retry-after");
  throw new Refused(response.status, seconds ? message.replace(/ later$/, ` in about ${seconds} s`) : message);
}

/** Yield the events of a race. (EventSource can only GET.) */
async function* eventsOf(body, signal) {
  const given = new Blob([JSON.stringify(body)], { type: "application/json" });
  const response = await request("v1/race", { method: "POST", body: given, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused(response.status, "the response was interrupted");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks.filter((one) => one.startsWith("data: "))) { // others are comments
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(response.status, event.error.message);
      yield event;
    }
  }
}

let show = null; // the current race
let running = new AbortController();

function report(error) {
  const isKey = error.status === 401;
  at("key-field").hidden &&= !isKey;
  const text = isKey ? "This server requires an API key." : error.message;
  if (at("error").textContent !== text) at("error").textContent = text; // so that screen readers read it once
  if (isKey) at("key").focus();
}

/** Request a race and show it. */
async function race() {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  const seed = at("seed").value;
  const body = {
    prompt: at("prompt").value,
    drafter: at("drafter").value,
    num_draft_tokens: Number(at("k").value),
    acceptance: at("acceptance").value,
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("max-tokens").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
  };
  at("error").textContent = "";
  let mine = null;
  try {
    for await (const event of eventsOf(body, signal)) {
      if (event.type === "start") show = mine = new Show(event);
      else mine?.receive(event);
    }
  } catch (error) {
    if (signal.aborted) return;
    report(error);
    mine?.breakOff();
  }
}

/** List the drafts and rules of the server, once it is ready. */
async function offer() {
  at("start").disabled = true;
  try {
    const found = await (await request("v1/race/choices")).json();
    at("target").textContent = found.target;
    const lists = { drafter: [found.drafts, found.drafts[0]], acceptance: [found.acceptances, found.acceptance] };
    for (const [id, [names, chosen]] of Object.entries(lists)) {
      at(id).replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    }
    at("k").value = found.num_draft_tokens;
    at("k").max = found.most_draft_tokens;
    at("max-tokens").max = found.max_model_len;
    at("start").disabled = false;
    at("error").textContent = "";
  } catch (error) {
    report(error);
    if (error.status === 503) setTimeout(offer, RETRY_MS);
  }
}

/** Replay a recorded race. */
function replay([start, ...events]) {
  const { acceptance, temperature, seed, max_new_tokens: most } = start;
  const facts = { Rule: acceptance, Temperature: temperature, Seed: seed, Tokens: `at most ${most}` };
  at("recorded").hidden = false;
  at("recorded").replaceChildren(...pairs(Object.entries(facts)));
  show = new Show(start);
  for (const event of events) show.receive(event);
}

function listen(id, kind, act) {
  at(id).addEventListener(kind, act);
}

listen("controls", "submit", (event) => {
  event.preventDefault();
  race();
});
listen("key", "change", offer);
listen("pause", "click", () => show?.setPaused(!show.isPaused));
listen("again", "click", () => show?.raise());
listen("keep", "change", () => at("lanes").classList.toggle("keep", at("keep").checked));
listen("lanes", "pointerover", (event) => showTip(event.target));
listen("lanes", "pointerout", (event) => event.relatedTarget !== at("tip") && !at("tip").matches(":hover") && hideTip());
listen("tip", "pointerleave", hideTip);
listen("lanes", "focusin", (event) => showTip(event.target));
listen("lanes", "focusout", hideTip);
at("lanes").addEventListener("scroll", () => owner && (owner === document.activeElement ? showTip(owner) : hideTip()), true);
document.addEventListener("keydown", (event) => (event.key === "Escape" ? hideTip() : move(event)));

const recording = at("recording");
if (recording) replay(JSON.parse(recording.textContent));
else {
  at("controls").hidden = false;
  offer();
}
