// Tenants: the service of each against its fair share.

import { byId, element, fit, setText } from './dom.js';
import * as format from './format.js';
import { SHARE_S } from './history.js';

/** The table of tenants. */
export class Tenants {
  #palette;
  #body = byId('tenants');

  constructor(palette) {
    this.#palette = palette;
  }

  draw(history) {
    const { tenants } = history.latest;
    const rows = [...tenants.rows].sort((one, other) => one.band - other.band || one.name.localeCompare(other.name));
    const shares = servedShares(history);
    const bands = new Set(rows.map((row) => row.band)).size;
    const lines = fit(this.#body, rows.length, makeRow);
    rows.forEach((row, place) => this.#write(lines[place], row, shares, history, bands > 1));
    const hidden = tenants.seen - rows.length;
    setText(byId('tenants-rest'), hidden > 0 ? `and ${format.whole(hidden)} more, less busy` : rows.length ? '' : 'Nobody has asked for anything yet.');
    setText(byId('tenants-note'), tenants.jain == null ? '' : `evenness ${tenants.jain.toFixed(2)} of 1 in the last minute`);
  }

  #write(line, row, shares, history, hasBands) {
    const [name, weight, share, tokens, running, waiting] = line.children;
    const [swatch, label] = name.children;
    swatch.className = `swatch ${this.#palette.className(row.name)}`;
    setText(label, row.name);
    label.title = row.name;
    setText(weight, hasBands ? `${row.weight} in band ${row.band}` : String(row.weight));
    const { served, due } = shares.get(row.name) ?? { served: 0, due: 0 };
    const [track, words] = share.children;
    const [fill, mark] = track.children;
    fill.className = `fill ${this.#palette.className(row.name)}`;
    fill.style.width = `${(served * 100).toFixed(1)}%`;
    mark.style.left = `${(due * 100).toFixed(1)}%`;
    mark.hidden = due === 0;
    setText(words, due > 0 ? `${format.percent(served)} of ${format.percent(due)}` : served > 0 ? format.percent(served) : 'idle');
    const perS = history.rate((one) => find(one, row.name)?.generation_tokens ?? null);
    setText(tokens, format.rate(perS));
    setText(running, format.whole(row.running));
    setText(waiting, format.whole(row.waiting));
    line.dataset.tenant = row.name;
    line.dataset.tokens = String(row.generation_tokens);
    waiting.title = row.starving_s > 0 ? `the oldest has waited ${format.seconds(row.starving_s)}` : '';
  }
}

function makeRow() {
  const row = element('tr');
  const name = element('th');
  name.scope = 'row';
  name.append(element('i', 'swatch'), element('span', 'name'));
  const share = element('td', 'share');
  const track = element('div', 'track');
  track.append(element('div', 'fill'), element('div', 'due'));
  share.append(track, element('span', 'words'));
  row.append(name, element('td', 'number wide'), share, element('td', 'number'), element('td', 'number'), element('td', 'number'));
  return row;
}

function find(snapshot, name) {
  return snapshot.tenants.rows.find((row) => row.name === name);
}

/** Return each tenant's share of its band's service in the last half minute, and its fair share while it wanted service. */
function servedShares(history) {
  const { latest } = history;
  const before = history.ago(SHARE_S);
  const isTimed = latest.tenants.bands.some((band) => band.service_s > 0); // otherwise the policy does not count device time
  const of = (one) => (isTimed ? one.service_s : one.generation_tokens);
  const totals = new Map(latest.tenants.bands.map((band) => {
    const old = before.tenants.bands.find((other) => other.band === band.band);
    return [band.band, of(band) - (old ? of(old) : 0)];
  }));
  const shares = new Map();
  for (const row of latest.tenants.rows) {
    const old = find(before, row.name);
    const total = totals.get(row.band) ?? 0;
    const due = meanDue(history.recent, row);
    const got = of(row) - (old ? of(old) : 0);
    shares.set(row.name, { served: total > 0 ? Math.min(1, Math.max(0, got / total)) : 0, due });
  }
  return shares;
}

/** Return a tenant's mean fair share over the snapshots in which a tenant of its band wanted service. */
function meanDue(snapshots, { name, band }) {
  let due = 0;
  let moments = 0;
  for (const { tenants } of snapshots) {
    const shares = tenants.rows.filter((row) => row.band === band && row.fair_share > 0);
    moments += shares.length > 0;
    due += shares.find((row) => row.name === name)?.fair_share ?? 0;
  }
  return moments ? Math.min(1, due / moments) : 0;
}
