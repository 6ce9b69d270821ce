// While no snapshot arrives the page says so: its figures are of the past.

import { byId, setText } from './dom.js';
import * as format from './format.js';

/** The note above the figures, and the look of figures that are no longer true. */
export class Standstill {
  #charts;
  #note = byId('standstill');
  #seenAt = null; // when the newest snapshot arrived
  #timer = 0;

  constructor(charts) {
    this.#charts = charts;
  }

  /** A snapshot arrived. */
  end() {
    this.#seenAt = new Date();
    clearInterval(this.#timer);
    this.#timer = 0;
    delete document.body.dataset.standstill;
    this.#note.hidden = true;
    this.#charts.end('now');
  }

  /** No snapshot arrives. `kind`: `dead` dims the figures, `paused` leaves them. */
  begin(kind, why) {
    clearInterval(this.#timer);
    document.body.dataset.standstill = kind;
    this.#note.hidden = false;
    if (this.#seenAt) this.#charts.end(format.clock(this.#seenAt));
    this.#say(why);
    if (this.#seenAt) this.#timer = setInterval(() => this.#say(why), 1000);
  }

  #say(why) {
    const [reason, since, age] = this.#note.children;
    setText(reason, why);
    if (!this.#seenAt) {
      setText(since, 'No figure has come yet; asking again.');
      return;
    }
    setText(since, `All figures are of ${format.clock(this.#seenAt)},`);
    setText(age, `${format.elapsed((Date.now() - this.#seenAt) / 1000)} ago.`);
  }
}
