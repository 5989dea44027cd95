import assert from "node:assert/strict";
import { test } from "node:test";

import { ConnectionLost } from "../seedance.js";
import { clientOf, settle, streaming } from "./fakes.js";

test("a stream goes on behind what it has, over the next connection", async () => {
  const { clock, sockets, read } = await streaming({ boundary: "utf8", return_token_ids: true });
  sockets[0].chunk("r1", 0, "The ");
  sockets[0].chunk("r1", 2, "capital");
  sockets[0].cut();
  await clock.advance(50);
  sockets[1].greet();
  assert.deepEqual(sockets[1].received, [{
    type: "RESUME", id: "r1", stream: "token-r1", last_seq: 2, window: 256, boundary: "utf8", anchor: "none", return_token_ids: true,
  }]);
  sockets[1].ack("r1", { stream: "token-2" });
  sockets[1].chunk("r1", 2, "capital");
  sockets[1].chunk("r1", 3, " is");
  sockets[1].cut();
  await clock.advance(50);
  sockets[2].greet();
  assert.equal(sockets[2].received[0].stream, "token-2", "the newer token counts");
  sockets[2].ack("r1");
  sockets[2].chunk("r1", 4, " Paris");
  sockets[2].done("r1", 5);
  assert.equal(await read, "The capital is Paris");
});

test("a request that was not answered is sent again", async () => {
  const { client, clock, sockets } = clientOf();
  const read = client.stream("hi").text();
  await settle();
  sockets[0].greet();
  sockets[0].cut();
  await clock.advance(50);
  sockets[1].greet();
  assert.equal(sockets[1].received[0].type, "INFER_REQ");
  sockets[1].ack("r1");
  sockets[1].done("r1", 0);
  assert.equal(await read, "");
});

test("pauses double from 50 ms to 2 s, the later half by chance", async () => {
  for (const [chance, factor] of [[1, 1], [0, 0.5]]) {
    const { clock, sockets, read } = await streaming({}, { random: () => chance });
    read.catch(() => {});
    const tries = [];
    let count = 1;
    sockets[0].cut();
    for (let ms = 0; ms < 8000; ms += 25) {
      await clock.advance(25);
      if (sockets.length > count) {
        count = sockets.length;
        tries.push(ms + 25);
        sockets.at(-1).cut();
      }
    }
    const pauses = tries.map((at, index) => at - (tries[index - 1] ?? 0));
    const expected = [50, 100, 200, 400, 800, 1600, 2000, 2000].map((ms) => ms * factor);
    assert.deepEqual(pauses.slice(0, 6), expected.slice(0, 6));
  }
});

test("a stream that finds no connection in time fails with the reason", async () => {
  const { clock, sockets, read } = await streaming({}, { reconnectTimeoutS: 3 });
  const failed = assert.rejects(read, { name: "ConnectionLost", code: 1006, message: /within 3 s.*could not be reached/ });
  sockets[0].cut();
  for (let ms = 0; ms < 3000; ms += 50) {
    await clock.advance(50);
    if (sockets.at(-1).readyState === 0) sockets.at(-1).cut();
  }
  await failed;
});

test("a resumed stream may wait for its next token for as long as it takes", async () => {
  const { clock, sockets, read } = await streaming({}, { reconnectTimeoutS: 3 });
  sockets[0].cut();
  await clock.advance(50);
  sockets[1].greet({ heartbeat_s: 1000 });
  sockets[1].ack("r1");
  await clock.advance(60_000);
  sockets[1].chunk("r1", 0, "at last");
  sockets[1].done("r1", 1);
  assert.equal(await read, "at last");
});

test("what would only happen again is not tried again", async () => {
  for (const code of [1009, 4406]) {
    const { clock, sockets, read } = await streaming();
    sockets[0].cut(code, "because");
    await assert.rejects(read, { name: "ConnectionLost", code, message: /because/ });
    await clock.advance(60_000);
    assert.equal(sockets.length, 1);
  }
});

test("where nothing is kept a stream ends with its connection", async () => {
  for (const [hello, options] of [[{ resume_window_s: 0 }, {}], [{}, { resume: false }]]) {
    const { client, clock, sockets } = clientOf(options);
    const read = client.stream("hi").text();
    await settle();
    sockets[0].greet(hello);
    sockets[0].ack("r1");
    sockets[0].cut();
    await assert.rejects(read, ConnectionLost);
    await clock.advance(60_000);
    assert.equal(sockets.length, 1);
  }
});

test("a first connection that cannot be made is told at once", async () => {
  const { client, sockets } = clientOf();
  const read = client.stream("hi").text();
  await settle();
  sockets[0].cut();
  await assert.rejects(read, /could not be reached/);
});

test("a server that does not greet is given up", async () => {
  const { client, clock, sockets } = clientOf({ openTimeoutS: 4 });
  const connected = client.connect();
  const failed = assert.rejects(connected, /did not answer within 4 s/);
  await clock.advance(4000);
  await failed;
  assert.notEqual(sockets[0].closedWith, null);
});

