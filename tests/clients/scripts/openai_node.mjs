// The official JavaScript client.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ResponsesWS } from "openai/resources/responses/ws";
import { z } from "zod";

import {
  EMBEDDER,
  KEY,
  MODEL,
  PATIENCE_MS,
  PERSON,
  URL,
  WEATHER,
  collected,
  equal,
  expect,
  refusal,
  run,
} from "./checks.mjs";

const options = { baseURL: URL, apiKey: KEY, timeout: PATIENCE_MS, maxRetries: 0 };
const client = new OpenAI(options);
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = { model: MODEL, messages, max_completion_tokens: 24, temperature: 0 };
const fresh = { ...ask, cache: "bypass" };
const tools = [{ type: "function", function: { name: "weather", parameters: WEATHER } }];
const named = { type: "function", function: { name: "weather" } };
const flatTools = [{ type: "function", name: "weather", parameters: WEATHER, strict: true }];
const Person = z.object({ name: z.string().max(12), age: z.number().int().min(0).max(120) });

async function chat() {
  const { data, response } = await client.chat.completions.create(fresh).withResponse();
  expect(response.headers.get("x-request-id"), "an x-request-id", null);
  expect(data.choices[0].message.content, "a text", data);
  expect(["stop", "length"].includes(data.choices[0].finish_reason), "a finish reason", data);
  equal(data.usage.total_tokens, data.usage.prompt_tokens + data.usage.completion_tokens, "a sum");
}

async function stream() {
  const whole = await client.chat.completions.create(fresh);
  const chunks = await collected(
    await client.chat.completions.create({
      ...fresh,
      stream: true,
      stream_options: { include_usage: true },
    }),
  );
  equal(chunks[0].choices[0].delta.role, "assistant", "the role first");
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  equal(text, whole.choices[0].message.content, "the text of the whole answer");
  expect(chunks.at(-1).usage.completion_tokens > 0, "usage at the end", chunks.at(-1));
}

async function streamHelper() {
  const runner = client.chat.completions.stream({ ...ask, max_completion_tokens: 300 });
  let text = "";
  runner.on("content", (delta) => (text += delta));
  const final = await runner.finalChatCompletion();
  expect(text && text === final.choices[0].message.content, "the text of its events", text);
}

async function leaving() {
  const chunks = await client.chat.completions.create({
    ...ask,
    stream: true,
    max_completion_tokens: 2000,
    ignore_eos: true,
  });
  for await (const chunk of chunks) if (chunk.choices[0].delta.content) break;
  await chat();
}

async function choices() {
  const answer = await client.chat.completions.create({
    ...ask,
    n: 2,
    temperature: 1.5,
    seed: 7,
    stop: ["#"],
    logprobs: true,
    top_logprobs: 2,
  });
  equal(answer.choices.map((choice) => choice.index), [0, 1], "two choices");
  const { content } = answer.choices[0].logprobs;
  expect(content.every((entry) => entry.top_logprobs.length === 2), "2 alternatives", content);
  const text = (seed) => client.chat.completions.create({ ...fresh, temperature: 1.2, seed });
  const [one, other] = [await text(5), await text(5)];
  equal(other.choices[0].message.content, one.choices[0].message.content, "the seed's text");
}

async function structured() {
  const parsed = await client.chat.completions.parse({
    ...ask,
    max_completion_tokens: 100,
    response_format: zodResponseFormat(Person, "person"),
  });
  expect(Person.safeParse(parsed.choices[0].message.parsed).success, "a person", parsed);
  const answer = await client.chat.completions.create({
    ...ask,
    max_completion_tokens: 100,
    response_format: {
      type: "json_schema",
      json_schema: { name: "person", strict: true, schema: PERSON },
    },
  });
  const told = JSON.parse(answer.choices[0].message.content);
  equal(Object.keys(told).sort(), ["age", "name"], "both properties");
}

async function toolCalls() {
  const fields = { ...ask, max_completion_tokens: 60, tools, tool_choice: named };
  const answer = (await client.chat.completions.create(fields)).choices[0];
  const [call] = answer.message.tool_calls;
  equal(Object.keys(JSON.parse(call.function.arguments)).sort(), ["city", "days"], "arguments");
  equal(answer.finish_reason, "tool_calls", "the reason");
  const chunks = await collected(await client.chat.completions.create({ ...fields, stream: true }));
  const calls = chunks.flatMap((chunk) => chunk.choices[0]?.delta.tool_calls ?? []);
  const text = calls.map((piece) => piece.function.arguments ?? "").join("");
  equal(Object.keys(JSON.parse(text)).sort(), ["city", "days"], "streamed arguments");
  expect(calls.length > 2, "arguments in pieces", calls);
  const after = await client.chat.completions.create({
    ...ask,
    tools,
    tool_choice: "none",
    messages: [
      ...messages,
      answer.message,
      { role: "tool", tool_call_id: call.id, content: "clear" },
    ],
  });
  expect(after.choices[0].message.content, "a text behind a tool's result", after);
}

async function runTools() {
  const asked = [];
  const runner = client.chat.completions.runTools({
    ...ask,
    max_completion_tokens: 60,
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          description: "The weather.",
          parameters: WEATHER,
          parse: JSON.parse,
          function: (given) => {
            asked.push(given.city);
            return "clear";
          },
        },
      },
    ],
    tool_choice: named,
  });
  await runner.done();
  expect(asked.length === 1, "one call of the function", asked);
}

