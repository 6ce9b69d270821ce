// The keys that were typed in, kept by this tab only.

const STORE_NAME = 'tiercel.key';

/** The key for the snapshots, and another key for the chat if the first one cannot make requests. */
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

  /** Return the headers for a key. */
  headers(key = this.main) {
    return key ? { Authorization: `Bearer ${key}` } : {};
  }

  #keep(name, key) {
    if (key) sessionStorage.setItem(name, key);
    else sessionStorage.removeItem(name);
  }
}
