// The recent snapshots. Bounded: a new snapshot replaces the oldest.

const WINDOW_S = 300;
const RATE_S = 3;
const SHARE_S = 30;
const LATENCY_S = 15;
const MOST = 1000;

export { SHARE_S, WINDOW_S };

/** Series for the charts, and the last half minute of snapshots for rates and shares. */
export class History {
  times = [];
  series = {
    output: [], prompt: [], running: [], waiting: [], preempted: [],
    ttft50: [], ttft95: [], gap50: [], gap95: [],
  };
  #recent = [];

  get latest() {
    return this.#recent.at(-1);
  }

  clear() {
    this.#recent.length = 0;
    this.times.length = 0;
    for (const values of Object.values(this.series)) values.length = 0;
  }

  add(snapshot) {
    const before = this.latest;
    if (before && (snapshot.at_s <= before.at_s || snapshot.work.generation_tokens < before.work.generation_tokens)) {
      if (snapshot.at_s === before.at_s) return; // the same moment again
      this.clear(); // another server or another viewer
    }
    this.#recent.push(snapshot);
    while (this.#recent.length > 2 && snapshot.at_s - this.#recent[0].at_s > SHARE_S) this.#recent.shift();
    while (this.#recent.length > MOST) this.#recent.shift();
    const first = quantiles(this, 'first_token');
    const gap = quantiles(this, 'gap');
    const now = {
      output: this.rate((one) => one.work.generation_tokens),
      prompt: this.rate((one) => one.work.prompt_tokens),
      running: snapshot.queue.running, waiting: snapshot.queue.waiting, preempted: snapshot.queue.preempted,
      ttft50: first[0], ttft95: first[1], gap50: gap[0], gap95: gap[1],
    };
    this.times.push(snapshot.at_s);
    for (const [name, values] of Object.entries(this.series)) values.push(now[name]);
    while (this.times.length > MOST || snapshot.at_s - this.times[0] > WINDOW_S) {
      this.times.shift();
      for (const values of Object.values(this.series)) values.shift();
    }
  }

  /** Return the newest value of a series. */
  now(name) {
    return this.series[name].at(-1) ?? null;
  }

  /** Return the snapshot of a number of seconds ago, or the oldest. */
  ago(ageS) {
    const now = this.latest.at_s;
    return this.#recent.find((one) => now - one.at_s <= ageS) ?? this.#recent[0];
  }

  /** Return the snapshots of the last half minute, oldest first. */
  get recent() {
    return this.#recent;
  }

  /** Return the recent growth of a sum per second; null with fewer than two snapshots. */
  rate(sum, overS = RATE_S) {
    const { latest } = this;
    const before = this.ago(overS);
    const took = latest.at_s - before.at_s;
    const from = sum(before);
    const to = sum(latest);
    return took > 0 && from != null && to != null ? Math.max(0, to - from) / took : null;
  }
}

/** Return median and 95th percentile of the recent values of a histogram, computed like Prometheus' histogram_quantile. */
function quantiles(history, name) {
  const after = history.latest.work[name];
  const before = history.ago(LATENCY_S).work[name];
  if (!after?.counts.length) return [null, null];
  const counts = after.counts.map((count, index) => count - (before?.counts[index] ?? 0));
  const total = counts.at(-1);
  return total > 0 ? [0.5, 0.95].map((share) => quantile(after.bounds, counts, share * total)) : [null, null];
}

function quantile(bounds, counts, rank) {
  const index = counts.findIndex((count) => count >= rank);
  if (index < 0 || index >= bounds.length) return bounds.at(-1);
  const low = index ? bounds[index - 1] : 0;
  const below = index ? counts[index - 1] : 0;
  const inside = counts[index] - below;
  return inside > 0 ? low + (bounds[index] - low) * ((rank - below) / inside) : bounds[index];
}
