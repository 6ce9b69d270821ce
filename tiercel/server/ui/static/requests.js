// Running and waiting requests with their state.

import { byId, element, fit, setText } from './dom.js';
import * as format from './format.js';

const WORDS = {
  waiting: 'waiting',
  restoring: 'restoring',
  prefill: 'prompt',
  decode: 'answer',
  draining: 'giving way',
  preempted: 'preempted',
};

/** The table of requests. */
export class Requests {
  #palette;
  #body = byId('requests');

  constructor(palette) {
    this.#palette = palette;
  }

  draw({ requests }) {
    const lines = fit(this.#body, requests.rows.length, makeRow);
    requests.rows.forEach((row, place) => this.#write(lines[place], row));
    const hidden = requests.running + requests.waiting - requests.rows.length;
    setText(byId('requests-rest'), hidden > 0 ? `and ${format.whole(hidden)} more` : requests.rows.length ? '' : 'No request is open.');
    setText(byId('requests-note'), `${format.whole(requests.running)} generating, ${format.whole(requests.waiting)} waiting for a first token`);
  }

  #write(line, row) {
    const [state, tenant, progress, age, first, gap] = line.children;
    const chip = state.firstElementChild;
    chip.className = `chip ${row.state}`;
    setText(chip, WORDS[row.state] ?? row.state);
    line.title = `sequence ${row.seq}${row.preemptions ? `, preempted ${row.preemptions} times` : ''}`;
    line.dataset.seq = row.seq;
    const [swatch, name] = tenant.children;
    swatch.className = `swatch ${this.#palette.className(row.tenant)}`;
    setText(name, row.tenant);
    name.title = row.tenant;
    const [track, words] = progress.children;
    const [prompt, answer] = track.children;
    const total = row.prompt_tokens + row.most_outputs;
    const computed = row.output_tokens ? row.prompt_tokens : Math.min(row.computed_tokens ?? 0, row.prompt_tokens);
    prompt.style.width = `${(100 * computed / total).toFixed(1)}%`;
    answer.style.width = `${(100 * row.output_tokens / total).toFixed(1)}%`;
    const done = row.output_tokens ? `${format.whole(row.output_tokens)} of ${format.compact(row.most_outputs)}` : `${format.whole(computed)} of ${format.compact(row.prompt_tokens)}`;
    setText(words, done);
    setText(age, format.age(row.age_s));
    setText(first, format.seconds(row.ttft_s));
    setText(gap, format.seconds(row.gap_s));
  }
}

function makeRow() {
  const row = element('tr');
  const state = element('td');
  state.append(element('span', 'chip'));
  const tenant = element('td', 'tenant-cell');
  tenant.append(element('i', 'swatch'), element('span', 'name'));
  const progress = element('td', 'progress-column');
  const track = element('div', 'track');
  track.append(element('div', 'fill prompt-part'), element('div', 'fill answer-part'));
  progress.append(track, element('span', 'words'));
  row.append(state, tenant, progress, element('td', 'number'), element('td', 'number wide'), element('td', 'number wide'));
  return row;
}
