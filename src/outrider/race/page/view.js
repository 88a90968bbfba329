/** Lanes as elements. Text of models and prompts becomes text nodes, never markup. */

import { numShared, speedUp } from "./race.js";

const SVG = "http://www.w3.org/2000/svg";
const MOST_BARS = 60;
const MOST_K = 8; // of "auto"
const FADE_MS = 900;

/**
 * @param {string} name @param {Record<string, string>} [attributes] @param {...(Node | string)} children
 * @returns {HTMLElement}
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** @param {number | null} value @param {number} digits */
function fixed(value, digits) {
  return value === null ? "–" : value.toFixed(digits);
}

/** @param {number} p */
function probability(p) {
  return p >= 0.001 || p === 0 ? p.toFixed(3) : p.toExponential(1);
}

/** Tokens of recent rounds: accepted ones below, the last one on top. */
class Sparkline {
  /** @param {number} height in tokens, one for all lanes */
  constructor(height) {
    this.height = height;
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("preserveAspectRatio", "none");
  }

  /** @param {import("./race.js").Lane} lane */
  draw(lane) {
    const rounds = lane.rounds.slice(-MOST_BARS);
    const { height } = this;
    this.svg.setAttribute("viewBox", `0 0 ${MOST_BARS * 4} ${height * 10}`);
    const tau = lane.tau === null ? "" : `, ${lane.tau.toFixed(2)} on average`;
    this.svg.setAttribute("aria-label", `Tokens of the last ${rounds.length} rounds${tau}`);
    const parts = rounds.flatMap((round, i) =>
      round.tokens.map((token, j) => {
        const bar = document.createElementNS(SVG, "rect");
        const box = { x: i * 4, y: (height - j - 1) * 10, width: 3, height: 10 };
        for (const [key, value] of Object.entries(box)) bar.setAttribute(key, String(value));
        if (lane.arm.draft !== null) bar.dataset.origin = token.origin;
        return bar;
      }),
    );
    this.svg.replaceChildren(...parts);
  }
}

/** One lane of the race. */
export class LaneView {
  /** @param {import("./race.js").Lane} lane @param {import("./race.js").Start} start @param {number} index */
  constructor(lane, start, index) {
    this.lane = lane;
    this.most = start.max_new_tokens;
    this.tokens = element("b", {}, "0");
    this.clock = element("b", {}, "0.000");
    this.rate = element("b", {}, "0");
    this.runner = element("div", { class: "runner" });
    this.output = element("p", { class: "text" }, element("span", { class: "prompt" }, start.prompt));
    this.sparkline = new Sparkline(1 + Math.max(...start.arms.map((arm) => (arm.k === "auto" ? MOST_K : Number(arm.k)))));
    this.facts = element("dl", { class: "pairs" });
    this.numRounds = 0;
    /** @type {HTMLElement[]} of the last round */
    this.ghosts = [];
    const title = element("h2", { id: `lane-${index}` }, lane.arm.name);
    this.node = element(
      "article",
      { class: lane.arm.draft === null ? "lane plain" : "lane", "aria-labelledby": `lane-${index}` },
      title,
      element(
        "p",
        { class: "figures" },
        element("span", {}, this.tokens, " tokens"),
        element("span", {}, this.clock, " s"),
        element("span", {}, this.rate, " tokens/s"),
      ),
      element("div", { class: "track", "aria-hidden": "true" }, this.runner),
      this.output,
      element("div", { class: "spark" }, element("p", { class: "quiet" }, "Tokens per round"), this.sparkline.svg),
      this.facts,
    );
  }

