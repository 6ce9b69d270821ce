// Requests snapshots a few times a second while the page is visible.

const EVERY_MS = 350;
const AGAIN_MS = 1500;
const PATIENCE_MS = 8000;

const SILENT_MS = 5000; // after which the charts begin again with what the server has kept

/**
 * Calls `onSnapshot` with every snapshot, and `onTrouble` with the reason if there is none. Before the first snapshot,
 * and after a silence, calls `onPast` with the ten minutes that the server has kept.
 */
export class Feed {
  #keys;
  #onSnapshot;
  #onTrouble;
  #onPast;
  #heardMs = -Infinity;
  #timer = 0;
  #turn = 0;
  #isPaused = false;

  constructor(keys, onSnapshot, onTrouble, onPast) {
    this.#keys = keys;
    this.#onSnapshot = onSnapshot;
    this.#onTrouble = onTrouble;
    this.#onPast = onPast;
    document.addEventListener('visibilitychange', () => this.start());
  }

  /** Start requesting, or start again after a new key. */
  start() {
    clearTimeout(this.#timer);
    this.#turn += 1;
    if (!this.#isPaused && !document.hidden) this.#ask(this.#turn);
  }

  /** Begin again with another key: another viewer has another past. */
  restart() {
    this.#heardMs = -Infinity;
    this.start();
  }

  pause(isPaused) {
    this.#isPaused = isPaused;
    this.start();
  }

  async #ask(turn) {
    const began = performance.now();
    if (began - this.#heardMs > SILENT_MS) {
      const past = await this.#fetch('ui/past');
      if (turn !== this.#turn) return;
      if (!past.trouble) this.#onPast(past.body);
    }
    const { status, body, trouble } = await this.#fetch('ui/data');
    if (turn !== this.#turn) return;
    if (!trouble) this.#heardMs = performance.now();
    try {
      if (trouble) this.#onTrouble(status, trouble);
      else this.#onSnapshot(body);
    } finally {
      const left = Math.max(50, (trouble ? AGAIN_MS : EVERY_MS) - (performance.now() - began));
      if (status !== 401) this.#timer = setTimeout(() => this.#ask(turn), left); // with a wrong key there is no point in asking again
    }
  }

  /** Return one answer; `trouble` is the reason if it has no snapshot. */
  async #fetch(path) {
    try {
      const answer = await fetch(path, {
        headers: this.#keys.headers(),
        cache: 'no-store',
        signal: AbortSignal.timeout(PATIENCE_MS),
      });
      const body = await answer.json();
      const trouble = answer.ok ? '' : body.error?.message ?? `The server answered ${answer.status}.`;
      return { status: answer.status, body, trouble };
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof DOMException || error instanceof SyntaxError)) throw error;
      return { status: 0, trouble: 'No answer from the server.' };
    }
  }
}
