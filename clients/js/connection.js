/** One WebSocket of a client, and what may go wrong with it. */

/** With these codes we close what we give up: after 1000 the server would stop the streams. */
const UNREADABLE = 4400;
export const SILENT = 4408;

/** The server refused a request, or failed in it. */
export class SeedanceError extends Error {
  constructor({ code, message, param = null, limit = null, retryable = false, retry_after_s = null }) {
    super(message);
    this.name = "SeedanceError";
    Object.assign(this, { code, param, limit, retryable, retryAfterS: retry_after_s });
  }
}

/** The connection could not be made, or ended; `code` is the close code where there was one. */
export class ConnectionLost extends Error {
  constructor(message, code = null) {
    super(message);
    this.name = "ConnectionLost";
    this.code = code;
  }
}

/** A WebSocket that is greeted or will be, and the streams on it. */
export class Connection {
  hello = null;
  isDraining = false;
  streams = new Map();

  /** `listener.take(connection, frame)` and `listener.onLost(connection, problem)` hear of it. */
  constructor(listener, socket, clock) {
    Object.assign(this, { listener, socket, clock, heardAt: clock.now() });
    this.greeted = new Promise((resolve, reject) => Object.assign(this, { resolve, reject }));
    this.greeted.catch(() => {});
    socket.onmessage = ({ data }) => this.receive(data);
    socket.onerror = () => {
      // Node 20 tells of a refused handshake by nothing else.
      if (!this.hello) this.lose(new ConnectionLost("the server could not be reached"));
    };
    socket.onclose = ({ code, reason }) => {
      const what = this.hello ? "the connection was lost" : "the server could not be reached";
      this.lose(new ConnectionLost(`${what}: ${reason || `close code ${code}`}`, code));
    };
  }

  /** What does not leave is lost with the connection, whose end is about to be told. */
  send(frame) {
    if (this.socket?.readyState === 1) this.socket.send(JSON.stringify(frame));
  }

  receive(data) {
    this.heardAt = this.clock.now();
    let frame;
    try {
      frame = JSON.parse(data);
    } catch {
      // Going on could leave a hole in some answer.
      const problem = new ConnectionLost("the server sent a frame that is no JSON", UNREADABLE);
      return this.lose(problem, UNREADABLE);
    }
    if (frame.type === "PING") return this.send({ type: "PONG", ts: frame.ts });
    if (frame.type === "HELLO") {
      this.hello = frame;
      this.watch();
    }
    this.listener.take(this, frame);
    if (frame.type === "HELLO") this.resolve(this);
  }

  /** A server is heard with every heartbeat: one that is not for two is gone. */
  watch() {
    const leftMs = this.heardAt + 2000 * this.hello.heartbeat_s - this.clock.now();
    if (leftMs > 0) this.timer = this.clock.setTimeout(() => this.watch(), leftMs);
    else this.lose(new ConnectionLost("the connection went silent", SILENT), SILENT);
  }

  /** Ends it, for us at once: a peer that is gone would let us wait for its close. */
  lose(problem, code = 1000) {
    const { socket } = this;
    if (!socket) return;
    this.socket = socket.onmessage = socket.onclose = null;
    socket.close(code);
    this.clock.clearTimeout(this.timer);
    this.reject(problem);
    this.listener.onLost(this, problem);
  }
}
