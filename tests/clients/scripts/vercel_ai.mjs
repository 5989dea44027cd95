// The Vercel AI SDK: its OpenAI-compatible provider, and its OpenAI one on both APIs.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  Output,
  cosineSimilarity,
  embedMany,
  generateObject,
  generateText,
  isStepCount,
  streamObject,
  streamText,
  tool,
} from "ai";
import { z } from "zod";

import { EMBEDDER, KEY, MODEL, URL, collected, equal, expect, refusal, run } from "./checks.mjs";

// The SDK warns on the console of settings that a model does not take.
globalThis.AI_SDK_LOG_WARNINGS = false;

const compatible = createOpenAICompatible({
  name: "seedance",
  baseURL: URL,
  apiKey: KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI({ baseURL: URL, apiKey: KEY });
const models = {
  "openai-compatible": compatible(MODEL),
  "openai.chat()": openai.chat(MODEL),
  "openai() on /v1/responses": openai(MODEL),
};
// Nothing is kept here, so that the client sends what it would otherwise refer to.
const settings = { maxRetries: 0, providerOptions: { openai: { store: false } } };
const schema = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });

/** A part that tries each model. */
function each(part) {
  return async () => {
    for (const [name, model] of Object.entries(models)) {
      try {
        await part(model);
      } catch (error) {
        error.message = `${name}: ${error.message}`;
        throw error;
      }
    }
  };
}

async function text(model) {
  const answer = await generateText({
    ...settings,
    model,
    instructions: "Be brief.",
    prompt: "What is the capital of France?",
    maxOutputTokens: 24,
    temperature: 0,
  });
  expect(answer.text, "a text", answer.response.body);
  expect(["stop", "length"].includes(answer.finishReason), "a finish reason", answer.finishReason);
  expect(answer.usage.outputTokens > 0 && answer.usage.inputTokens > 0, "usage", answer.usage);
  const again = await generateText({
    ...settings,
    model,
    messages: [
      { role: "user", content: "What is the capital of France?" },
      ...answer.response.messages,
      { role: "user", content: [{ type: "text", text: "And of Italy?" }] },
    ],
    maxOutputTokens: 24,
  });
  expect(again.text, "a text in the second turn", again.response.body);
}

async function stream(model) {
  const errors = [];
  const answer = streamText({
    ...settings,
    model,
    prompt: "What is the capital of France?",
    maxOutputTokens: 24,
    temperature: 0,
    onError: ({ error }) => errors.push(String(error)),
  });
  const pieces = await collected(answer.textStream);
  equal(errors, [], "errors");
  expect(pieces.length > 3, "pieces", pieces);
  equal(await answer.text, pieces.join(""), "the text of the pieces");
  expect((await answer.usage).outputTokens > 0, "usage", await answer.usage);
  expect(["stop", "length"].includes(await answer.finishReason), "a finish reason", null);
}

async function leaving(model) {
  const left = new AbortController();
  const answer = streamText({
    ...settings,
    model,
    prompt: "Write a very long story.",
    maxOutputTokens: 2000,
    abortSignal: left.signal,
  });
  for await (const _ of answer.textStream) left.abort();
  await text(model);
}

async function object(model) {
  const fields = { ...settings, model, prompt: "Ann is 30.", maxOutputTokens: 100 };
  const answer = await generateObject({ ...fields, schema });
  expect(schema.safeParse(answer.object).success, "a person", answer.object);
  const streamed = streamObject({ ...fields, schema });
  const partial = await collected(streamed.partialObjectStream);
  expect(partial.length > 1, "a person that grows", partial);
  expect(schema.safeParse(await streamed.object).success, "a person at the end", partial.at(-1));
  const { output } = await generateText({ ...fields, output: Output.object({ schema }) });
  expect(schema.safeParse(output).success, "a person by Output.object", output);
}

const asked = [];
const tools = {
  weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => {
      asked.push(city);
      return { city, sky: "clear" };
    },
  }),
};
const calling = {
  ...settings,
  tools,
  prompt: "What is the weather in Rome?",
  maxOutputTokens: 60,
  stopWhen: isStepCount(2),
  prepareStep: ({ stepNumber }) => ({
    toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none",
  }),
};

async function toolSteps(model) {
  asked.length = 0;
  const answer = await generateText({ ...calling, model });
  equal(asked.length, 1, "calls of the function");
  equal(answer.steps.length, 2, "steps");
  equal(answer.steps[0].finishReason, "tool-calls", "the first step's reason");
  expect(answer.text, "a text behind the result", answer.steps);
}

async function streamedToolSteps(model) {
  asked.length = 0;
  const errors = [];
  const onError = ({ error }) => errors.push(String(error));
  const answer = streamText({ ...calling, model, onError });
  const parts = await collected(answer.fullStream);
  equal(errors, [], "errors");
  const kinds = new Set(parts.map((part) => part.type));
  for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) {
    expect(kinds.has(kind), kind, [...kinds]);
  }
  equal(asked.length, 1, "calls of the function");
  expect(await answer.text, "a text behind the result", [...kinds]);
}

async function referring() {
  const model = openai(MODEL);
  const fields = { model, maxRetries: 0, maxOutputTokens: 16 };
  const first = await generateText({ ...fields, prompt: "Say hi." });
  const messages = [
    { role: "user", content: "Say hi." },
    ...first.response.messages,
    { role: "user", content: "And bye?" },
  ];
  const error = await refusal(() => generateText({ ...fields, messages }));
  equal(error.statusCode, 400, "a status");
  expect(/store: false/.test(error.message), "what to ask for in the message", error.message);
}

async function embeddings() {
  const values = ["The cat sleeps.", "A cat is asleep.", "Interest rates rose."];
  for (const model of [compatible.embeddingModel(EMBEDDER), openai.embeddingModel(EMBEDDER)]) {
    const { embeddings: found } = await embedMany({ model, values, maxRetries: 0 });
    const [cat, sleeping, rates] = found;
    const [near, far] = [cosineSimilarity(cat, sleeping), cosineSimilarity(cat, rates)];
    expect(near > far, "meaning", [near, far]);
  }
}

async function completion() {
  const model = compatible.completionModel(MODEL);
  const answer = await generateText({ ...settings, model, prompt: "One", maxOutputTokens: 8 });
  expect(answer.text, "a text", answer);
}

async function errors(model) {
  const fields = { ...settings, model, prompt: "Hi.", maxOutputTokens: 4 };
  const wrong = await refusal(() => generateText({ ...fields, temperature: 9 }));
  equal(wrong.statusCode, 400, "a status");
  const nobody = createOpenAI({ baseURL: URL, apiKey: "sk-nobody" });
  const refused = await refusal(() => generateText({ ...fields, model: nobody.chat(MODEL) }));
  equal(refused.statusCode, 401, "a status");
}

await run(
  ["ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai"],
  [
    ["generateText over two turns", each(text)],
    ["streamText", each(stream)],
    ["abortSignal", each(leaving)],
    ["generateObject, streamObject, Output.object", each(object)],
    ["tools in two steps", each(toolSteps)],
    ["streamed tools in two steps", each(streamedToolSteps)],
    ["refusal of what would be stored", referring],
    ["embedMany", embeddings],
    ["completionModel", completion],
    ["errors", each(errors)],
  ],
);
