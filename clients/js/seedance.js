/**
 * A client for `seedance.v1`, in browsers and in Node: any number of streams over one WebSocket.
 *
 *     const client = new SeedanceClient("http://127.0.0.1:8000");
 *     for await (const { text } of client.stream("What is the capital of France?")) show(text);
 *
 * A connection that is lost, or that a draining server closes, is replaced by another, and the
 * streams go on there with no token lost or doubled. seedance.d.ts describes what is exported.
 */

import { Connection, ConnectionLost, SeedanceError, SILENT } from "./connection.js";
import { Stream } from "./stream.js";

export { ConnectionLost, SeedanceError };

/** Close codes after which the same would only happen again. */
const FINAL_CODES = new Set([1000, 1002, 1003, 1007, 1008, 1009, 1010, 4400, 4401, 4403, 4406]);
const FIRST_DELAY_MS = 50;
const MAX_DELAY_MS = 2000;

const CLOCK = {
  now: () => performance.now(),
  setTimeout: (run, ms) => setTimeout(run, ms),
  clearTimeout: (timer) => clearTimeout(timer),
};

export class SeedanceClient {
  hello = null;
  #options;
  #connections = new Set();
  #current = null;
  #waiting = new Map();
  #opening = null;
  #isRecovering = false;
  /** A connection is to be made though no stream waits for one. */
  #isWanted = false;
  #numTries = 0;
  #numCloses = 0;
  #numStreams = 0;
  #state = "closed";
  #problem = null;

