// Keys that were typed in: this tab's memory, and nobody else's.

const STORE_NAME = 'tiercel.key';

/** A key for the figures, and another one for the chat where the first makes no requests. */
export class Keys {
  get main() {
    return sessionStorage.getItem(STORE_NAME) ?? '';
  }

  set main(key) {
    this.#keep(STORE_NAME, key);
  }

  get chat() {
    return sessionStorage.getItem(`${STORE_NAME}.chat`) ?? '';
  }

  set chat(key) {
    this.#keep(`${STORE_NAME}.chat`, key);
  }

  /** Headers that carry a key. */
  headers(key = this.main) {
    return key ? { Authorization: `Bearer ${key}` } : {};
  }

  #keep(name, key) {
    if (key) sessionStorage.setItem(name, key);
    else sessionStorage.removeItem(name);
  }
}
