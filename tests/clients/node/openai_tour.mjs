// A tour of the API with OpenAI's client for node: node openai_tour.mjs URL KEY MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, key, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const Place = z.object({ city: z.enum(["Paris", "Rome"]), isCertain: z.boolean() });

async function chat() {
  const request = { model, messages, max_tokens: 12, temperature: 0 };
  const whole = await client.chat.completions.create(request);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...request, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert.equal(text, whole.choices[0].message.content);
}

async function objects() {
  const answer = await client.chat.completions.parse({
    model, messages, max_tokens: 100, response_format: zodResponseFormat(Place, "place"),
  });
  assert.ok(Place.parse(answer.choices[0].message.parsed));
}

async function tools() {
  const request = {
    model, messages, max_tokens: 100, temperature: 0, tool_choice: "required", parallel_tool_calls: false,
    tools: [zodFunction({ name: "getWeather", description: "The weather", parameters: Place })],
  };
  const answer = await client.chat.completions.parse(request);
  const [call, ...more] = answer.choices[0].message.tool_calls;
  assert.equal(more.length, 0);
  assert.ok(Place.parse(call.function.parsed_arguments));
  const stream = client.chat.completions.stream(request);
  const streamed = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
  assert.equal(streamed[0].function.arguments, call.function.arguments);
  const history = [
    ...messages,
    { role: "assistant", tool_calls: [{ id: call.id, type: "function", function: { name: "getWeather", arguments: call.function.arguments } }] },
    { role: "tool", tool_call_id: call.id, content: "22 degrees" },
  ];
  const told = await client.chat.completions.create({ model, messages: history, max_tokens: 8 });
  assert.equal(told.choices[0].message.role, "assistant");
}

async function others() {
  assert.deepEqual((await client.models.list()).data.map((entry) => entry.id), [model]);
  const text = await client.completions.create({ model, prompt: "One, two,", max_tokens: 6 });
  assert.ok(text.choices[0].text);
  const vectors = await client.embeddings.create({ model, input: ["one", "two"] });
  assert.equal(vectors.data.length, 2);
  assert.ok(Math.abs(vectors.data[0].embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-3);
  const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 12, temperature: 0 });
  assert.ok(response.output_text);
  const kinds = [];
  for await (const event of await client.responses.create({ model, input: "Hello", max_output_tokens: 8, stream: true })) {
    kinds.push(event.type);
  }
  assert.equal(kinds[0], "response.created");
  assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);
  assert.equal((await client.responses.retrieve(response.id)).output_text, response.output_text);
}

async function errors() {
  const refused = client.chat.completions.create({ model, messages, temperature: -1 });
  await assert.rejects(refused, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  const wrong = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(wrong.models.list(), OpenAI.AuthenticationError);
}

for (const part of [chat, objects, tools, others, errors]) {
  await part();
  console.log(part.name, "ok");
}
