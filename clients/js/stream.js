/** One answer as a client reads it: what it has, and what it still wants of the server. */

import { SeedanceError } from "./connection.js";

/** So many tokens are acknowledged together, and fewer of them after so long. */
const ACK_TOKENS = 32;
const ACK_DELAY_MS = 250;
/** Of a chunked prompt: what is sent beyond what the model has taken, and the longest piece. */
const INPUT_AHEAD_BYTES = 64 * 1024;
const PIECE_CHARS = 4 * 1024;

/** Made by `SeedanceClient.stream`, and described in seedance.d.ts. */
export class Stream {
  cache = null;
  queuePosition = null;
  anchor = null;
  done = null;
  token = null;
  connection = null;
  /** When it lost its connection, unless it has got on since then; why; and the timer that gives it up. */
  waitingSince = null;
  problem = null;
  timer = null;
  isAnswered = false;
  isCancelled = false;
  isEnded = false;
  #lastSeq = -1;
  #takenSeq = -1;
  #ackedSeq = -1;
  #ackTimer = null;
  #deltas = [];
  #error = null;
  #started = null;
  #isIterated = false;
  #wake = () => {};
  /** The pieces of a chunked prompt until the request is accepted, how many were sent, the last that was taken. */
  #pieces = [];
  #numSent = 0;
  #takenId = -1;
  #isHeld = false;
  #wakeInput = () => {};

  constructor(carrier, clock, id, body, { pieces, signal }) {
    Object.assign(this, { carrier, clock, id, body, pieces, signal });
  }

