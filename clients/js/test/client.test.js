import assert from "node:assert/strict";
import { test } from "node:test";

import { ConnectionLost, SeedanceClient, SeedanceError } from "../seedance.js";
import { clientOf, HELLO, settle, streaming } from "./fakes.js";

test("a request goes out as the protocol has it, and its answer comes back", async () => {
  const { client, sockets } = clientOf();
  const stream = client.stream("hi", { max_tokens: 5 });
  const deltas = (async () => {
    const all = [];
    for await (const delta of stream) all.push(delta);
    return all;
  })();
  await settle();
  const [socket] = sockets;
  assert.equal(socket.url, "ws://host:8000/v1/infer");
  assert.deepEqual(socket.protocols, ["seedance.v1.json"]);
  socket.greet();
  assert.deepEqual(socket.received, [{
    type: "INFER_REQ", id: "r1", messages: [{ role: "user", content: "hi" }], window: 256, anchor: "none", max_tokens: 5,
  }]);
  socket.ack("r1", { queue_position: 2, cache: { outcome: "exact" } });
  socket.chunk("r1", 0, "one ", { token_ids: [7] });
  socket.chunk("r1", 2, "two");
  socket.done("r1", 3);
  assert.deepEqual(await deltas, [
    { text: "one ", seq: 0, tokenIds: [7], logprobs: undefined },
    { text: "two", seq: 2, tokenIds: undefined, logprobs: undefined },
  ]);
  assert.equal(stream.queuePosition, 2);
  assert.equal(stream.cache.outcome, "exact");
  assert.equal(stream.done.finishReason, "stop");
  assert.equal(stream.done.usage.completion_tokens, 3);
});

test("an address may have a prefix, the API's own path, or no scheme", () => {
  for (const [given, expected] of [
    ["https://host/apps/x/", "wss://host/apps/x/v1/infer"],
    ["http://host/v1", "ws://host/v1/infer"],
    ["ws://host/v1/infer", "ws://host/v1/infer"],
    ["host:80", "ws://host/v1/infer"],
  ]) assert.equal(clientOf({}, given).client.url.href, expected);
});

test("a runtime without a WebSocket is told so", () => {
  assert.throws(() => new SeedanceClient("http://host", { WebSocket: null }), /no WebSocket/);
});

test("what JSON cannot carry is refused here", () => {
  const { client } = clientOf();
  assert.throws(() => client.stream("hi", { temperature: NaN }), { code: "invalid_request", param: "temperature" });
});

test("a request is what it was when it was made", async () => {
  const { client, sockets } = clientOf();
  const messages = [{ role: "user", content: "hi" }];
  const stream = client.stream(messages);
  messages.push({ role: "assistant", content: "later" });
  stream.start();
  await settle();
  sockets[0].greet();
  assert.equal(sockets[0].received[0].messages.length, 1);
  assert.throws(() => client.stream("hi", { seed: 5n }), TypeError);
});

test("a chunk that was already there is dropped", async () => {
  const { sockets, read } = await streaming();
  for (const [seq, text] of [[0, "a"], [0, "a"], [2, "b"], [1, "late"], [3, "c"]]) sockets[0].chunk("r1", seq, text);
  sockets[0].done("r1", 4);
  assert.equal(await read, "abc");
});

test("a refusal is a typed error", async () => {
  const { sockets, client } = clientOf();
  const stream = client.stream("hi");
  const started = stream.start();
  await settle();
  sockets[0].greet();
  sockets[0].say({ type: "ERROR", id: "r1", code: "rate_limited", message: "too many", param: "p", limit: 3, retryable: true, retry_after_s: 2 });
  const expected = { name: "SeedanceError", code: "rate_limited", message: "too many", param: "p", limit: 3, retryable: true, retryAfterS: 2 };
  await assert.rejects(started, expected);
  await assert.rejects(stream.text(), expected);
});

