// The times of the tokens of an answer: one mark per token, as high as the gap before it.

import { byId, fit, setText } from './dom.js';
import * as format from './format.js';

const SVG = 'http://www.w3.org/2000/svg';
const LEGEND = 'Each mark is a token, as high as the time since the one before. Tokens of one read share that time.';
const MIN_HEIGHT = 0.06; // share of the height, so that a token without a gap is visible

/** The marks and numbers of one answer. */
export class Timeline {
  #svg = byId('timeline');
  #sentMs = 0;
  #reads = []; // of the network: when each came, and how many tokens it brought

  /** Show the state before the first message. */
  clear() {
    this.#svg.replaceChildren();
    this.#reads = [];
    for (const name of ['first', 'tokens', 'gap', 'longest', 'rate', 'cached']) setText(byId(`t-${name}`), format.NOTHING);
    setText(byId('timeline-text'), LEGEND);
    setText(byId('axis-end'), '');
  }

  /** Begin: a message was sent now. */
  start(nowMs) {
    this.clear();
    this.#sentMs = nowMs;
    setText(byId('timeline-text'), 'Waiting for the first token.');
  }

  /** Add tokens of the read that ended at `readMs`. */
  add(tokens, readMs) {
    const last = this.#reads.at(-1);
    if (last?.atMs === readMs) last.tokens += tokens;
    else this.#reads.push({ atMs: readMs, tokens });
    if (!last) setText(byId('timeline-text'), `The first token came after ${format.seconds(this.#firstMs / 1000)}.`);
    const marks = this.#marks();
    this.#draw(marks);
    this.#write(marks);
  }

  get #firstMs() {
    return this.#reads.length ? this.#reads[0].atMs - this.#sentMs : null;
  }

  /**
   * Return when each token came, and the gap before it. The network brings several tokens at once, so that the tokens
   * of a read share the time since the read before. Of the tokens of the first read only that time is known.
   */
  #marks() {
    return this.#reads.flatMap(({ atMs, tokens }, place) => {
      const sinceMs = place ? this.#reads[place - 1].atMs : atMs;
      const gap = place ? (atMs - sinceMs) / tokens : null;
      return Array.from({ length: tokens }, (_, one) => ({ atMs: sinceMs - this.#sentMs + (gap ?? 0) * (one + 1), gap }));
    });
  }

  /** End: the answer is complete. `usage` is what the server sent. */
  end(usage, reason) {
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) setText(byId('t-cached'), cached == null ? format.NOTHING : `${format.whole(cached)} of ${format.whole(usage.prompt_tokens)}`);
    const tokens = this.#reads.reduce((sum, read) => sum + read.tokens, 0);
    const words = this.#firstMs == null ? 'No token came.' : `${tokens} tokens, the first after ${format.seconds(this.#firstMs / 1000)}.`;
    setText(byId('timeline-text'), reason ? `${words} ${reason}` : words);
  }

  /** Draw the marks: the width is the duration of the answer, heights are relative to the longest gap. */
  #draw(marks) {
    const width = Math.max(1, marks.at(-1).atMs * 1.02);
    const longest = Math.max(1, ...marks.map(({ gap }) => gap ?? 0));
    this.#svg.setAttribute('viewBox', `0 -1 ${width.toFixed(1)} 1`);
    const lines = fit(this.#svg, marks.length, makeLine);
    marks.forEach(({ atMs, gap }, place) => {
      const line = lines[place];
      line.setAttribute('class', place ? 'mark' : 'mark first');
      line.setAttribute('x1', atMs.toFixed(1));
      line.setAttribute('x2', atMs.toFixed(1));
      line.setAttribute('y2', (place ? -Math.max(MIN_HEIGHT, (gap ?? 0) / longest) : -1).toFixed(3));
    });
    setText(byId('axis-end'), format.seconds(width / 1000));
  }

  #write(marks) {
    const gaps = marks.map(({ gap }) => gap).filter((gap) => gap != null).sort((one, other) => one - other);
    setText(byId('t-first'), format.seconds(this.#firstMs / 1000));
    setText(byId('t-tokens'), format.whole(marks.length));
    setText(byId('t-gap'), format.seconds(gaps.length ? gaps[Math.floor(gaps.length / 2)] / 1000 : null));
    setText(byId('t-longest'), format.seconds(gaps.length ? gaps.at(-1) / 1000 : null));
    const took = marks.at(-1).atMs - this.#firstMs;
    setText(byId('t-rate'), format.rate(took > 0 ? (1000 * gaps.length) / took : null));
  }
}

function makeLine() {
  const line = document.createElementNS(SVG, 'line');
  line.setAttribute('y1', '0');
  return line;
}
