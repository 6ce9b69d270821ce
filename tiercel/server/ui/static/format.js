// Numbers as text for people.

const WHOLE = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const TENTH = new Intl.NumberFormat('en', { maximumFractionDigits: 1 });
const COMPACT = new Intl.NumberFormat('en', { notation: 'compact', maximumFractionDigits: 1 });
const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export const NOTHING = '–';

/** A count in full: 12,345. */
export function whole(value) {
  return value == null ? NOTHING : WHOLE.format(value);
}

/** A count in short: 12.3K. */
export function compact(value) {
  return value == null ? NOTHING : value < 10000 ? WHOLE.format(value) : COMPACT.format(value);
}

/** A rate per second. */
export function rate(value) {
  return value == null ? NOTHING : value < 10 ? TENTH.format(value) : compact(value);
}

/** 0.25 as 25 %. */
export function percent(share) {
  return share == null ? NOTHING : `${WHOLE.format(share * 100)} %`;
}

/** A duration from seconds: 12 ms, 1.2 s, 3 min. */
export function seconds(value) {
  if (value == null) return NOTHING;
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${WHOLE.format(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  return `${WHOLE.format(value / 60)} min`;
}

/** An age: 4.8 s. */
export function age(value) {
  return value < 10 ? `${value.toFixed(1)} s` : seconds(value);
}

/** An amount of memory: 1.5 GiB. */
export function bytes(value) {
  if (value == null) return NOTHING;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : WHOLE.format(value)} ${UNITS[unit]}`;
}

/** A time of day: 18:44:05. */
export function clock(date) {
  return date.toLocaleTimeString('en-GB');
}

/** A time that goes on, in whole units: 4 s, 3 min. */
export function elapsed(value) {
  return value < 120 ? `${Math.max(1, Math.round(value))} s` : `${WHOLE.format(value / 60)} min`;
}
