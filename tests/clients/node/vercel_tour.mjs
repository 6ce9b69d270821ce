// Loops of tool calls and objects with Vercel's AI SDK: node vercel_tour.mjs URL KEY MODEL
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, key, name] = process.argv.slice(2);
const server = { baseURL: `${url}/v1`, apiKey: key };
const compatible = createOpenAICompatible({ ...server, name: "tiercel", supportsStructuredOutputs: true, includeUsage: true });
const official = createOpenAI(server);
const anthropic = createAnthropic(server);
const models = {
  compatible: compatible(name),
  chat: official.chat(name),
  responses: official.responses(name),
  messages: anthropic(name),
};
const Place = z.object({ city: z.enum(["Paris", "Rome"]), degrees: z.number().int() });
const tools = {
  getWeather: tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `${city} has 22 degrees`,
  }),
};

async function texts(model) {
  const whole = await generateText({ model, prompt: "Say something.", temperature: 0, maxOutputTokens: 200, maxRetries: 0 });
  assert.ok(whole.text);
  assert.ok(whole.usage.outputTokens > 0);
  const stream = streamText({ model, prompt: "Say something.", temperature: 0, maxOutputTokens: 200, maxRetries: 0 });
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, whole.text);
  assert.equal(await stream.finishReason, "stop");
}

async function objects(model) {
  const prompt = "It has 22 degrees in Rome.";
  const { object } = await generateObject({ model, schema: Place, prompt, maxOutputTokens: 200, maxRetries: 0 });
  assert.ok(Place.parse(object));
  const stream = streamObject({ model, schema: Place, prompt, maxOutputTokens: 200, maxRetries: 0 });
  for await (const part of stream.partialObjectStream) assert.equal(typeof part, "object");
  assert.ok(Place.parse(await stream.object));
}

async function loops(model) {
  const request = { model, tools, prompt: "What is the weather in Rome?", maxOutputTokens: 200, stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText(request);
  assert.equal(whole.steps.length, 2);
  assert.deepEqual(whole.steps[0].toolResults.map((entry) => entry.output), ["Rome has 22 degrees"]);
  assert.match(whole.text, /Rome has 22 degrees/);
  const stream = streamText(request);
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  assert.match(text, /Rome has 22 degrees/);
  const required = await generateText({ ...request, toolChoice: "required", stopWhen: stepCountIs(1) });
  assert.equal(required.toolCalls[0].toolName, "getWeather");
}

async function completions(model) {
  const whole = await generateText({ model, prompt: "Say something.", temperature: 0, maxOutputTokens: 200, maxRetries: 0 });
  assert.ok(whole.usage.outputTokens > 0);
  const stream = streamText({ model, prompt: "Say something.", temperature: 0, maxOutputTokens: 200, maxRetries: 0 });
  let text = "";
  for await (const delta of stream.textStream) text += delta;
  assert.equal(text, whole.text);
}

async function errors(model) {
  for (const temperature of [-1, 0]) {
    const request = { model, prompt: "Say something.", temperature, maxRetries: 0 };
    if (temperature === 0) request.maxOutputTokens = 100_000;
    await assert.rejects(generateText(request), (error) => error.statusCode === 400 && error.message.length > 10);
  }
}

for (const [kind, model] of Object.entries(models)) {
  for (const part of [texts, objects, loops, errors]) {
    await part(model);
    console.log(kind, part.name, "ok");
  }
}
for (const model of [compatible.completionModel(name), official.completion(name)]) await completions(model);
console.log("completions ok");
