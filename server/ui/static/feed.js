// Requests snapshots a few times a second while the page is visible.

const EVERY_MS = 350;
const AGAIN_MS = 1500;
const PATIENCE_MS = 8000;

/** Calls `onSnapshot` with every snapshot, and `onTrouble` with the reason if there is none. */
export class Feed {
  #keys;
  #onSnapshot;
  #onTrouble;
  #timer = 0;
  #turn = 0;
  #isPaused = false;

  constructor(keys, onSnapshot, onTrouble) {
    this.#keys = keys;
    this.#onSnapshot = onSnapshot;
    this.#onTrouble = onTrouble;
    document.addEventListener('visibilitychange', () => this.start());
  }

  /** Start requesting, or start again after a new key. */
  start() {
    clearTimeout(this.#timer);
    this.#turn += 1;
    if (!this.#isPaused && !document.hidden) this.#ask(this.#turn);
  }

  pause(isPaused) {
    this.#isPaused = isPaused;
    this.start();
  }

  async #ask(turn) {
    const began = performance.now();
    const { status, body, trouble } = await this.#fetch();
    if (turn !== this.#turn) return;
    try {
      if (trouble) this.#onTrouble(status, trouble);
      else this.#onSnapshot(body);
    } finally {
      const left = Math.max(50, (trouble ? AGAIN_MS : EVERY_MS) - (performance.now() - began));
      if (status !== 401) this.#timer = setTimeout(() => this.#ask(turn), left); // with a wrong key there is no point in asking again
    }
  }

  /** Return one answer; `trouble` is the reason if it has no snapshot. */
  async #fetch() {
    try {
      const answer = await fetch('ui/data', {
        headers: this.#keys.headers(),
        cache: 'no-store',
        signal: AbortSignal.timeout(PATIENCE_MS),
      });
      const body = await answer.json();
      const trouble = answer.ok ? '' : body.error?.message ?? `The server answered ${answer.status}.`;
      return { status: answer.status, body, trouble };
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof DOMException || error instanceof SyntaxError)) throw error;
      return { status: 0, trouble: 'No answer from the server; asking again.' };
    }
  }
}
