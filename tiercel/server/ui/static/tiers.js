// The drawing of the three tiers: a cell is a few blocks in the colour of their tenant; transfers are animated.

import { byId, colour, element, fit, onScheme, setText } from './dom.js';
import * as format from './format.js';
import { SHARE_S } from './history.js';
import { isUnified, nameOf } from './names.js';

const PITCH = 11; // pixels from cell to cell
const CELL = 9;
const FRAME_MS = 50;
const FLIGHT_MS = 700;
const FLASH_MS = 500;
const MAX_FLIGHTS = 160; // moving blocks drawn at once
const MAX_STARTED = 24; // of a route, per snapshot
const COLOURS = 8;

const LANES = {
  'hbm-ddr': { down: 'hbm_ddr', up: 'ddr_hbm', downWord: 'spilled', upWord: 'restored' },
  'ddr-ssd': { down: 'ddr_ssd', up: 'ssd_ddr', downWord: 'persisted', upWord: 'fetched' },
};
const ENDS = { hbm_ddr: ['hbm', 'ddr'], ddr_hbm: ['ddr', 'hbm'], ddr_ssd: ['ddr', 'ssd'], ssd_ddr: ['ssd', 'ddr'] };
const UPWARD = new Set(['ddr_hbm', 'ssd_ddr']);
const USED = 0;
const CACHED = 1;
const FREE = 255;
const REST = COLOURS; // the colour of tenants not listed by name

/** The grids of the tiers and the blocks moving between them. */
export class Tiers {
  #palette;
  #frame = byId('tiers');
  #canvas = byId('tiers-canvas');
  #pen = this.#canvas.getContext('2d');
  #grids = new Map();
  #flights = [];
  #colours = null;
  #still = matchMedia('(prefers-reduced-motion: reduce)');
  #tickedAt = 0;
  #saidAt = -Infinity;
  #isSeen = true;
  #isRunning = false;
  #isStale = true;

