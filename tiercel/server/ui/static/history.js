// The recent snapshots. Bounded: a new snapshot replaces the oldest.

const WINDOW_S = 600;
const RATE_S = 3;
const SHARE_S = 30;
const LATENCY_S = 15;
const MOST = 1000;
const LEAST_STEP_S = WINDOW_S / (MOST - 50); // between two points of the charts, except for the newest

export { SHARE_S, WINDOW_S };

/** Moments of the last half minute, for rates and shares. */
class Trail {
  items = [];

  get latest() {
    return this.items.at(-1);
  }

  add(item) {
    this.items.push(item);
    while (this.items.length > 2 && item.at_s - this.items[0].at_s > SHARE_S) this.items.shift();
    while (this.items.length > MOST) this.items.shift();
  }

  clear() {
    this.items.length = 0;
  }

  /** Return the moment of a number of seconds ago, or the oldest. */
  ago(ageS) {
    const now = this.latest.at_s;
    return this.items.find((one) => now - one.at_s <= ageS) ?? this.items[0];
  }

  /** Return the recent growth of a sum per second; null with fewer than two moments. */
  rate(sum, overS) {
    const { latest } = this;
    const before = this.ago(overS);
    const took = latest.at_s - before.at_s;
    const from = sum(before);
    const to = sum(latest);
    return took > 0 && from != null && to != null ? Math.max(0, to - from) / took : null;
  }
}

/** Series for the charts, and the last half minute of snapshots for rates and shares. */
export class History {
  times = [];
  series = {
    output: [], prompt: [], running: [], waiting: [], preempted: [],
    ttft50: [], ttft95: [], gap50: [], gap95: [],
  };
  #recent = new Trail(); // snapshots
  #sums = new Trail(); // what the charts need of them, also of the time before the page was opened

  get latest() {
    return this.#recent.latest;
  }

  clear() {
    this.#recent.clear();
    this.#sums.clear();
    this.times.length = 0;
    for (const values of Object.values(this.series)) values.length = 0;
  }

  /** Begin with the ten minutes that the server has kept. */
  begin(past) {
    this.clear();
    past.at_s.forEach((at_s, place) => {
      const work = past.work && {
        prompt_tokens: past.work.prompt_tokens[place],
        generation_tokens: past.work.generation_tokens[place],
        first_token: momentOf(past.work.first_token, place),
        gap: momentOf(past.work.gap, place),
      };
      const queue = { running: past.running[place], waiting: past.waiting[place], preempted: past.preempted[place] };
      this.#note({ at_s, queue, work: work ?? {} });
    });
  }

  add(snapshot) {
    const before = this.latest;
    if (before && (snapshot.at_s <= before.at_s || snapshot.work.generation_tokens < before.work.generation_tokens)) {
      if (snapshot.at_s === before.at_s) return; // the same moment again
      this.clear(); // another server or another viewer
    }
    this.#recent.add(snapshot);
    this.#note(snapshot);
  }

  /** Return the newest value of a series. */
  now(name) {
    return this.series[name].at(-1) ?? null;
  }

  /** Return the snapshot of a number of seconds ago, or the oldest. */
  ago(ageS) {
    return this.#recent.ago(ageS);
  }

  /** Return the snapshots of the last half minute, oldest first. */
  get recent() {
    return this.#recent.items;
  }

  /** Return the recent growth of a sum of snapshots per second; null with fewer than two snapshots. */
  rate(sum, overS = RATE_S) {
    return this.#recent.rate(sum, overS);
  }

  /** Add a point to all series. */
  #note({ at_s, queue, work }) {
    const sums = this.#sums;
    if (sums.latest && at_s <= sums.latest.at_s) return; // the snapshot is older than the last sample
    sums.add({ at_s, work });
    const first = quantiles(sums, 'first_token');
    const gap = quantiles(sums, 'gap');
    const now = {
      output: sums.rate((one) => one.work.generation_tokens ?? null, RATE_S),
      prompt: sums.rate((one) => one.work.prompt_tokens ?? null, RATE_S),
      running: queue.running, waiting: queue.waiting, preempted: queue.preempted,
      ttft50: first[0], ttft95: first[1], gap50: gap[0], gap95: gap[1],
    };
    const { times } = this;
    const all = [[times, at_s], ...Object.entries(now).map(([name, value]) => [this.series[name], value])];
    const isClose = times.length > 1 && times.at(-1) - times.at(-2) < LEAST_STEP_S;
    if (isClose) all.forEach(([values]) => values.pop()); // the point before stays, this one takes the newest's place
    all.forEach(([values, value]) => values.push(value));
    while (times.length > MOST || at_s - times[0] > WINDOW_S) all.forEach(([values]) => values.shift());
  }
}

function momentOf(histogram, place) {
  return { bounds: histogram.bounds, counts: histogram.counts[place] };
}

/** Return median and 95th percentile of the recent values of a histogram, computed like Prometheus' histogram_quantile. */
function quantiles(sums, name) {
  const after = sums.latest.work[name];
  const before = sums.ago(LATENCY_S).work[name];
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
