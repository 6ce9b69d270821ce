// The times of the tokens of an answer: one mark per token, as high as the gap before it.

import { byId, setText } from './dom.js';
import * as format from './format.js';

const SVG = 'http://www.w3.org/2000/svg';
const LEGEND = 'Each mark is a token; its height is the time since the one before.';
const MIN_HEIGHT = 0.06; // share of the height, so that a token without a gap is visible

/** The marks and numbers of one answer. */
export class Timeline {
  #svg = byId('timeline');
  #sentMs = 0;
  #lastMs = 0;
  #gaps = [];
  #marks = [];
  #firstMs = null;

  /** Show the state before the first message. */
  clear() {
    this.#svg.replaceChildren();
    this.#gaps = [];
    this.#marks = [];
    this.#firstMs = null;
    for (const name of ['first', 'tokens', 'gap', 'longest', 'rate', 'cached']) setText(byId(`t-${name}`), format.NOTHING);
    setText(byId('timeline-text'), LEGEND);
    setText(byId('axis-end'), '');
  }

  /** Begin: a message was sent now. */
  start(nowMs) {
    this.clear();
    this.#sentMs = this.#lastMs = nowMs;
    setText(byId('timeline-text'), 'Waiting for the first token.');
  }

  /** Add tokens that arrived now. */
  add(tokens, nowMs) {
    const isFirst = this.#firstMs == null;
    for (let one = 0; one < tokens; one += 1) {
      const gap = this.#marks.length ? nowMs - this.#lastMs : 0;
      if (this.#firstMs == null) this.#firstMs = nowMs - this.#sentMs;
      else this.#gaps.push(gap);
      this.#lastMs = nowMs;
      this.#mark(nowMs - this.#sentMs, gap);
    }
    if (isFirst) setText(byId('timeline-text'), `The first token came after ${format.seconds(this.#firstMs / 1000)}.`);
    this.#scale();
    this.#write();
  }

  /** End: the answer is complete. `usage` is what the server sent. */
  end(usage, reason) {
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) setText(byId('t-cached'), cached == null ? format.NOTHING : `${format.whole(cached)} of ${format.whole(usage.prompt_tokens)}`);
    const words = this.#firstMs == null ? 'No token came.' : `${this.#marks.length} tokens, the first after ${format.seconds(this.#firstMs / 1000)}.`;
    setText(byId('timeline-text'), reason ? `${words} ${reason}` : words);
  }

  #mark(atMs, gap) {
    const line = document.createElementNS(SVG, 'line');
    line.setAttribute('class', this.#marks.length ? 'mark' : 'mark first');
    line.setAttribute('x1', atMs.toFixed(1));
    line.setAttribute('x2', atMs.toFixed(1));
    line.setAttribute('y1', '0');
    this.#svg.append(line);
    this.#marks.push([line, gap]);
  }

  /** Draw the marks: the width is the duration of the answer, heights are relative to the longest gap. */
  #scale() {
    const width = Math.max(1, (this.#lastMs - this.#sentMs) * 1.02);
    const longest = Math.max(1, ...this.#gaps);
    this.#svg.setAttribute('viewBox', `0 -1 ${width.toFixed(1)} 1`);
    this.#marks.forEach(([line, gap], place) => {
      const height = place ? Math.max(MIN_HEIGHT, gap / longest) : 1;
      line.setAttribute('y2', (-height).toFixed(3));
    });
    setText(byId('axis-end'), format.seconds(width / 1000));
  }

  #write() {
    const sorted = [...this.#gaps].sort((one, other) => one - other);
    setText(byId('t-first'), format.seconds(this.#firstMs / 1000));
    setText(byId('t-tokens'), format.whole(this.#marks.length));
    setText(byId('t-gap'), format.seconds(sorted.length ? sorted[Math.floor(sorted.length / 2)] / 1000 : null));
    setText(byId('t-longest'), format.seconds(sorted.length ? sorted.at(-1) / 1000 : null));
    const took = this.#lastMs - this.#sentMs - this.#firstMs;
    setText(byId('t-rate'), format.rate(took > 0 ? (1000 * this.#gaps.length) / took : null));
  }
}