  constructor(palette) {
    this.#palette = palette;
    for (const node of this.#frame.querySelectorAll('.tier')) {
      this.#grids.set(node.dataset.tier, new TierGrid(node));
    }
    onScheme(() => {
      this.#colours = null;
      this.#repaint();
    });
    const sizes = new ResizeObserver(() => this.#measure());
    for (const node of [this.#frame, ...this.#frame.querySelectorAll('.cells')]) sizes.observe(node);
    new IntersectionObserver(([entry]) => {
      this.#isSeen = entry.isIntersecting;
      if (this.#isSeen) this.#repaint();
    }).observe(this.#frame);
  }

  draw(history) {
    const { latest } = history;
    for (const [name, grid] of this.#grids) {
      const tier = latest.tiers.find((one) => one.tier === name);
      grid.show(Boolean(tier) || isPossible(name, latest));
      if (tier) grid.write(tier, history, this.#palette);
      else grid.writeMissing(name, latest);
    }
    this.#writeLanes(history);
    this.#start(history);
    this.#writeKeys(latest);
    this.#writeSources(history);
    this.#describe(latest);
    this.#repaint();
  }

  /** Animate the blocks that landed since the last snapshot; of many, a few. */
  #start(history) {
    const [before, latest] = history.recent.slice(-2);
    if (!latest || this.#still.matches || document.hidden) return;
    const now = performance.now();
    const spread = Math.min(1500, (latest.at_s - before.at_s) * 1000);
    for (const route of latest.routes) {
      const ends = ENDS[route.route];
      const landed = route.blocks - (before.routes.find((one) => one.route === route.route)?.blocks ?? 0);
      if (!ends || landed <= 0) continue;
      const [from, to] = ends.map((name) => this.#grids.get(name === 'ddr' && isUnified(latest) ? 'hbm' : name));
      const count = Math.min(landed, MAX_STARTED, MAX_FLIGHTS - this.#flights.length);
      for (let one = 0; one < count; one += 1) {
        this.#flights.push(new Flight(from, to, now + (spread * one) / count, UPWARD.has(route.route)));
      }
    }
  }

  #writeLanes(history) {
    const has = (name) => history.latest.tiers.some((tier) => tier.tier === name);
    for (const lane of this.#frame.querySelectorAll('.lane')) {
      const spec = LANES[lane.dataset.lane];
      const isOff = lane.dataset.lane === 'hbm-ddr' ? !has('ddr') : !has('ssd');
      lane.hidden = isOff;
      for (const way of ['down', 'up']) {
        const node = lane.querySelector(`.${way}`);
        const route = history.latest.routes.find((one) => one.route === spec[way]);
        const perS = history.rate((one) => one.routes.find((other) => other.route === spec[way])?.bytes ?? null);
        const isShown = !isOff && route;
        setText(node.children[0], isShown ? spec[`${way}Word`] : '');
        setText(node.children[1], isShown ? (perS ? `${format.bytes(perS)}/s` : format.bytes(route.bytes)) : '');
        node.classList.toggle('is-moving', Boolean(perS));
        node.dataset.bytes = String(route?.bytes ?? 0);
      }
    }
  }

  #writeKeys(latest) {
    const names = new Set(latest.tiers.flatMap((tier) => tier.tenants.map((tenant) => tenant.name)));
    const items = fit(byId('tier-keys'), names.size, makeKey);
    [...names].sort().forEach((name, place) => {
      items[place].firstElementChild.className = `swatch ${this.#palette.className(name)}`;
      setText(items[place].lastElementChild, name);
    });
  }

  /** Write in which tiers the prompt tokens of the last half minute were found. */
  #writeSources(history) {
    const { tiers } = history.latest;
    const rates = tiers.map((tier) => history.rate((one) => one.tiers.find((other) => other.tier === tier.tier)?.hit_tokens ?? null, SHARE_S));
    const missed = history.rate((one) => one.tiers.at(-1)?.missed_tokens ?? null, SHARE_S);
    const total = rates.reduce((sum, rate) => sum + (rate ?? 0), missed ?? 0);
    const box = byId('sources');
    box.hidden = !(total > 0) || missed == null;
    if (box.hidden) return;
    const parts = [...tiers.map((tier, place) => [nameOf(tier.tier, history.latest), rates[place] ?? 0, `source-${tier.tier}`]), ['computed', missed, 'source-computed']];
    const bars = fit(byId('sources-bar'), parts.length, () => element('div'));
    const keys = fit(byId('sources-keys'), parts.length, makeKey);
    parts.forEach(([name, value, className], place) => {
      bars[place].className = className;
      bars[place].style.flexGrow = String(value / total);
      keys[place].firstElementChild.className = `swatch ${className}`;
      setText(keys[place].lastElementChild, `${name} ${format.percent(value / total)}`);
    });
  }

  /** Describe the tiers in words for screen readers, seldom. */
  #describe(latest) {
    if (latest.at_s - this.#saidAt < 10) return;
    this.#saidAt = latest.at_s;
    const words = latest.tiers.map((tier) => `${nameOf(tier.tier, latest)}: ${format.bytes(tier.used)} in use and ${format.bytes(tier.cached)} kept of ${format.bytes(tier.capacity)}`);
    this.#frame.setAttribute('aria-label', words.length ? `Tiers of memory. ${words.join('. ')}` : 'No tier has told anything yet');
  }

  #measure() {
    const frame = this.#frame.getBoundingClientRect();
    const scale = Math.min(2, devicePixelRatio || 1);
    this.#canvas.width = Math.round(frame.width * scale);
    this.#canvas.height = Math.round(frame.height * scale);
    this.#pen.setTransform(scale, 0, 0, scale, 0, 0);
    for (const grid of this.#grids.values()) grid.measure(frame);
    this.#paint(performance.now()); // at once, as setting its size has cleared the canvas
  }

  #repaint() {
    this.#isStale = true;
    if (this.#isRunning || !this.#isSeen) return;
    this.#isRunning = true;
    requestAnimationFrame((now) => this.#tick(now));
  }

  #tick(now) {
    this.#isRunning = false;
    if (!this.#isSeen || document.hidden) return;
    if (now - this.#tickedAt >= FRAME_MS) {
      this.#tickedAt = now;
      this.#paint(performance.now());
    }
    if (this.#isStale || this.#flights.length) {
      this.#isRunning = true;
      requestAnimationFrame((next) => this.#tick(next));
    }
  }

  #paint(now) {
    this.#colours ??= readColours();
    this.#pen.clearRect(0, 0, this.#canvas.width, this.#canvas.height);
    let isFlashing = false;
    for (const grid of this.#grids.values()) isFlashing = grid.paint(this.#pen, this.#colours, now) || isFlashing;
    this.#flights = this.#flights.filter((flight) => flight.paint(this.#pen, this.#colours, now));
    this.#isStale = isFlashing;
  }
}

/** One tier: rows of cells, filled from the top left: in use, cached, free. */
class TierGrid {
  #node;
  #place;
  #cells = new Uint8Array(0);
  #kinds = new Uint8Array(0);
  #changedAt = new Float64Array(0);
  #columns = 0;
  #tier = null;
  box = { x: 0, y: 0, width: 0, height: 0 };
  filled = 0;

  constructor(node) {
    this.#node = node;
    this.#place = node.querySelector('.cells');
  }

  measure(frame) {
    const rect = this.#place.getBoundingClientRect();
    this.box = { x: rect.left - frame.left, y: rect.top - frame.top, width: rect.width, height: rect.height };
    this.#columns = Math.max(1, Math.floor((rect.width + PITCH - CELL) / PITCH));
    const rows = Math.max(1, Math.floor((rect.height + PITCH - CELL) / PITCH));
    const count = this.#columns * rows;
    if (count === this.#cells.length) return;
    this.#cells = new Uint8Array(count).fill(FREE);
    this.#kinds = new Uint8Array(count);
    this.#changedAt = new Float64Array(count).fill(-FLASH_MS);
    if (this.#tier) this.#fill(this.#tier, -FLASH_MS);
  }

  /** Show the tier, or nothing of it where another one stands for both. */
  show(isShown) {
    this.#node.hidden = !isShown;
  }

  write(tier, history, palette) {
    this.#node.classList.remove('is-missing');
    setText(this.#node.querySelector('h3'), nameOf(tier.tier, history.latest));
    setText(this.#node.querySelector('.amount'), `${format.bytes(tier.used)} in use, ${format.bytes(tier.cached)} kept, of ${format.bytes(tier.capacity)}`);
    const hits = history.rate((one) => one.tiers.find((other) => other.tier === tier.tier)?.hit_tokens ?? null);
    const gone = history.rate((one) => one.tiers.find((other) => other.tier === tier.tier)?.evictions ?? null);
    const facts = [];
    if (hits != null) facts.push(`${format.rate(hits)} hit tokens/s`);
    if (gone) facts.push(`${format.rate(gone)} evicted/s`);
    const perCell = this.#cells.length ? tier.capacity / tier.block / this.#cells.length : 0;
    if (perCell >= 1.5) facts.push(`a cell is ${format.rate(perCell)} blocks`);
    setText(this.#node.querySelector('.facts'), facts.join(' · '));
    this.#node.classList.toggle('is-hit', Boolean(hits));
    Object.assign(this.#node.dataset, { used: tier.used, cached: tier.cached, capacity: tier.capacity });
    this.#tier = shareOut(tier, palette);
    this.#fill(this.#tier, performance.now());
  }

  writeMissing(name, latest) {
    this.#node.classList.add('is-missing');
    setText(this.#node.querySelector('h3'), nameOf(name, latest));
    setText(this.#node.querySelector('.amount'), whyMissing(name, latest));
    setText(this.#node.querySelector('.facts'), '');
    this.#tier = null;
    this.#cells.fill(FREE);
  }

  #fill({ parts, capacity }, now) {
    const scale = capacity > 0 ? this.#cells.length / capacity : 0;
    let cell = 0;
    let upTo = 0;
    for (const { colour: index, kind, bytes } of parts) {
      upTo += bytes * scale;
      const end = Math.min(this.#cells.length, bytes > 0 ? Math.max(cell + (upTo - cell > 0.2 ? 1 : 0), Math.round(upTo)) : cell);
      for (; cell < end; cell += 1) this.#set(cell, index, kind, now);
    }
    this.filled = cell;
    for (; cell < this.#cells.length; cell += 1) this.#set(cell, FREE, USED, now);
  }

  #set(cell, index, kind, now) {
    if (this.#cells[cell] === index && this.#kinds[cell] === kind) return;
    this.#cells[cell] = index;
    this.#kinds[cell] = kind;
    this.#changedAt[cell] = now;
  }

  /** Return the position of a cell in pixels of the frame. */
  at(cell) {
    return [this.box.x + (cell % this.#columns) * PITCH, this.box.y + Math.floor(cell / this.#columns) * PITCH];
  }

  /** Draw the cells. Return true while a changed cell is still highlighted. */
  paint(pen, colours, now) {
    if (this.#node.classList.contains('is-missing')) return false;
    let isFlashing = false;
    for (let cell = 0; cell < this.#cells.length; cell += 1) {
      const [x, y] = this.at(cell);
      const index = this.#cells[cell];
      const kind = this.#kinds[cell];
      pen.fillStyle = index === FREE ? colours.free : colours.tenants[index];
      pen.globalAlpha = index !== FREE && kind === CACHED ? 0.4 : 1;
      pen.fillRect(x, y, CELL, CELL);
      const age = now - this.#changedAt[cell];
      if (age < FLASH_MS && index !== FREE) {
        isFlashing = true;
        pen.globalAlpha = 0.55 * (1 - age / FLASH_MS);
        pen.fillStyle = colours.ink;
        pen.fillRect(x, y, CELL, CELL);
      }
    }
    pen.globalAlpha = 1;
    return isFlashing;
  }
}

/** A block moving from one grid to another. */
class Flight {
  constructor(from, to, startMs, isUp) {
    this.startMs = startMs;
    this.isUp = isUp;
    this.from = somewhere(from);
    this.to = somewhere(to);
  }

  /** Draw the block. Return false when it has arrived. */
  paint(pen, colours, now) {
    const part = (now - this.startMs) / FLIGHT_MS;
    if (part < 0) return true;
    if (part >= 1) return false;
    const eased = part * part * (3 - 2 * part);
    const x = this.from[0] + (this.to[0] - this.from[0]) * eased;
    const y = this.from[1] + (this.to[1] - this.from[1]) * eased;
    pen.globalAlpha = Math.min(1, 4 * part, 4 * (1 - part));
    pen.fillStyle = this.isUp ? colours.up : colours.down;
    pen.fillRect(x, y, CELL, CELL);
    pen.strokeStyle = colours.panel;
    pen.strokeRect(x - 0.5, y - 0.5, CELL + 1, CELL + 1);
    pen.globalAlpha = 1;
    return true;
  }
}

function somewhere(grid) {
  return grid.at(Math.floor(Math.random() * Math.max(1, grid.filled)));
}

function makeKey() {
  const item = element('li');
  item.append(element('i', 'swatch'), element('span'));
  return item;
}

/** Whether a tier that does not exist is worth a word: it could be turned on. */
function isPossible(name, { engine }) {
  if (!engine.device) return name === 'hbm'; // nothing is known yet
  return name !== 'ddr' || engine.device !== 'cpu';
}

function whyMissing(name, latest) {
  if (!latest.tiers.length) return latest.engine.state === 'ready' ? 'nothing told yet' : 'not loaded yet';
  if (name === 'ssd') return latest.disk_state === 'none' ? 'off: --kv-disk-path turns it on' : latest.disk_state;
  return 'off: --kv-host-size turns it on';
}

/** Return the bytes of a tier by tenant, scaled to its total: a shared block counts for each of its tenants. */
function shareOut(tier, palette) {
  const claimed = tier.tenants.reduce((sum, tenant) => sum + tenant.used, 0);
  const scale = claimed > tier.used ? tier.used / claimed : 1;
  const used = [];
  const cached = [];
  let usedLeft = tier.used;
  let cachedLeft = tier.cached;
  for (const tenant of tier.tenants) {
    const index = palette.index(tenant.name) ?? REST;
    used.push({ colour: index, kind: USED, bytes: tenant.used * scale });
    cached.push({ colour: index, kind: CACHED, bytes: tenant.cached });
    usedLeft -= tenant.used * scale;
    cachedLeft -= tenant.cached;
  }
  const order = (one, other) => one.colour - other.colour;
  used.sort(order).push({ colour: REST, kind: USED, bytes: Math.max(0, usedLeft) });
  cached.sort(order).push({ colour: REST, kind: CACHED, bytes: Math.max(0, cachedLeft) });
  return { parts: [...used, ...cached], capacity: tier.capacity };
}

function readColours() {
  const tenants = Array.from({ length: COLOURS }, (_, index) => colour(`tenant-${index}`));
  tenants.push(colour('tenant-rest'));
  return { tenants, free: colour('free'), ink: colour('paper'), up: colour('line-1'), down: colour('line-2'), panel: colour('panel') };
}