test("an error that names no request is about those without an answer", async () => {
  const { sockets, client, read } = await streaming();
  const refused = client.stream("other").text();
  sockets[0].say({ type: "ERROR", code: "invalid_frame", message: "no JSON", retryable: false });
  await assert.rejects(refused, { code: "invalid_frame" });
  sockets[0].done("r1", 0);
  await read;
});

test("a failure in the answer comes after the text before it", async () => {
  const { client, sockets } = await streaming();
  const other = client.stream("again");
  other.start();
  sockets[0].ack("r2");
  sockets[0].chunk("r2", 0, "so far");
  sockets[0].done("r2", 1, { finish_reason: "error", error: { code: "internal", message: "incident 42", retryable: true } });
  let text = "";
  await assert.rejects(async () => {
    for await (const delta of other) text += delta.text;
  }, { code: "internal" });
  assert.equal(text, "so far");
  assert.equal(other.done.finishReason, "error");
});

test("pings are answered, and frames of a later version skipped", async () => {
  const { sockets, read } = await streaming();
  sockets[0].say({ type: "PING", ts: 12.5 });
  sockets[0].say({ type: "NOVELTY", id: "r1" });
  assert.deepEqual(sockets[0].received.at(-1), { type: "PONG", ts: 12.5 });
  sockets[0].done("r1", 0);
  assert.equal(await read, "");
});

test("cancelling stops the server, and the answer ends normally", async () => {
  const { sockets, stream, read } = await streaming();
  sockets[0].chunk("r1", 0, "some");
  stream.cancel();
  stream.cancel();
  assert.deepEqual(sockets[0].of("CANCEL"), [{ type: "CANCEL", id: "r1" }]);
  sockets[0].done("r1", 1, { finish_reason: "cancelled" });
  assert.equal(await read, "some");
  assert.equal(stream.done.finishReason, "cancelled");
  stream.cancel();
  assert.equal(sockets[0].of("CANCEL").length, 1);
});

test("leaving the loop cancels", async () => {
  const { sockets, client } = clientOf();
  const stream = client.stream("hi");
  const reading = (async () => {
    for await (const { text } of stream) if (text === "b") break;
  })();
  await settle();
  sockets[0].greet();
  sockets[0].ack("r1");
  for (const [seq, text] of ["a", "b", "c"].entries()) sockets[0].chunk("r1", seq, text);
  await reading;
  assert.equal(sockets[0].of("CANCEL").length, 1);
  await assert.rejects(stream.text(), /iterated once/);
});

test("a signal ends the iteration at once and cancels", async () => {
  const controller = new AbortController();
  const { sockets, read } = await streaming({ signal: controller.signal });
  controller.abort(new Error("enough"));
  await assert.rejects(read, /enough/);
  assert.equal(sockets[0].of("CANCEL").length, 1);
  assert.equal("signal" in sockets[0].received[0], false);
});

test("nothing is sent for a signal that was aborted before", async () => {
  const { sockets, client } = clientOf();
  await assert.rejects(client.stream("hi", { signal: AbortSignal.abort(new Error("no")) }).text(), /no/);
  assert.equal(sockets.length, 0);
});

test("credit is given for what was read, a few tokens together", async () => {
  const { clock, sockets, client } = clientOf({ window: 64 });
  const stream = client.stream("hi");
  const iterator = stream[Symbol.asyncIterator]();
  const first = iterator.next();
  await settle();
  const [socket] = sockets;
  socket.greet();
  socket.ack("r1");
  for (let seq = 0; seq < 40; seq += 1) socket.chunk("r1", seq, "x");
  await first;
  await clock.advance(1000);
  assert.deepEqual(socket.of("ACK"), [], "the first was not read to its end yet");
  for (let count = 0; count < 16; count += 1) await iterator.next();
  assert.deepEqual(socket.of("ACK"), [{ type: "ACK", id: "r1", seq: 15 }]);
  for (let count = 0; count < 3; count += 1) await iterator.next();
  assert.equal(socket.of("ACK").length, 1);
  await clock.advance(250);
  assert.equal(socket.of("ACK").at(-1).seq, 18, "fewer after a while");
});