async function completions() {
  const answer = await client.completions.create({
    model: MODEL,
    prompt: ["One two", "A B"],
    max_tokens: 8,
    logprobs: 1,
  });
  equal(answer.choices.map((choice) => choice.index), [0, 1], "two choices");
  const chunks = await collected(
    await client.completions.create({ model: MODEL, prompt: "One", max_tokens: 8, stream: true }),
  );
  expect(chunks.at(-1).choices[0].finish_reason, "a finish reason", chunks.at(-1));
}

async function conversation() {
  const turns = [{ role: "user", content: "Tell me about the sea, slowly. ".repeat(12) }];
  const cached = [];
  for (let turn = 0; turn < 2; turn += 1) {
    const answer = await client.chat.completions.create({ ...fresh, messages: turns });
    cached.push(answer.usage.prompt_tokens_details.cached_tokens);
    turns.push(answer.choices[0].message, { role: "user", content: "Go on." });
  }
  expect(cached[1] > 0, "cached tokens in the second turn", cached);
}

async function responses() {
  const fields = { model: MODEL, input: "Say hi.", max_output_tokens: 24 };
  const answer = await client.responses.create(fields);
  expect(answer.output_text, "a text", answer);
  const later = await client.responses.create({
    ...fields,
    input: [
      { role: "user", content: "Say hi." },
      ...answer.output,
      { role: "user", content: "And bye?" },
    ],
  });
  expect(later.output_text, "a text behind its own output", later);
  const parsed = await client.responses.parse({
    ...fields,
    max_output_tokens: 100,
    text: { format: zodTextFormat(Person, "person") },
  });
  expect(Person.safeParse(parsed.output_parsed).success, "a person", parsed);
  const called = await client.responses.create({
    ...fields,
    max_output_tokens: 60,
    tools: flatTools,
    tool_choice: { type: "function", name: "weather" },
  });
  equal(called.output[0].type, "function_call", "a call");
}

async function responsesStream() {
  const fields = { model: MODEL, input: "Say hi.", max_output_tokens: 24 };
  const events = await collected(await client.responses.create({ ...fields, stream: true }));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  const { response } = events.at(-1);
  const text = deltas.map((event) => event.delta).join("");
  expect(text, "a text", events.at(-1));
  equal(response.output[0].content[0].text, text, "the text of the deltas");
  const helper = client.responses.stream({ ...fields, max_output_tokens: 300, temperature: 0 });
  expect((await helper.finalResponse()).output_text, "a text from the helper", null);
}

async function webSocket() {
  const socket = new ResponsesWS(client);
  const lanes = { left: [], right: [] };
  const order = [];
  let numLeft = 2;
  for (const lane of Object.keys(lanes)) {
    socket.send({
      type: "response.create",
      model: MODEL,
      input: `Write a story about a ${lane} hand.`,
      max_output_tokens: 40,
      stream_id: lane,
    });
  }
  for await (const { type, message, error } of socket.stream()) {
    expect(type !== "error", "no error", String(error));
    if (type !== "message") continue;
    lanes[message.stream_id].push(message);
    order.push(message.stream_id);
    if (["response.completed", "response.incomplete"].includes(message.type)) numLeft -= 1;
    if (numLeft === 0) break;
  }
  socket.close();
  for (const events of Object.values(lanes)) {
    equal(events.map((event) => event.sequence_number), [...events.keys()], "numbers");
  }
  const switches = order.filter((lane, at) => at > 0 && lane !== order[at - 1]).length;
  expect(switches > 10, "two interleaved lanes", order);
}

async function embeddings() {
  const input = ["The cat sleeps.", "A cat is asleep.", "Interest rates rose."];
  const answer = await client.embeddings.create({ model: EMBEDDER, input });
  const [cat, sleeping, rates] = answer.data.map((entry) => entry.embedding);
  const dot = (a, b) => a.reduce((sum, x, at) => sum + x * b[at], 0);
  expect(dot(cat, sleeping) > dot(cat, rates), "meaning", dot(cat, sleeping));
}

async function models() {
  equal((await collected(client.models.list())).map((model) => model.id), [MODEL], "the models");
  equal((await client.models.retrieve(EMBEDDER)).id, EMBEDDER, "the embedder");
}

async function errors() {
  const wrong = await refusal(() => client.chat.completions.create({ ...ask, temperature: 9 }));
  expect(wrong instanceof OpenAI.BadRequestError && wrong.param === "temperature", "400", wrong);
  const unknown = await refusal(() => client.chat.completions.create({ ...ask, model: "none" }));
  expect(unknown instanceof OpenAI.NotFoundError, "404", unknown);
  const stranger = new OpenAI({ ...options, apiKey: "sk-nobody" });
  const refused = await refusal(() => stranger.chat.completions.create(ask));
  expect(refused instanceof OpenAI.AuthenticationError, "401", refused);
}

await run(
  ["openai"],
  [
    ["chat", chat],
    ["streaming", stream],
    ["stream helper", streamHelper],
    ["leaving in mid-stream", leaving],
    ["n, stop, seed, logprobs", choices],
    ["structured output", structured],
    ["tools, streamed arguments", toolCalls],
    ["runTools", runTools],
    ["completions", completions],
    ["cached tokens over turns", conversation],
    ["responses", responses],
    ["responses: streaming", responsesStream],
    ["responses: WebSocket, two lanes", webSocket],
    ["embeddings", embeddings],
    ["models", models],
    ["errors", errors],
  ],
);
