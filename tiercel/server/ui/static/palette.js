// One colour per tenant, the same everywhere on the page, for eight tenants at a time; others are grey.

const COLOURS = 8;
const FORGET_MS = 60_000;

/** The colours of the tenants. */
export class Palette {
  #seen = new Map(); // name -> [index, time of the last use]

  /** Return the number of a tenant's colour; null if all are taken. */
  index(name) {
    const now = performance.now();
    const known = this.#seen.get(name);
    if (known) {
      known[1] = now;
      return known[0];
    }
    const taken = new Set();
    for (const [other, [index, at]] of this.#seen) {
      if (now - at > FORGET_MS) this.#seen.delete(other);
      else taken.add(index);
    }
    for (let index = 0; index < COLOURS; index += 1) {
      if (!taken.has(index)) {
        this.#seen.set(name, [index, now]);
        return index;
      }
    }
    return null;
  }

  /** Return the CSS class of this tenant's colour. */
  className(name) {
    const index = this.index(name);
    return index == null ? 'tenant-rest' : `tenant-${index}`;
  }
}
