// Three charts over the last ten minutes, with one crosshair for all.

import { byId, colour, element, onScheme, setText } from './dom.js';
import * as format from './format.js';
import { WINDOW_S } from './history.js';

const { uPlot } = window;
const HEIGHT = 168;
const LEAST_WINDOW_S = 60;
const MINUTES_FROM_S = 200; // a longer window is labelled in minutes
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const FONT = '11px system-ui, sans-serif';

// A legend entry names one line, or a median and its 95th percentile.
const CHARTS = [
  {
    id: 'chart-tokens', say: format.rate, unit: ' tokens/s', least: 100,
    lines: [['output', 'line-1', true], ['prompt', 'line-2', false]],
    legend: [['Output', ['output'], 'line-1'], ['Prompts', ['prompt'], 'line-2']],
  },
  {
    id: 'chart-latency', say: format.seconds, unit: '', least: 0.1,
    lines: [['ttft95', 'line-1', false], ['ttft50', 'line-1-soft', false], ['gap95', 'line-2', false], ['gap50', 'line-2-soft', false]],
    legend: [['First token', ['ttft50', 'ttft95'], 'line-1'], ['Gap', ['gap50', 'gap95'], 'line-2']],
  },
  {
    id: 'chart-queue', say: format.whole, unit: '', least: 4, isWhole: true,
    lines: [['running', 'line-1', true], ['waiting', 'line-2', false], ['preempted', 'line-3', false]],
    legend: [['Running', ['running'], 'line-1'], ['Waiting', ['waiting'], 'line-2'], ['Preempted', ['preempted'], 'line-3']],
  },
];

/** The charts of the page. */
export class Charts {
  #charts;

  constructor(history) {
    this.#charts = CHARTS.map((spec) => new Chart(spec, history));
    onScheme(() => this.#charts.forEach((chart) => chart.paintAgain()));
  }

  draw() {
    this.#charts.forEach((chart) => chart.draw());
  }

  /** Write at the end of the axis when the newest point was, or `now` if the page follows the server. */
  end(word) {
    this.#charts.forEach((chart) => chart.end(word));
  }
}

class Chart {
  #spec;
  #history;
  #plot;
  #values = [];
  #place;
  #saidAt = 0;
  #end = 'now';

  constructor(spec, history) {
    this.#spec = spec;
    this.#history = history;
    const figure = byId(spec.id);
    this.#place = figure.querySelector('.plot');
    this.#makeLegend(figure.querySelector('.legend'));
    this.#plot = new uPlot(this.#options(), this.#data(), this.#place);
    new ResizeObserver(() => this.#resize()).observe(this.#place);
    this.draw();
  }

  draw() {
    this.#plot.setData(this.#data(), false);
    const now = this.#history.times.at(-1) ?? 0;
    const shown = Math.min(WINDOW_S, Math.max(LEAST_WINDOW_S, now - (this.#history.times[0] ?? now)));
    this.#plot.setScale('x', { min: now - shown, max: now });
    this.#place.dataset.points = String(this.#history.times.length);
    if (this.#plot.cursor.idx == null) this.#show(this.#history.times.length - 1);
    if (now - this.#saidAt > 10) this.#describe(now);
  }

  end(word) {
    if (word === this.#end) return;
    this.#end = word;
    this.#place.dataset.end = word; // for programs that read the page
    this.paintAgain();
  }

  paintAgain() {
    this.#plot.redraw(false, true);
  }

  #data() {
    return [this.#history.times, ...this.#spec.lines.map(([name]) => this.#history.series[name])];
  }

  #resize() {
    const width = Math.floor(this.#place.clientWidth);
    if (width > 0 && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }

  #makeLegend(list) {
    for (const [label, , line] of this.#spec.legend) {
      const item = element('li');
      const mark = element('i', `swatch ${line}`);
      const value = element('b');
      item.append(mark, element('span', '', label), value);
      list.append(item);
      this.#values.push(value);
    }
  }

  /** Write the values of one moment beside their names. */
  #show(index) {
    this.#spec.legend.forEach(([, names], item) => setText(this.#values[item], this.#words(names, index)));
  }

  /** Format one value, or two with a common unit: 15 / 53 ms. */
  #words(names, index) {
    const said = names.map((name) => this.#spec.say(this.#history.series[name][index] ?? null));
    const unit = said.at(-1).split(' ')[1];
    return said.map((word, place) => (place < said.length - 1 && word.endsWith(` ${unit}`) ? word.split(' ')[0] : word)).join(' / ');
  }

  /** Describe the chart in words for screen readers, seldom enough to be read. */
  #describe(now) {
    this.#saidAt = now;
    const index = this.#history.times.length - 1;
    const words = this.#spec.legend.map(([label, names]) => `${label} ${this.#words(names, index)}`);
    this.#place.setAttribute('aria-label', `${words.join(', ')}${this.#spec.unit}`);
  }

  #options() {
    const grid = { stroke: () => colour('hairline'), width: 1 };
    const axis = { stroke: () => colour('muted'), font: FONT, ticks: { show: false }, grid };
    return {
      width: Math.max(200, Math.floor(this.#place.clientWidth)),
      height: HEIGHT,
      padding: [10, 26, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: 'all' }, drag: { x: false, y: false }, y: false,
        points: { size: 6 },
      },
      scales: { x: { time: false }, y: { range: (_plot, _low, high) => [0, high > 0 ? high * 1.12 : this.#spec.least] } },
      axes: [
        {
          ...axis, size: 24, grid: { show: false },
          splits: (_plot, _axis, low, high) => moments(low, high),
          values: (plot, splits) => splits.map((at) => ago(plot.scales.x.max - at, plot.scales.x.max - plot.scales.x.min, this.#end)),
        },
        { ...axis, size: 50, space: 34, ...(this.#spec.isWhole ? { incrs: WHOLE_STEPS } : {}), values: (_plot, splits) => splits.map((value) => (value ? this.#spec.say(value) : '0')) },
      ],
      series: [
        {},
        ...this.#spec.lines.map(([, line, isFilled]) => ({
          stroke: () => colour(line),
          width: 1.4,
          points: { show: false },
          spanGaps: false,
          ...(isFilled ? { fill: () => colour(`${line}-fill`) } : {}),
        })),
      ],
      hooks: { setCursor: [(plot) => this.#show(plot.cursor.idx ?? this.#history.times.length - 1)] },
    };
  }
}

/** Ticks at full steps back from now: in seconds at first, in minutes for a longer window. */
function moments(low, high) {
  const step = high - low > 2 * MINUTES_FROM_S ? 120 : high - low > MINUTES_FROM_S ? 60 : high - low > 100 ? 30 : 15;
  const count = Math.floor((high - low) / step);
  return Array.from({ length: count + 1 }, (_, place) => high - (count - place) * step);
}

function ago(seconds, windowS, end) {
  const rounded = Math.round(seconds);
  if (rounded === 0) return end;
  return windowS > MINUTES_FROM_S ? `−${rounded / 60} min` : `−${rounded} s`;
}