  constructor(url, { apiKey, ticket, window = 256, resume = true, reconnectTimeoutS = 30, openTimeoutS = 10,
    onState = () => {}, WebSocket = globalThis.WebSocket, fetch = globalThis.fetch, random = Math.random, clock = CLOCK } = {}) {
    if (!WebSocket) throw new TypeError("this runtime has no WebSocket: hand one in as the option WebSocket");
    this.url = new URL(/^\w+:\/\//.test(url) ? url : `http://${url}`);
    this.url.protocol = this.url.protocol.replace("http", "ws");
    this.url.pathname = this.url.pathname.replace(/(\/v1(\/infer)?)?\/*$/, "/v1/infer");
    this.apiKey = apiKey;
    this.#options = { ticket, window, resume, reconnectTimeoutS, openTimeoutS, onState, WebSocket, fetch, random, clock };
  }

  stream(messages, { pieces, signal, ...params } = {}) {
    for (const [param, value] of Object.entries(params)) {
      if (typeof value !== "number" || Number.isFinite(value)) continue;
      throw new SeedanceError({ code: "invalid_request", message: `${param} must be finite, got ${value}`, param });
    }
    if (typeof messages === "string") messages = [{ role: "user", content: messages }];
    const window = this.#options.window || undefined;
    const body = { messages: messages ?? undefined, window, anchor: "none", ...params };
    if (pieces) {
      body.input = "chunked";
      // Anchors tell which pieces were taken, so how many more there is room for.
      if (body.anchor === "none") body.anchor = "plain";
    }
    this.#numStreams += 1;
    // A copy, since it may be sent again when the caller has long gone on with his own.
    const copy = JSON.parse(JSON.stringify(body));
    return new Stream(this, this.#options.clock, `r${this.#numStreams}`, copy, { pieces, signal });
  }

  async connect() {
    if (!this.#current) await this.#dial();
    return this.hello;
  }

  close() {
    this.#numCloses += 1;
    this.#isWanted = false;
    const problem = new ConnectionLost("the client was closed");
    for (const streams of [this.#waiting, ...[...this.#connections].map((one) => one.streams)]) {
      for (const stream of streams.values()) stream.end(problem);
      streams.clear();
    }
    for (const connection of [...this.#connections]) connection.lose(problem);
  }

  /** Sends the stream's request, now or as soon as there is a connection. */
  launch(stream) {
    if (this.#current) return stream.place(this.#current);
    this.#wait(stream, null);
    this.#recover(false);
  }

  /** A stream was left: one that the server knows is cancelled there, be it on another connection. */
  forget(stream) {
    if (stream.token === null) this.#waiting.delete(stream.id);
  }

  /** Takes a frame from a connection. */
  take(connection, frame) {
    if (frame.type === "HELLO") return this.#use(connection);
    if (frame.type === "DRAIN") return this.#onDrain(connection);
    if (frame.type === "ERROR" && frame.id == null) {
      // It is about a frame that could not be read, so about a request with no answer yet.
      const unanswered = [...connection.streams.values()].filter((stream) => !stream.isAnswered);
      return unanswered.forEach(({ id }) => this.take(connection, { ...frame, id }));
    }
    const stream = connection.streams.get(frame.id);
    if (!stream) return;
    if (frame.type === "ERROR" || frame.type === "INFER_DONE") connection.streams.delete(frame.id);
    if (frame.type !== "ERROR" || !this.#isTriedAgain(connection, stream, frame)) stream.receive(frame);
    this.#retire(connection);
  }

  onLost(connection, problem) {
    this.#connections.delete(connection);
    if (this.#current === connection) this.#current = null;
    this.#problem = problem;
    const isFinal = !this.#options.resume || FINAL_CODES.has(problem.code);
    for (const stream of connection.streams.values()) {
      const isGone = stream.token === null ? stream.isEnded : !connection.hello.resume_window_s;
      if (isFinal || isGone) stream.end(problem);
      else this.#wait(stream, problem);
    }
    if (this.#waiting.size) this.#recover(true);
    this.#tell();
  }

  #isTriedAgain(connection, stream, refusal) {
    const isMisplaced = connection.isDraining && refusal.code === "overloaded";
    const isKept = stream.token !== null && refusal.retryable;
    if (!this.#options.resume || !(isMisplaced || isKept)) return false;
    this.#wait(stream, new SeedanceError(refusal));
    this.#recover(!isMisplaced);
    return true;
  }

  #use(connection) {
    this.hello = connection.hello;
    this.#current = connection;
    this.#placeAll();
    this.#tell();
  }

  /** What runs there runs on; all else goes over a new connection. */
  #onDrain(connection) {
    connection.isDraining = true;
    if (this.#current === connection) this.#current = null;
    this.#isWanted = this.#current === null;
    this.#recover(true);
    this.#retire(connection);
  }

  #retire(connection) {
    if (!connection.isDraining || connection.streams.size) return;
    connection.lose(new ConnectionLost("the server is going away"));
  }

  #wait(stream, problem) {
    const { clock, reconnectTimeoutS } = this.#options;
    const now = clock.now();
    if (stream.waitingSince === null) {
      stream.waitingSince = now;
      this.#numTries = 0;
    }
    stream.connection = null;
    stream.problem = problem;
    this.#waiting.set(stream.id, stream);
    const leftMs = Math.max(0, stream.waitingSince + 1000 * reconnectTimeoutS - now);
    stream.timer = clock.setTimeout(() => this.#giveUp(stream, ` within ${reconnectTimeoutS} s`), leftMs);
  }

  #giveUp(stream, limit) {
    const { problem } = stream;
    this.#waiting.delete(stream.id);
    if (problem instanceof SeedanceError || (problem && !this.hello)) return stream.end(problem);
    const why = problem?.message ?? "no server answered";
    stream.end(new ConnectionLost(`could not connect again${limit}: ${why}`, problem?.code));
  }

  #placeAll() {
    const waiting = [...this.#waiting.values()];
    this.#waiting.clear();
    for (const stream of waiting) stream.place(this.#current);
  }

  /** Connects; tries until no stream waits any more, be it that its time is up. */
  async #recover(isPausing) {
    if (this.#isRecovering) return;
    this.#isRecovering = true;
    this.#tell();
    const { clock, reconnectTimeoutS } = this.#options;
    let delayMs = isPausing ? this.#nextDelayMs() : 0;
    while (this.#waiting.size || this.#isWanted) {
      if (delayMs) await new Promise((wake) => clock.setTimeout(wake, delayMs));
      delayMs = 0;
      try {
        const isNeeded = this.#waiting.size || this.#isWanted;
        this.#isWanted = false;
        if (this.#current) this.#placeAll();
        else if (isNeeded) await this.#dial();
      } catch (error) {
        const isFinal = error instanceof SeedanceError ? !error.retryable : FINAL_CODES.has(error.code);
        for (const stream of [...this.#waiting.values()]) {
          stream.problem = error;
          if (isFinal || !this.hello) this.#giveUp(stream, "");
        }
        delayMs = 1000 * Math.min(error.retryAfterS ?? 0, reconnectTimeoutS);
      }
      if (this.#waiting.size) delayMs = Math.max(delayMs, this.#nextDelayMs());
    }
    this.#isRecovering = false;
    this.#tell();
  }

  /** Doubles with every try, the later half of it by chance. */
  #nextDelayMs() {
    const fullMs = Math.min(FIRST_DELAY_MS * 2 ** this.#numTries, MAX_DELAY_MS);
    this.#numTries += 1;
    return fullMs * (0.5 + 0.5 * this.#options.random());
  }

  /** Opens a connection; one try, and one at a time. */
  #dial() {
    this.#opening ??= this.#open().finally(() => {
      this.#opening = null;
      this.#tell();
    });
    this.#tell();
    return this.#opening;
  }

  async #open() {
    const { clock, openTimeoutS, WebSocket } = this.#options;
    const numCloses = this.#numCloses;
    let connection = null;
    let timer;
    const late = new Promise((_, reject) => {
      const problem = new ConnectionLost(`${this.url.host} did not answer within ${openTimeoutS} s`);
      const giveUp = () => (connection ? connection.lose(problem, SILENT) : reject(problem));
      timer = clock.setTimeout(giveUp, 1000 * openTimeoutS);
    });
    try {
      const ticket = await Promise.race([this.#ticket(), late]);
      if (this.#numCloses !== numCloses) throw new ConnectionLost("the client was closed");
      const protocols = ["seedance.v1.json", ...(ticket ? [`seedance.ticket.${ticket}`] : [])];
      connection = new Connection(this, new WebSocket(this.url.href, protocols), clock);
      this.#connections.add(connection);
      await connection.greeted;
    } catch (error) {
      this.#problem = error;
      throw error;
    } finally {
      clock.clearTimeout(timer);
    }
  }

  /** What shows who we are: a WebSocket in a browser takes no header. */
  async #ticket() {
    const { ticket, fetch } = this.#options;
    if (ticket) return ticket();
    if (!this.apiKey) return null;
    const url = new URL(this.url);
    url.protocol = url.protocol.replace("ws", "http");
    url.pathname = url.pathname.replace(/infer$/, "tickets");
    const headers = { Authorization: `Bearer ${this.apiKey}` };
    const reply = await fetch(url, { method: "POST", headers }).catch((error) => {
      throw new ConnectionLost(`the server could not be reached: ${error.message}`);
    });
    const body = await reply.json().catch(() => ({}));
    if (reply.ok && body.ticket) return body.ticket;
    throw new SeedanceError({
      code: "internal",
      message: `the server answered with HTTP status ${reply.status}`,
      ...body.error,
      retryable: reply.status === 429 || reply.status >= 500,
      retry_after_s: Number(reply.headers.get("Retry-After")) || null,
    });
  }

  #tell() {
    const isConnecting = this.#opening !== null || this.#isRecovering;
    const state = this.#current ? "open" : isConnecting ? "connecting" : "closed";
    if (state === this.#state) return;
    this.#state = state;
    this.#options.onState(state, state === "open" ? this.hello : this.#problem);
  }
}
