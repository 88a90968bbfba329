/**
 * Race events, which race/events.py makes, and the clock that replays them. Knows neither the document nor the server.
 *
 * @typedef {{id: number, text: string, origin: "accepted" | "correction" | "bonus"}} Token
 * @typedef {{id: number, text: string, p: number, q: number}} Drafted
 * @typedef {{type: "round", arm: number, seconds: number, tokens: Token[], drafted: Drafted[],
 *   is_truncated: boolean, finish_reason: string | null}} Round
 * @typedef {{name: string, draft: string | null, k: number | string | null}} Arm
 * @typedef {{type: "start", target: string, prompt: string, seed: number, acceptance: string, temperature: number,
 *   max_new_tokens: number, arms: Arm[]}} Start
 */

/** One arm: its committed tokens so far. */
export class Lane {
  /** @param {Arm} arm */
  constructor(arm) {
    this.arm = arm;
    /** @type {Round[]} */
    this.rounds = [];
    this.counts = { accepted: 0, correction: 0, bonus: 0 };
    this.seconds = 0;
    this.hasEnded = false;
    // Whole rounds only: a round cut by the end of the text would have accepted an unknown number.
    this.numWhole = this.numDrafted = this.numAccepted = 0;
  }

  /** @param {Round} round */
  take(round) {
    this.rounds.push(round);
    this.seconds = round.seconds;
    this.hasEnded = round.finish_reason !== null;
    for (const token of round.tokens) this.counts[token.origin] += 1;
    if (round.is_truncated) return;
    this.numWhole += 1;
    this.numDrafted += round.drafted.length;
    this.numAccepted += round.tokens.length - 1;
  }

  get numTokens() {
    return this.counts.accepted + this.counts.correction + this.counts.bonus;
  }

  get tokenIds() {
    return this.rounds.flatMap((round) => round.tokens.map((token) => token.id));
  }

  /** Tokens per round. */
  get tau() {
    return this.numWhole ? 1 + this.numAccepted / this.numWhole : null;
  }

  get tokensPerSecond() {
    return this.seconds > 0 ? this.numTokens / this.seconds : 0;
  }
}

/** Speed-up of one lane over another, per token. @param {Lane} lane @param {Lane} base */
export function speedUp(lane, base) {
  return lane.tokensPerSecond / base.tokensPerSecond;
}

/** Length of the common prefix of two lanes, in tokens. @param {Lane} a @param {Lane} b */
export function numShared(a, b) {
  const [first, second] = [a.tokenIds, b.tokenIds];
  const at = first.findIndex((id, i) => id !== second[i]);
  return at < 0 ? first.length : at;
}

const SCALES = [1, 1 / 2, 1 / 5, 1 / 10, 1 / 20, 1 / 50, 1 / 100, 1 / 200, 1 / 500, 1 / 1000];
const LEAST_SECONDS = 7; // that a race should take on screen
const ROUNDS_TO_TIME = 6; // of each lane, to estimate its speed

/** Replays rounds at their recorded times, all lanes by one clock, perhaps slowed down. */
export class Player {
  /** @param {Start} start */
  constructor(start) {
    this.start = start;
    this.received = start.arms.map((arm) => new Lane(arm));
    this.isComplete = false;
    this.scale = null;
    this.rewind();
  }

  rewind() {
    this.lanes = this.start.arms.map((arm) => new Lane(arm));
    this.time = 0;
  }

  /** @param {Round} round */
  receive(round) {
    this.received[round.arm].take(round);
  }

  /** Whether all rounds have been played. */
  get isOver() {
    return this.isComplete && this.lanes.every((lane, i) => lane.rounds.length === this.received[i].rounds.length);
  }

  /** Scale at which the race can be watched; null until known. */
  get watchableScale() {
    const rates = this.received.map((lane) => lane.tokensPerSecond);
    const isKnown = this.received.every((lane) => lane.hasEnded || lane.rounds.length >= ROUNDS_TO_TIME);
    if (!this.isComplete && !isKnown) return null;
    const lengths = this.received.map((lane) => (lane.hasEnded ? lane.numTokens : this.start.max_new_tokens));
    const seconds = Math.max(...lengths.map((length, i) => length / (rates[i] || Infinity)));
    return SCALES.find((scale) => seconds / scale >= LEAST_SECONDS) ?? SCALES.at(-1);
  }

  /**
   * Advance the clock; return the rounds that end in that time, in order.
   * @param {number} seconds of the watcher
   * @param {number | null} scale of the lanes' time to the watcher's; null waits
   * @returns {Round[]}
   */
  pass(seconds, scale) {
    if (scale === null) return [];
    // Stop where a lane has no more rounds yet.
    const open = this.received.filter((lane) => !lane.hasEnded && !this.isComplete);
    const end = open.length ? Math.min(...open.map((lane) => lane.seconds)) : this.seconds;
    this.time = Math.min(scale === Infinity ? Infinity : this.time + seconds * scale, end);
    const due = this.received.flatMap((lane, i) => lane.rounds.slice(this.lanes[i].rounds.length));
    const played = due.filter((round) => round.seconds <= this.time).sort((a, b) => a.seconds - b.seconds);
    for (const round of played) this.lanes[round.arm].take(round);
    return played;
  }

  /** Time of the longest lane. */
  get seconds() {
    return Math.max(...this.received.map((lane) => lane.seconds));
  }
}