test("a client without a window gives no credit", async () => {
  const { clock, sockets } = await streaming({}, { window: 0 });
  assert.equal("window" in sockets[0].received[0], false);
  for (let seq = 0; seq < 100; seq += 1) sockets[0].chunk("r1", seq, "x");
  await clock.advance(1000);
  assert.deepEqual(sockets[0].of("ACK"), []);
});

test("a key is exchanged for a ticket at each connection", async () => {
  let count = 0;
  const fetch = async (url, { method, headers }) => {
    assert.equal(String(url), "https://host/apps/v1/tickets");
    assert.deepEqual([method, headers.Authorization], ["POST", "Bearer sk-1"]);
    count += 1;
    return Response.json({ ticket: `t${count}`, expires_in_s: 30 });
  };
  const { client, sockets, clock } = clientOf({ apiKey: "sk-1", fetch }, "https://host/apps");
  const read = client.stream("hi").text();
  await settle();
  assert.deepEqual(sockets[0].protocols, ["seedance.v1.json", "seedance.ticket.t1"]);
  sockets[0].greet();
  sockets[0].ack("r1");
  sockets[0].cut();
  await clock.advance(50);
  assert.deepEqual(sockets[1].protocols, ["seedance.v1.json", "seedance.ticket.t2"]);
  sockets[1].greet();
  sockets[1].done("r1", 0);
  await read;
});

test("a page gets its tickets from its own backend", async () => {
  const { client, sockets } = clientOf({ ticket: async () => "mine" });
  const connected = client.connect();
  await settle();
  assert.deepEqual(sockets[0].protocols, ["seedance.v1.json", "seedance.ticket.mine"]);
  sockets[0].greet();
  assert.deepEqual(await connected, HELLO);
});

test("a key that is not known is an error, and is not tried again", async () => {
  const error = { message: "this API key is not known here", type: "x", param: "Authorization", code: "unauthorized" };
  const fetch = async () => Response.json({ error }, { status: 401 });
  const { client, sockets, clock } = clientOf({ apiKey: "sk-1", fetch });
  await assert.rejects(client.stream("hi").text(), { code: "unauthorized", param: "Authorization", retryable: false });
  await clock.advance(60_000);
  assert.equal(sockets.length, 0);
});

test("a server that refuses for now says for how long", async () => {
  const fetch = async () => Response.json({ error: { code: "overloaded", message: "busy" } }, { status: 503, headers: { "Retry-After": "5" } });
  const { client } = clientOf({ apiKey: "sk-1", fetch });
  await assert.rejects(client.connect(), { code: "overloaded", retryable: true, retryAfterS: 5 });
  const dead = clientOf({ apiKey: "sk-1", fetch: async () => { throw new TypeError("fetch failed"); } });
  await assert.rejects(dead.client.connect(), ConnectionLost);
});

test("closing ends everything, and the next stream connects again", async () => {
  const { client, sockets, read } = await streaming();
  client.close();
  await assert.rejects(read, /the client was closed/);
  assert.equal(sockets[0].closedWith, 1000);
  const again = client.stream("again").text();
  await settle();
  sockets[1].greet();
  sockets[1].ack("r2");
  sockets[1].chunk("r2", 0, "yes");
  sockets[1].done("r2", 1);
  assert.equal(await again, "yes");
});

test("closing while it connects leaves no connection behind", async () => {
  const { client, sockets } = clientOf({ ticket: () => new Promise((resolve) => setImmediate(resolve, "late")) });
  const connected = client.connect();
  client.close();
  await assert.rejects(connected, /the client was closed/);
  assert.equal(sockets.length, 0);
});

test("an error is an Error", () => {
  const error = new SeedanceError({ code: "internal", message: "incident 1" });
  assert.ok(error instanceof Error);
  assert.equal(String(error), "SeedanceError: incident 1");
});