  /** @param {import("./race.js").Round[]} rounds that the lane has just taken */
  add(rounds) {
    const isAtEnd = this.output.scrollHeight - this.output.scrollTop - this.output.clientHeight < 40;
    for (const round of rounds) this.#append(round);
    if (isAtEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  /** @param {import("./race.js").Round} round */
  #append(round) {
    this.ghosts.forEach(fade);
    this.ghosts = [];
    const numAccepted = round.tokens.filter((token) => token.origin === "accepted").length;
    const number = ++this.numRounds;
    const group = element("span", { class: "round" });
    round.tokens.forEach((token, i) => {
      if (i === numAccepted) group.append(...(this.ghosts = ghostsOf(round, numAccepted, number)));
      const span = element("span", { class: "token", tabindex: "-1", "data-origin": token.origin }, shown(token));
      const drafted = token.origin === "accepted" ? round.drafted[i] : null;
      tips.set(span, { token, drafted, number, rejected: round.drafted[numAccepted], hasDraft: this.lane.arm.draft !== null });
      group.append(span);
    });
    this.output.append(group);
    if (number === 1) group.querySelector(".token")?.setAttribute("tabindex", "0");
  }

  /** @param {number} time by which the race is played */
  refresh(time) {
    const { lane } = this;
    const seconds = lane.hasEnded ? lane.seconds : time;
    this.tokens.textContent = String(lane.numTokens);
    this.clock.textContent = seconds.toFixed(seconds < 10 ? 3 : 1);
    this.rate.textContent = seconds > 0 ? (lane.numTokens / seconds).toFixed(lane.numTokens / seconds < 100 ? 1 : 0) : "0";
    this.runner.style.setProperty("width", `${(100 * lane.numTokens) / this.most}%`);
  }

  /** Update everything that changes once per round. */
  summarise() {
    const { lane } = this;
    this.sparkline.draw(lane);
    const rows = [["Rounds", String(lane.rounds.length)]];
    if (lane.arm.draft !== null) {
      const share = lane.numDrafted ? ` (${Math.round((100 * lane.numAccepted) / lane.numDrafted)}%)` : "";
      rows.push(
        ["τ measured", fixed(lane.tau, 2)],
        ["Drafted", `${lane.numDrafted}, ${lane.numAccepted} accepted${share}`],
        ["Tokens", `${lane.counts.accepted} accepted, ${lane.counts.correction} corrections, ${lane.counts.bonus} bonus`],
      );
    } else rows.push(["τ", "1 (no draft)"]);
    this.facts.replaceChildren(...pairs(rows));
  }
}

/** @param {string[][]} rows of a description list */
export function pairs(rows) {
  return rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
}

/** Visible text of a token. (End tokens and partial characters have none.) @param {{text: string}} token */
function shown(token) {
  return token.text || "▫";
}

/**
 * Drafts that were not accepted. After the end of the text it is unknown whether they would have been.
 * @param {import("./race.js").Round} round @param {number} numAccepted @param {number} number of the round
 */
function ghostsOf(round, numAccepted, number) {
  return round.drafted.slice(numAccepted).map((drafted, i) => {
    // A rejected line break must not break the line.
    const ghost = element("del", { class: "ghost", tabindex: "-1" }, shown(drafted).replaceAll("\n", "↵"));
    tips.set(ghost, { token: { ...drafted, origin: i ? "discarded" : "rejected" }, drafted, number });
    return ghost;
  });
}

/** @param {Element} ghost */
function fade(ghost) {
  // A focused one stays until it loses focus.
  if (ghost === document.activeElement) ghost.addEventListener("blur", () => fade(ghost), { once: true });
  else if (ghost.classList.contains("fading")) ghost.classList.add("gone");
  else {
    ghost.classList.add("fading");
    setTimeout(fade, FADE_MS, ghost);
  }
}

/**
 * Describe the outcome in sentences.
 * @param {import("./race.js").Player} player @param {import("./race.js").Start} start
 * @param {Array<{num_cases: number, speed_up: {value: number, low: number | null, high: number | null} | null}>} measured
 * @returns {string[]}
 */
export function verdict(player, start, measured) {
  const [base, ...others] = player.lanes;
  const sentences = others.map((lane) => `${lane.arm.name} is ${speedUp(lane, base).toFixed(2)} times as fast as ${base.arm.name} in this race.`);
  measured.forEach(({ speed_up: interval, num_cases }, i) => {
    if (!interval) return;
    const ends = interval.low === null ? "" : ` [${interval.low.toFixed(2)}, ${interval.high.toFixed(2)}]`;
    sentences.push(`Measured separately, ${num_cases} runs of each arm in turn, ${start.arms[i].name}: ${interval.value.toFixed(2)}${ends} times as fast, without prefill.`);
  });
  const shared = Math.min(...others.map((lane) => numShared(base, lane)));
  const isSame = others.every((lane) => lane.numTokens === base.numTokens) && shared === base.numTokens;
  const all = others.length > 1 ? "All texts" : "Both texts";
  if (start.temperature === 0) {
    sentences.push(isSame ? `${all} are the same, token for token: at temperature 0 decoding is deterministic.` : `The texts differ after ${shared} tokens, by rounding (a near tie).`);
  } else if (start.acceptance === "gumbel") {
    sentences.push(isSame ? `${all} are the same, token for token: under gumbel the seed ${start.seed} determines the text for any draft and K.` : `The texts differ after ${shared} tokens, by rounding (a near tie under gumbel).`);
  } else if (isSame) sentences.push(`${all} are the same.`);
  else sentences.push(`Different samples, same distribution: under ${start.acceptance} the samples depend on the draft. (With gumbel a seed gives the same text.)`);
  return sentences;
}

/** @type {WeakMap<Element, {token: any, drafted: any, number: number, rejected?: any, hasDraft?: boolean}>} */
const tips = new WeakMap();

const ABOUT = {
  accepted: "drafted and accepted",
  rejected: "drafted and rejected",
  discarded: "drafted after a rejected token, and dropped with it",
};

/** Show a token's probabilities in a tooltip, on hover and focus. @param {HTMLElement} tip @param {HTMLElement} lanes */
export function watchTokens(tip, lanes) {
  /** @type {Element | null} */
  let owner = null;

  function hide() {
    tip.hidden = true;
    owner?.removeAttribute("aria-describedby");
    owner = null;
  }

  /** @param {EventTarget | null} target */
  function show(target) {
    const found = target instanceof Element ? tips.get(target) : undefined;
    if (!found || !(target instanceof Element)) return;
    hide();
    const { token, drafted, number, rejected, hasDraft } = found;
    let about = ABOUT[token.origin];
    if (token.origin === "bonus") about = hasDraft ? "bonus: drawn from p after all drafts were accepted" : "drawn from p";
    if (token.origin === "correction") about = `correction: replaces “${shown(rejected)}”`;
    const rows = drafted && [
      ["p", probability(drafted.p)],
      ["q", probability(drafted.q)],
      ["min(1, p/q)", probability(Math.min(1, drafted.p / drafted.q))],
    ];
    tip.replaceChildren(
      element("p", {}, element("b", {}, `“${shown(token)}”`), ` ${about}`),
      ...(rows ? [element("dl", { class: "pairs" }, ...pairs(rows))] : []),
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

  lanes.addEventListener("pointerover", (event) => show(event.target));
  lanes.addEventListener("pointerout", (event) => event.relatedTarget !== tip && !tip.matches(":hover") && hide());
  tip.addEventListener("pointerleave", hide);
  lanes.addEventListener("focusin", (event) => show(event.target));
  lanes.addEventListener("focusout", hide);
  lanes.addEventListener("scroll", () => owner && (owner === document.activeElement ? show(owner) : hide()), true);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    else if (document.activeElement && lanes.contains(document.activeElement)) move(event);
  });
}

/** Move between tokens by the arrow keys; one token per lane is in the Tab order. @param {KeyboardEvent} event */
function move(event) {
  const at = document.activeElement;
  const text = at?.closest(".text");
  if (!at || !text || event.altKey || event.ctrlKey || event.metaKey) return;
  const all = [...text.querySelectorAll(".token, .ghost")].filter((one) => one.getClientRects().length > 0);
  const place = all.indexOf(at);
  const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: all.length - 1 }[event.key];
  const target = next === undefined ? undefined : all[next];
  if (!(target instanceof HTMLElement)) return;
  event.preventDefault();
  for (const one of text.querySelectorAll("[tabindex='0']")) one.setAttribute("tabindex", "-1");
  // Rejected drafts fade, so Tab stops at the token after them.
  const stop = target.classList.contains("token") ? target : target.parentElement?.lastElementChild;
  stop?.setAttribute("tabindex", "0");
  target.focus();
}
