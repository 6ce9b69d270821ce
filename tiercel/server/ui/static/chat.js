// The chat: a streamed conversation and the times of its tokens.

import { byId, element, setText } from './dom.js';
import { AnswerError, answerTo } from './stream.js';
import { Timeline } from './timeline.js';

const MAX_MESSAGES = 24; // kept and sent again
const ENDS = { stop: '', length: 'It was cut at the limit of tokens.', tool_calls: '' };

/** The conversation and its form. */
export class Chat {
  #keys;
  #timeline = new Timeline();
  #messages = [];
  #stopper = null;
  #facts = { model: '', hasChat: true, needsKey: false };
  #log = byId('log');

  constructor(keys) {
    this.#keys = keys;
    byId('chat-key').value = keys.chat;
    byId('chat-form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.#send();
    });
    byId('prompt').addEventListener('keydown', (event) => {
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    byId('stop').addEventListener('click', () => this.#stopper?.abort());
    byId('clear').addEventListener('click', () => this.clear());
    byId('chat-key').addEventListener('change', () => {
      this.#keys.chat = byId('chat-key').value.trim();
    });
    this.clear();
  }

  /** Apply the newest snapshot. */
  learn({ engine, viewer }) {
    this.#facts = { model: engine.model, hasChat: viewer.has_chat, needsKey: viewer.tenant == null };
    byId('chat-key-label').hidden = !this.#facts.needsKey;
    const note = this.#facts.needsKey
      ? 'The admin key makes no requests: the chat needs a tenant\'s key.'
      : viewer.has_chat ? '' : 'This model has no chat template: it continues your text.';
    setText(byId('chat-note'), note);
  }

  clear() {
    this.#stopper?.abort();
    this.#messages = [];
    this.#log.replaceChildren(element('p', 'muted empty', 'Nothing said yet.'));
    this.#timeline.clear();
  }

  async #send() {
    const box = byId('prompt');
    const content = box.value.trim();
    if (!content || this.#stopper) return;
    box.value = '';
    const messages = this.#messages;
    messages.push({ role: 'user', content });
    this.#log.querySelector('.empty')?.remove();
    this.#say('user', content);
    const bubble = this.#say('assistant', '');
    bubble.classList.add('is-coming');
    this.#setBusy(new AbortController());
    const { heard, usage, reason } = await this.#listen(bubble);
    bubble.classList.remove('is-coming');
    this.#setBusy(null);
    if (messages !== this.#messages) return; // the conversation was cleared meanwhile
    this.#timeline.end(usage, reason);
    if (heard) messages.push({ role: 'assistant', content: heard });
    else messages.pop();
    messages.splice(0, Math.max(0, messages.length - MAX_MESSAGES));
    while (this.#log.childElementCount > 2 * MAX_MESSAGES) this.#log.firstElementChild.remove();
  }

  /** Write the answer while it is streamed. Return it with the usage that the server reported. */
  async #listen(bubble) {
    let tokens = 0;
    let usage = null;
    let reason = '';
    this.#timeline.start(performance.now());
    try {
      for await (const piece of answerTo(this.#question())) {
        if (piece.tokens > tokens) {
          this.#timeline.add(piece.tokens - tokens, piece.readMs);
          tokens = piece.tokens;
        }
        if (piece.text) this.#append(bubble, piece.text);
        usage = piece.usage ?? usage;
        reason = ENDS[piece.reason] ?? reason;
      }
    } catch (error) {
      reason = this.#explain(error, bubble);
    }
    return { heard: bubble.textContent, usage, reason };
  }

  #question() {
    return {
      messages: this.#messages,
      hasChat: this.#facts.hasChat,
      model: this.#facts.model || undefined,
      mostTokens: clamp(byId('most-tokens').valueAsNumber, 1, 1024, 128),
      temperature: clamp(byId('temperature').valueAsNumber, 0, 2, 0.7),
      headers: this.#keys.headers(this.#facts.needsKey ? this.#keys.chat : this.#keys.main),
      signal: this.#stopper.signal,
    };
  }

  #explain(error, bubble) {
    if (error.name === 'AbortError') return 'You stopped it.';
    if (!(error instanceof AnswerError || error instanceof TypeError)) throw error;
    const words = error instanceof AnswerError ? error.message : 'No answer from the server.';
    const note = element('p', 'trouble', words);
    note.setAttribute('role', 'alert');
    bubble.after(note);
    if (!bubble.textContent) bubble.remove();
    return words;
  }

  #say(role, text) {
    const bubble = element('p', `said ${role}`, text);
    this.#log.append(bubble);
    this.#log.scrollTop = this.#log.scrollHeight;
    return bubble;
  }

  #append(bubble, text) {
    const isAtEnd = this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 40;
    bubble.append(text);
    bubble.normalize();
    if (isAtEnd) this.#log.scrollTop = this.#log.scrollHeight;
  }

  #setBusy(stopper) {
    this.#stopper = stopper;
    byId('send').disabled = stopper !== null;
    byId('stop').disabled = stopper === null;
  }
}

function clamp(value, low, high, otherwise) {
  return Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : otherwise;
}
