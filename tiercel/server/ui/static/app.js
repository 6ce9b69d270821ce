// Connects the parts of the page.

import { Charts } from './charts.js';
import { Chat } from './chat.js';
import { byId, setText } from './dom.js';
import { Feed } from './feed.js';
import * as format from './format.js';
import { History } from './history.js';
import { Keys } from './keys.js';
import { Palette } from './palette.js';
import { Requests } from './requests.js';
import { Standstill } from './standstill.js';
import { Tenants } from './tenants.js';
import { Tiers } from './tiers.js';
import { Vitals } from './vitals.js';

const keys = new Keys();
const palette = new Palette();
const history = new History();
const parts = { charts: new Charts(history), vitals: new Vitals(), tiers: new Tiers(palette), tenants: new Tenants(palette), requests: new Requests(palette) };
const chat = new Chat(keys);
const standstill = new Standstill(parts.charts);
const feed = new Feed(keys, show, complain, (past) => history.begin(past));
let redraws = 0;

function show(snapshot) {
  try {
    draw(snapshot);
  } catch (error) {
    history.clear(); // the next snapshot is drawn without history
    standstill.end();
    setStatus('trouble', 'This page cannot draw what the server tells.');
    throw error;
  }
  redraws += 1;
  document.body.dataset.redraws = String(redraws);
}

function draw(snapshot) {
  standstill.end();
  const before = history.latest;
  if (before && (before.viewer.role !== snapshot.viewer.role || before.viewer.tenant !== snapshot.viewer.tenant)) history.clear();
  history.add(snapshot);
  for (const name of snapshot.tenants.rows.map((row) => row.name).sort()) palette.index(name);
  parts.vitals.draw(history);
  parts.charts.draw();
  parts.tiers.draw(history);
  parts.tenants.draw(history);
  parts.requests.draw(snapshot);
  chat.learn(snapshot);
  showHead(snapshot);
}

function showHead({ engine, viewer, version }) {
  setText(byId('model'), engine.model);
  const facts = engine.device ? `${engine.device}, ${engine.dtype}, context ${format.whole(engine.context_tokens)} tokens` : '';
  const who = viewer.role === 'tenant' ? ` · seen as ${viewer.tenant}` : '';
  setText(byId('model-facts'), `${facts}${who}`);
  setText(byId('version'), `tiercel ${version}`);
  if (engine.is_draining) setStatus('draining', 'shutting down');
  else if (engine.is_stalled) setStatus('trouble', 'no step ends');
  else if (engine.state === 'ready') setStatus('ready', 'serving');
  else if (engine.state === 'restarting') setStatus('waiting', `restarting: ${engine.stage}`);
  else if (engine.state === 'loading') setStatus('waiting', `loading: ${engine.stage}`);
  else setStatus('trouble', 'the engine has stopped');
}

function complain(status, message) {
  if (status !== 401) {
    setStatus('trouble', status ? 'no figures' : 'no answer');
    standstill.begin('dead', message);
    return;
  }
  setStatus('waiting', 'needs a key');
  if (history.latest) standstill.begin('dead', 'The key is no longer accepted.');
  openKeyForm(keys.main ? 'This key is not accepted. Check it, or ask the operator for another one.' : 'This server asks for a key.');
}

function setStatus(state, words) {
  const node = byId('status');
  node.dataset.state = state;
  setText(node, words);
}

function openKeyForm(message) {
  byId('key-form').hidden = false;
  byId('change-key').setAttribute('aria-expanded', 'true');
  setText(byId('key-message'), message);
  byId('key').focus();
}

function closeKeyForm() {
  byId('key-form').hidden = true;
  byId('key').value = '';
  byId('change-key').setAttribute('aria-expanded', 'false');
}

byId('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  keys.main = byId('key').value.trim();
  closeKeyForm();
  history.clear();
  feed.restart();
});
byId('key-form').addEventListener('keydown', (event) => {
  if (event.key !== 'Escape') return;
  closeKeyForm();
  byId('change-key').focus();
});
byId('change-key').addEventListener('click', () => {
  if (byId('key-form').hidden) openKeyForm('');
  else closeKeyForm();
});
byId('pause').addEventListener('click', () => {
  const isPaused = byId('pause').getAttribute('aria-pressed') !== 'true';
  byId('pause').setAttribute('aria-pressed', String(isPaused));
  setText(byId('pause'), isPaused ? 'Go on' : 'Pause');
  feed.pause(isPaused);
  if (!isPaused) return;
  setStatus('waiting', 'paused');
  standstill.begin('paused', 'You paused the page.');
});
feed.start();