  start() {
    if (this.#started) return this.#started;
    this.#started = new Promise((resolve, reject) => Object.assign(this, { resolve, reject }));
    this.#started.catch(() => {});
    if (this.signal?.aborted) {
      this.end(this.signal.reason);
    } else {
      this.signal?.addEventListener("abort", this.#abort);
      this.carrier.launch(this);
      if (this.pieces) this.#pump();
    }
    return this.#started;
  }

  async text() {
    let text = "";
    for await (const delta of this) text += delta.text;
    return text;
  }

  cancel() {
    if (!this.#started || this.isEnded || this.isCancelled) return;
    this.isCancelled = true;
    this.connection?.send({ type: "CANCEL", id: this.id });
  }

  async *[Symbol.asyncIterator]() {
    if (this.#isIterated) throw new TypeError("a stream can be iterated once");
    this.#isIterated = true;
    try {
      this.start();
      while (this.#deltas.length || !this.isEnded) {
        const delta = this.#deltas.shift();
        if (delta) {
          yield delta;
          this.#took(delta.seq);
        } else {
          await new Promise((wake) => { this.#wake = wake; });
        }
      }
      if (this.#error) throw this.#error;
    } finally {
      this.#leave(new Error("the stream was left before its end"));
    }
  }

  /** Starts it on a connection, or goes on with it there. */
  place(connection) {
    const { id, token, body } = this;
    this.clock.clearTimeout(this.timer);
    this.connection = connection;
    connection.streams.set(id, this);
    if (token === null) {
      connection.send({ type: "INFER_REQ", id, ...body });
      this.isAnswered = false;
      this.#numSent = 0;
      this.#takenId = -1;
      this.#isHeld = false;
      this.#sendPieces();
    } else {
      const { window, boundary, anchor, return_token_ids } = body;
      const again = { window, boundary, anchor, return_token_ids };
      connection.send({ type: "RESUME", id, stream: token, last_seq: this.#lastSeq, ...again });
      this.#ackedSeq = this.#lastSeq;
    }
    if (this.isCancelled) connection.send({ type: "CANCEL", id });
  }

  /** Takes a frame that is about it. */
  receive(frame) {
    this.isAnswered = true;
    switch (frame.type) {
      case "INFER_ACK":
        if (this.token === null) {
          this.cache = frame.cache;
          this.queuePosition = frame.queue_position ?? null;
          this.waitingSince = null;
        }
        this.token = frame.stream;
        this.#pieces = [];
        this.resolve();
        break;
      case "INFER_CHUNK":
        // What is resumed may repeat itself: the merge rule is to drop that.
        if (frame.seq <= this.#lastSeq) break;
        this.#lastSeq = frame.seq;
        this.waitingSince = null;
        if (!this.isEnded) {
          const { text, seq, token_ids: tokenIds, logprobs } = frame;
          this.#deltas.push({ text, seq, tokenIds, logprobs });
          this.#wake();
        }
        break;
      case "ANCHOR":
        this.anchor = { inputId: frame.input_id, offset: frame.offset, ts: frame.ts, sha256: frame.sha256 ?? null };
        this.#takenId = frame.input_id;
        this.waitingSince = null;
        this.#sendPieces();
        break;
      case "INPUT_STATE":
        this.#isHeld = frame.level === "high";
        this.#sendPieces();
        break;
      case "INFER_DONE":
        this.done = { finishReason: frame.finish_reason, usage: frame.usage, timing: frame.timing, cache: frame.cache };
        this.end(frame.error ? new SeedanceError(frame.error) : null);
        break;
      case "ERROR":
        this.end(new SeedanceError(frame));
    }
  }

  /** Ends the iteration after what has arrived, with `error` if there is one. */
  end(error) {
    if (this.isEnded) return;
    this.isEnded = true;
    this.#error = error;
    if (error) this.reject(error);
    else this.resolve();
    this.signal?.removeEventListener("abort", this.#abort);
    this.clock.clearTimeout(this.timer);
    this.#wake();
    this.#wakeInput();
  }

  #abort = () => {
    this.#deltas = [];
    this.#leave(this.signal.reason);
  };

  /** Nobody reads it any more: the server is to stop. */
  #leave(error) {
    if (this.isEnded) return;
    this.cancel();
    this.end(error);
    this.carrier.forget(this);
  }

  /** The server gets credit for what was taken. */
  #took(seq) {
    this.#takenSeq = seq;
    const most = Math.max(1, Math.min(ACK_TOKENS, this.body.window >> 2));
    if (seq - this.#ackedSeq >= most) this.#ack();
    else this.#ackTimer ??= this.clock.setTimeout(() => this.#ack(), ACK_DELAY_MS);
  }

  #ack() {
    this.clock.clearTimeout(this.#ackTimer);
    this.#ackTimer = null;
    const isLive = this.connection?.streams.get(this.id) === this;
    if (!isLive || !this.body.window || this.#takenSeq <= this.#ackedSeq) return;
    this.#ackedSeq = this.#takenSeq;
    this.connection.send({ type: "ACK", id: this.id, seq: this.#takenSeq });
  }

  async #pump() {
    try {
      let rest = "";
      for await (const piece of this.pieces) {
        rest += piece;
        while (rest && !this.isEnded) {
          let end = Math.min(rest.length, PIECE_CHARS);
          // Half of a surrogate pair waits for its other half.
          if (/[\uD800-\uDBFF]/.test(rest[end - 1])) end -= 1;
          if (end === 0) break;
          await this.#put(rest.slice(0, end));
          rest = rest.slice(end);
        }
        if (this.isEnded) return;
      }
      await this.#put(rest, true);
    } catch (error) {
      this.#leave(error);
    }
  }

  /** Resolves when the piece was sent, for which the server has to have room. */
  async #put(text, isLast = false) {
    const pieces = this.#pieces;
    const start = pieces.at(-1)?.end ?? 0;
    pieces.push({ text, isLast, end: start + new TextEncoder().encode(text).length });
    this.#sendPieces();
    while (!this.isEnded && this.#numSent < pieces.length) {
      await new Promise((wake) => { this.#wakeInput = wake; });
    }
  }

  #sendPieces() {
    const pieces = this.#pieces;
    const capacity = this.connection?.hello.limits.input_buffer_bytes ?? Infinity;
    const mostAhead = Math.min(INPUT_AHEAD_BYTES, capacity / 2);
    while (this.connection && !this.#isHeld && this.#numSent < pieces.length) {
      const { text, isLast, end } = pieces[this.#numSent];
      const numAhead = end - (pieces[this.#takenId]?.end ?? 0);
      if (numAhead > mostAhead && this.#numSent > this.#takenId + 1) return;
      const input_id = this.#numSent++;
      this.connection.send({ type: "INPUT_CHUNK", id: this.id, input_id, text, is_last: isLast || undefined });
    }
    this.#wakeInput();
  }
}
