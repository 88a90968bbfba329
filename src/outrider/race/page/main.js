/** The page: its controls and the current race. */

import { Player } from "./race.js";
import { Refused, getJson, post } from "./stream.js";
import { LaneView, element, pairs, verdict, watchTokens } from "./view.js";

const RETRY_MS = 1000; // while the model loads

/** @param {string} id @returns {any} */
function at(id) {
  return document.getElementById(id);
}

/** Playback of a race: play, pause, replay. */
class Show {
  /** @param {import("./race.js").Start} start */
  constructor(start) {
    this.start = start;
    this.player = new Player(start);
    this.measured = [];
    at("target").textContent = start.target;
    this.#raise();
  }

  #raise() {
    this.views = this.player.lanes.map((lane, i) => new LaneView(lane, this.start, i));
    at("lanes").replaceChildren(...this.views.map((view) => view.node));
    this.setPaused(false);
    at("pause").disabled = false;
    at("again").disabled = true;
    at("verdict").className = "";
    at("verdict").replaceChildren(element("p", {}, "The race is running."));
    for (const view of this.views) view.summarise();
    this.last = performance.now();
    requestAnimationFrame((now) => this.#tick(now));
  }

  /** @param {any} event */
  receive(event) {
    if (event.type === "round") this.player.receive(event);
    else if (event.type === "end") {
      this.player.isComplete = true;
      this.measured = event.measured;
    }
  }

  again() {
    this.player.rewind();
    this.#raise();
  }

  /** No more events will come. */
  breakOff() {
    show = null;
    at("pause").disabled = true;
    at("verdict").replaceChildren(element("p", {}, "The race was interrupted."));
  }

  /** @param {boolean} isPaused */
  setPaused(isPaused) {
    this.isPaused = isPaused;
    at("pause").textContent = isPaused ? "Continue" : "Pause";
  }

  get scale() {
    const chosen = at("speed").value;
    // Keep it once known, so that the pace does not change.
    if (chosen === "auto") return (this.player.scale ??= this.player.watchableScale);
    return Number(chosen);
  }

  /** @param {number} now in ms */
  #tick(now) {
    if (show !== this) return; // another race is shown, or this one was interrupted
    const seconds = this.isPaused ? 0 : (now - this.last) / 1000;
    this.last = now;
    const { scale, player } = this;
    const rounds = this.isPaused ? [] : player.pass(seconds, scale);
    this.views.forEach((view, arm) => {
      const own = rounds.filter((round) => round.arm === arm);
      if (own.length) {
        view.add(own);
        view.summarise();
      }
      view.refresh(player.time);
    });
    at("scale").textContent = scale === null || scale === 1 || scale === Infinity ? "" : `slowed ${1 / scale} times`;
    if (player.isOver) this.#end();
    else requestAnimationFrame((later) => this.#tick(later));
  }

  #end() {
    at("pause").disabled = true;
    at("again").disabled = false;
    const sentences = verdict(this.player, this.start, this.measured);
    at("verdict").className = "over";
    at("verdict").replaceChildren(...sentences.map((sentence) => element("p", {}, sentence)));
  }
}

/** @type {Show | null} */
let show = null;
let running = new AbortController();

/** @param {unknown} error */
function report(error) {
  const isKey = error instanceof Refused && error.status === 401;
  at("key-field").hidden &&= !isKey;
  const message = error instanceof Error ? error.message : String(error);
  const text = isKey ? "This server requires an API key." : message;
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
  /** @type {Show | null} */
  let mine = null;
  try {
    for await (const event of post("v1/race", body, at("key").value, signal)) {
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
    const found = await getJson("v1/race/choices", at("key").value);
    at("target").textContent = found.target;
    for (const [id, names, chosen] of [
      ["drafter", found.drafts, found.drafts[0]],
      ["acceptance", found.acceptances, found.acceptance],
    ]) {
      at(id).replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    }
    at("k").value = found.num_draft_tokens;
    at("k").max = found.most_draft_tokens;
    at("max-tokens").max = found.max_model_len;
    at("start").disabled = false;
    at("error").textContent = "";
  } catch (error) {
    report(error);
    if (error instanceof Refused && error.status === 503) setTimeout(offer, RETRY_MS);
  }
}

/** Replay a recorded race. @param {any[]} events */
function replay(events) {
  const [start, ...others] = events;
  at("recorded").hidden = false;
  at("recorded").replaceChildren(
    ...pairs([
      ["Rule", start.acceptance],
      ["Temperature", String(start.temperature)],
      ["Seed", String(start.seed)],
      ["Tokens", `at most ${start.max_new_tokens}`],
    ]),
  );
  show = new Show(start);
  for (const event of others) show.receive(event);
}

at("controls").addEventListener("submit", (event) => {
  event.preventDefault();
  race();
});
at("key").addEventListener("change", offer);
at("pause").addEventListener("click", () => show?.setPaused(!show.isPaused));
at("again").addEventListener("click", () => show?.again());
at("keep").addEventListener("change", () => at("lanes").classList.toggle("keep", at("keep").checked));
watchTokens(at("tip"), at("lanes"));

const recording = at("recording");
if (recording) replay(JSON.parse(recording.textContent));
else {
  at("controls").hidden = false;
  offer();
}
