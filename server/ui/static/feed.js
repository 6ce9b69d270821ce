// Asks the server what it does, a few times a second, while somebody looks.

const EVERY_MS = 350;
const AGAIN_MS = 1500;
const PATIENCE_MS = 8000;

/** Tells `onPicture` what the server answers and `onTrouble` why it does not. */
export class Feed {
  #keys;
  #onPicture;
  #onTrouble;
  #timer = 0;
  #turn = 0;
  #isPaused = false;

  constructor(keys, onPicture, onTrouble) {
    this.#keys = keys;
    this.#onPicture = onPicture;
    this.#onTrouble = onTrouble;
    document.addEventListener('visibilitychange', () => this.start());
  }

  /** Ask now and go on asking: also after a new key. */
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
      else this.#onPicture(body);
    } finally {
      const left = Math.max(50, (trouble ? AGAIN_MS : EVERY_MS) - (performance.now() - began));
      if (status !== 401) this.#timer = setTimeout(() => this.#ask(turn), left); // a wrong key gets no better by itself
    }
  }

  /** One answer. `trouble` says why there is no picture in it. */
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
