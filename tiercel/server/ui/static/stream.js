// The server-sent events of one answer.

const PATH_CHAT = 'v1/chat/completions';
const PATH_TEXT = 'v1/completions';

/** An error with a message for people. */
export class AnswerError extends Error {}

/**
 * Ask, and yield `{ text, tokens, readMs, usage, reason }` as the answer comes: `tokens` counts up, and pieces that
 * came with one read of the network have the same `readMs`.
 * Throws AnswerError, or AbortError when `signal` says so.
 */
export async function* answerTo({ messages, hasChat, model, mostTokens, temperature, headers, signal }) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const asked = hasChat ? { messages } : { prompt: messages.at(-1).content };
  const body = { model, ...asked, max_tokens: mostTokens, temperature, stream: true, stream_options: options };
  const answer = await fetch(hasChat ? PATH_CHAT : PATH_TEXT, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', ...headers },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw new AnswerError(await complaintOf(answer));
  for await (const [event, readMs] of eventsOf(answer.body)) {
    if (event.error) throw new AnswerError(event.error.message);
    const choice = event.choices?.[0];
    yield {
      text: choice?.delta?.content ?? choice?.text ?? '',
      tokens: event.usage?.completion_tokens ?? 0,
      readMs,
      usage: event.usage ?? null,
      reason: choice?.finish_reason ?? null,
    };
  }
}

async function complaintOf(answer) {
  const body = await answer.json().catch(() => null);
  return body?.error?.message ?? `The server answered ${answer.status}.`;
}

async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    const readMs = performance.now();
    if (done) throw new AnswerError('The connection ended before the answer did.');
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      if (part === 'data: [DONE]') {
        await reader.cancel();
        return;
      }
      if (part.startsWith('data: ')) yield [JSON.parse(part.slice(6)), readMs];
    }
  }
}
