// The six figures at the top.

import { byId, setText } from './dom.js';
import * as format from './format.js';
import { SHARE_S } from './history.js';

/** Writes the tiles. */
export class Vitals {
  draw(history) {
    const { work, queue, requests } = history.latest;
    this.#tile('output', format.rate(history.now('output')), `${format.compact(work.generation_tokens)} since the start`, work.generation_tokens);
    this.#tile('prompt', format.rate(history.now('prompt')), this.#prompts(history), work.prompt_tokens);
    this.#tile('ttft', format.seconds(history.now('ttft50')), `95 % within ${format.seconds(history.now('ttft95'))}`);
    this.#tile('gap', format.seconds(history.now('gap50')), work.gap ? `95 % within ${format.seconds(history.now('gap95'))}` : 'the operator sees it');
    this.#tile('running', format.whole(queue.running), `${format.whole(requests.running)} with a first token`, queue.running);
    const preempted = queue.preempted ? `${format.whole(queue.preempted)} preempted` : 'none preempted';
    this.#tile('waiting', format.whole(queue.waiting), preempted, queue.waiting);
  }

  #prompts(history) {
    const hits = sumOfTiers(history, (tier) => tier.hit_tokens);
    const missed = history.rate((one) => one.tiers.at(-1)?.missed_tokens ?? null, SHARE_S);
    if (hits == null || missed == null || hits + missed === 0) return `${format.compact(history.latest.work.prompt_tokens)} since the start`;
    return `${format.percent(hits / (hits + missed))} from the cache`;
  }

  #tile(name, text, sub, value = null) {
    const node = byId(`v-${name}`);
    setText(node, text);
    if (value != null) node.dataset.value = String(value); // the plain number, for programs that read the page
    setText(byId(`v-${name}-sub`), sub);
  }
}

function sumOfTiers(history, of) {
  const rates = history.latest.tiers.map((_, place) => history.rate((one) => (one.tiers[place] ? of(one.tiers[place]) : null), SHARE_S));
  return rates.some((rate) => rate == null) ? null : rates.reduce((sum, rate) => sum + rate, 0);
}
