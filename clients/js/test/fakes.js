/** A server that says what a test says, and time that passes when a test says so. */

import { SeedanceClient } from "../seedance.js";

export const HELLO = {
  type: "HELLO",
  session: "s-1",
  model: "fake-1",
  limits: {},
  heartbeat_s: 15,
  resume_window_s: 30,
};

/** Lets everything run that waits for nothing but its turn. */
export const settle = () => new Promise((resolve) => setImmediate(resolve));

export class FakeClock {
  #now = 0;
  #timers = new Map();
  #count = 0;

  now = () => this.#now;

  setTimeout = (run, ms) => {
    this.#timers.set(++this.#count, { run, at: this.#now + ms });
    return this.#count;
  };

  clearTimeout = (timer) => this.#timers.delete(timer);

  /** Milliseconds from now at which the timers are due. */
  get due() {
    return [...this.#timers.values()].map(({ at }) => at - this.#now).sort((a, b) => a - b);
  }

  async advance(ms) {
    const end = this.#now + ms;
    await settle();
    for (;;) {
      const [first] = [...this.#timers].sort(([, a], [, b]) => a.at - b.at);
      if (!first || first[1].at > end) break;
      this.#timers.delete(first[0]);
      this.#now = Math.max(this.#now, first[1].at);
      first[1].run();
      await settle();
    }
    this.#now = end;
  }
}

export class FakeSocket {
  readyState = 0;
  received = [];
  closedWith = null;
  onmessage = null;
  onclose = null;
  onerror = null;

  constructor(url, protocols) {
    Object.assign(this, { url, protocols });
  }

  /** The handshake succeeds. */
  greet(fields = {}) {
    this.readyState = 1;
    this.say({ ...HELLO, ...fields });
  }

  say(frame) {
    this.onmessage?.({ data: typeof frame === "string" ? frame : JSON.stringify(frame) });
  }

  ack(id, fields = {}) {
    this.say({ type: "INFER_ACK", id, stream: `token-${id}`, cache: { outcome: "miss" }, ...fields });
  }

  chunk(id, seq, text, fields = {}) {
    this.say({ type: "INFER_CHUNK", id, seq, text, ...fields });
  }

  done(id, seq, fields = {}) {
    this.say({
      type: "INFER_DONE",
      id,
      seq,
      is_final: true,
      finish_reason: "stop",
      usage: { prompt_tokens: 5, completion_tokens: seq, total_tokens: 5 + seq },
      timing: { total_ms: 3 },
      cache: { outcome: "miss" },
      ...fields,
    });
  }

  /** The connection is gone. */
  cut(code = 1006, reason = "") {
    this.readyState = 3;
    this.onclose?.({ code, reason });
  }

  send(data) {
    this.received.push(JSON.parse(data));
  }

  close(code) {
    this.closedWith = code;
    this.readyState = 3;
  }

  of(type) {
    return this.received.filter((frame) => frame.type === type);
  }
}

/** A client, its clock, and every socket that it opened. */
export function clientOf(options = {}, url = "http://host:8000") {
  const clock = new FakeClock();
  const sockets = [];
  class WebSocket extends FakeSocket {
    constructor(...given) {
      super(...given);
      sockets.push(this);
    }
  }
  const client = new SeedanceClient(url, { clock, WebSocket, random: () => 1, ...options });
  return { client, clock, sockets };
}

/** Such a client with a stream that the server has accepted as r1; `read` is its text to be. */
export async function streaming(params = {}, options = {}) {
  const { client, clock, sockets } = clientOf(options);
  const stream = client.stream("hi", params);
  const read = stream.text();
  await settle();
  sockets[0].greet();
  sockets[0].ack("r1");
  return { client, clock, sockets, stream, read };
}
