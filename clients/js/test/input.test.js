import assert from "node:assert/strict";
import { test } from "node:test";

import { clientOf, settle } from "./fakes.js";

/** Pieces that a test hands out one by one. */
function feed() {
  const waiting = [];
  let wake = () => {};
  const give = async (piece) => {
    waiting.push(piece);
    wake();
    await settle();
  };
  async function* pieces() {
    for (;;) {
      while (waiting.length) {
        const piece = waiting.shift();
        if (piece === null) return;
        yield piece;
      }
      await new Promise((resolve) => { wake = resolve; });
    }
  }
  return { give, pieces: pieces() };
}

async function receiving(pieces, hello = {}) {
  const { client, clock, sockets } = clientOf();
  const stream = client.stream([{ role: "user", content: "Say: " }], { pieces });
  const read = stream.text();
  read.catch(() => {});
  await settle();
  sockets[0].greet(hello);
  await settle();
  return { client, clock, sockets, stream, read };
}

const sentTexts = (socket) => socket.of("INPUT_CHUNK").map(({ text }) => text);

test("pieces go out as they come, and the last one says so", async () => {
  const { give, pieces } = feed();
  const { sockets, stream, read } = await receiving(pieces);
  const [request] = sockets[0].received;
  assert.deepEqual([request.input, request.anchor, "pieces" in request], ["chunked", "plain", false]);
  await give("one ");
  assert.deepEqual(sockets[0].received[1], { type: "INPUT_CHUNK", id: "r1", input_id: 0, text: "one " });
  await give("two");
  sockets[0].say({ type: "ANCHOR", id: "r1", input_id: 1, offset: 0, ts: 5 });
  assert.deepEqual(stream.anchor, { inputId: 1, offset: 0, ts: 5, sha256: null });
  await give(null);
  assert.deepEqual(sockets[0].received.at(-1), { type: "INPUT_CHUNK", id: "r1", input_id: 2, text: "", is_last: true });
  sockets[0].ack("r1");
  sockets[0].chunk("r1", 0, "ok");
  sockets[0].done("r1", 1);
  assert.equal(await read, "ok");
});

test("pieces wait while the server is full", async () => {
  const { give, pieces } = feed();
  const { sockets } = await receiving(pieces);
  await give("a");
  sockets[0].say({ type: "INPUT_STATE", id: "r1", buffered: 9, capacity: 10, level: "high" });
  await give("b");
  await give("c");
  assert.deepEqual(sentTexts(sockets[0]), ["a"]);
  sockets[0].say({ type: "INPUT_STATE", id: "r1", buffered: 1, capacity: 10, level: "ok" });
  await settle();
  assert.deepEqual(sentTexts(sockets[0]), ["a", "b", "c"]);
});

test("no more is sent ahead of the model than fits into half of the server's buffer", async () => {
  const { give, pieces } = feed();
  const { sockets } = await receiving(pieces, { limits: { input_buffer_bytes: 8000 } });
  await give("ä".repeat(5000));
  assert.deepEqual(sentTexts(sockets[0]).map(({ length }) => length), [4096], "cut, and one at a time");
  sockets[0].say({ type: "ANCHOR", id: "r1", input_id: 0, offset: 0, ts: 5 });
  await settle();
  assert.deepEqual(sentTexts(sockets[0]).map(({ length }) => length), [4096, 904]);
});

test("a character is never cut between two pieces", async () => {
  const { give, pieces } = feed();
  const { sockets } = await receiving(pieces);
  const [high, low] = "😀";
  assert.equal(high, "😀");
  assert.equal(low, undefined);
  await give("a\ud83d");
  await give("\ude00b");
  await give(`${"x".repeat(4095)}😀`);
  await give(null);
  const texts = sentTexts(sockets[0]);
  assert.equal(texts.join(""), `a😀b${"x".repeat(4095)}😀`);
  for (const text of texts) assert.ok(text.isWellFormed?.() ?? true, JSON.stringify(text));
});

test("over a new connection all pieces are sent again, at the same pace", async () => {
  const { give, pieces } = feed();
  const { clock, sockets, read } = await receiving(pieces);
  await give("one ");
  await give("two ");
  sockets[0].cut();
  await give("three");
  await clock.advance(50);
  sockets[1].greet({ limits: { input_buffer_bytes: 10 } });
  assert.equal(sockets[1].received[0].type, "INFER_REQ");
  assert.deepEqual(sentTexts(sockets[1]), ["one "]);
  sockets[1].say({ type: "ANCHOR", id: "r1", input_id: 0, offset: 0, ts: 5 });
  sockets[1].say({ type: "ANCHOR", id: "r1", input_id: 1, offset: 0, ts: 5 });
  await settle();
  await give(null);
  assert.deepEqual(sentTexts(sockets[1]).join(""), "one two three");
  assert.ok(sockets[1].received.at(-1).is_last);
  sockets[1].ack("r1");
  sockets[1].cut();
  await clock.advance(50);
  sockets[2].greet();
  assert.deepEqual(sockets[2].received.map(({ type }) => type), ["RESUME"], "the server has it all");
  sockets[2].done("r1", 0);
  await read;
});

test("pieces that fail end the request", async () => {
  async function* pieces() {
    yield "one";
    throw new Error("the microphone is gone");
  }
  const { sockets, read } = await receiving(pieces());
  await assert.rejects(read, /the microphone is gone/);
  assert.equal(sockets[0].of("CANCEL").length, 1);
});

test("pieces are asked for no longer when the request has ended", async () => {
  let isClosed = false;
  async function* pieces() {
    try {
      for (;;) {
        yield "more";
        await settle();
      }
    } finally {
      isClosed = true;
    }
  }
  const { sockets, read } = await receiving(pieces());
  sockets[0].say({ type: "ERROR", id: "r1", code: "input_too_large", message: "over", retryable: false });
  await assert.rejects(read, { code: "input_too_large" });
  await settle();
  await settle();
  assert.ok(isClosed);
});