test("a peer that is silent for two heartbeats is gone, without its streams", async () => {
  const { clock, sockets, read } = await streaming();
  await clock.advance(20_000);
  sockets[0].say({ type: "PING" });
  await clock.advance(29_999);
  assert.equal(sockets[0].closedWith, null);
  await clock.advance(1);
  assert.equal(sockets[0].closedWith, 4408, "after 1000 the server would stop the stream");
  await clock.advance(50);
  sockets[1].greet();
  assert.equal(sockets[1].received[0].type, "RESUME");
  sockets[1].ack("r1");
  sockets[1].done("r1", 0);
  await read;
});

test("a frame that is no JSON ends the connection, since it might have been a piece", async () => {
  const { sockets, read } = await streaming();
  sockets[0].say("{");
  await assert.rejects(read, ConnectionLost);
  assert.equal(sockets[0].closedWith, 4400);
});

test("a draining server finishes what it has, and the rest goes over a new connection", async () => {
  const { client, clock, sockets, read } = await streaming();
  sockets[0].say({ type: "DRAIN", deadline_s: 30 });
  const second = client.stream("second").text();
  await clock.advance(50);
  sockets[1].greet();
  assert.equal(sockets[1].received[0].id, "r2");
  sockets[0].chunk("r1", 0, "first");
  sockets[1].ack("r2");
  sockets[1].chunk("r2", 0, "second");
  sockets[1].done("r2", 1);
  assert.equal(sockets[0].closedWith, null);
  sockets[0].done("r1", 1);
  assert.equal(sockets[0].closedWith, 1000, "it is left when its last answer has come");
  assert.deepEqual([await read, await second], ["first", "second"]);
});

test("what a drained server cuts is resumed", async () => {
  const { clock, sockets, read } = await streaming();
  sockets[0].say({ type: "DRAIN", deadline_s: 30 });
  await clock.advance(50);
  sockets[1].greet();
  sockets[0].cut(1001, "going away");
  await clock.advance(50);
  assert.equal(sockets[1].received[0].type, "RESUME");
  sockets[1].ack("r1");
  sockets[1].done("r1", 0);
  await read;
  assert.equal(sockets.length, 2);
});

test("a request that met a draining server is sent to the next", async () => {
  const { client, clock, sockets } = clientOf();
  const read = client.stream("hi").text();
  await settle();
  sockets[0].greet();
  sockets[0].say({ type: "DRAIN", deadline_s: 30 });
  sockets[0].say({ type: "ERROR", id: "r1", code: "overloaded", message: "going away", retryable: true, retry_after_s: 0 });
  await clock.advance(50);
  sockets[1].greet();
  assert.equal(sockets[1].received[0].type, "INFER_REQ");
  sockets[1].ack("r1");
  sockets[1].done("r1", 0);
  await read;
});

test("a resume that is refused for now is tried again, one that is refused for good is not", async () => {
  const { clock, sockets, read } = await streaming();
  sockets[0].cut();
  await clock.advance(50);
  sockets[1].greet();
  sockets[1].say({ type: "ERROR", id: "r1", code: "overloaded", message: "busy", retryable: true });
  await clock.advance(100);
  assert.equal(sockets[1].of("RESUME").length, 2);
  sockets[1].say({ type: "ERROR", id: "r1", code: "resume_expired", message: "gone", retryable: false });
  await assert.rejects(read, { code: "resume_expired" });
});

test("a stream that is cancelled while it has no connection is cancelled on the next", async () => {
  const { clock, sockets, stream, read } = await streaming();
  sockets[0].cut();
  stream.cancel();
  await clock.advance(50);
  sockets[1].greet();
  assert.deepEqual(sockets[1].received.map(({ type }) => type), ["RESUME", "CANCEL"]);
  sockets[1].ack("r1");
  sockets[1].done("r1", 0, { finish_reason: "cancelled" });
  await read;
});

test("a stream that is left while it has no connection is stopped on the next", async () => {
  const controller = new AbortController();
  const { clock, sockets, read } = await streaming({ signal: controller.signal });
  sockets[0].cut();
  controller.abort(new Error("enough"));
  await assert.rejects(read, /enough/);
  await clock.advance(50);
  sockets[1].greet();
  assert.deepEqual(sockets[1].received.map(({ type }) => type), ["RESUME", "CANCEL"]);
});

test("a request that is left before it was sent is not sent", async () => {
  const controller = new AbortController();
  const { client, sockets } = clientOf();
  const read = client.stream("hi", { signal: controller.signal }).text();
  await settle();
  controller.abort(new Error("enough"));
  await assert.rejects(read, /enough/);
  sockets[0].greet();
  assert.deepEqual(sockets[0].received, []);
});

test("the page is told how the connection is", async () => {
  const states = [];
  const { client, clock, sockets } = clientOf({ onState: (state, detail) => states.push([state, detail?.name ?? detail?.model]) });
  const read = client.stream("hi").text();
  await settle();
  sockets[0].greet();
  sockets[0].ack("r1");
  sockets[0].cut();
  await clock.advance(50);
  sockets[1].greet();
  sockets[1].done("r1", 0);
  await read;
  await settle();
  sockets[1].cut();
  assert.deepEqual(states, [
    ["connecting", undefined], ["open", "fake-1"], ["connecting", "ConnectionLost"], ["open", "fake-1"], ["closed", "ConnectionLost"],
  ]);
});
