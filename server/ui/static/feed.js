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
    let wait = EVERY_MS;
    try {
      const answer = await fetch('ui/data', {
        headers: this.#keys.headers(),
        cache: 'no-store',
        signal: AbortSignal.timeout(PATIENCE_MS),
      });
      const body = await answer.json();
      if (turn !== this.#turn) return;
      if (answer.ok) {
        this.#onPicture(body);
      } else {
        wait = answer.status === 401 ? Infinity : AGAIN_MS;
        this.#onTrouble(answer.status, body.error?.message ?? `The server answered ${answer.status}.`);
      }
    } catch (error) {
      if (turn !== this.#turn) return;
      if (!(error instanceof TypeError || error instanceof DOMException || error instanceof SyntaxError)) throw error;
      wait = AGAIN_MS;
      this.#onTrouble(0, 'No answer from the server; asking again.');
    }
    if (wait === Infinity) return; // a wrong key gets no better by itself
    const left = Math.max(50, wait - (performance.now() - began));
    this.#timer = setTimeout(() => this.#ask(turn), left);
  }
}
