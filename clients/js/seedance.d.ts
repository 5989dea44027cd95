/** Types of `seedance-client`. Fields of requests and of usage have their names on the wire. */

export interface Message {
  role: "system" | "user" | "assistant" | "tool" | "developer";
  content?: string | { type: "text"; text: string }[] | null;
  name?: string;
  tool_calls?: unknown[];
  tool_call_id?: string;
}

/** The fields of `INFER_REQ`; what is left out has the server's default. */
export interface Params {
  model?: string;
  /** Text (or token ids) to continue without the chat template, in the place of messages. */
  prompt?: string | number[];
  max_tokens?: number;
  min_tokens?: number;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  seed?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  repetition_penalty?: number;
  logit_bias?: Record<string, number>;
  stop?: string | string[];
  stop_token_ids?: number[];
  ignore_eos?: boolean;
  logprobs?: boolean | number;
  top_logprobs?: number;
  return_token_ids?: boolean;
  tools?: unknown[];
  tool_choice?: unknown;
  response_format?: unknown;
  cache?: "auto" | "bypass" | "only" | "refresh" | "sampled";
  priority?: number;
  timeout_s?: number;
  /** Where a delta may end; `grapheme`: never inside what a reader sees as one character. */
  boundary?: "grapheme" | "utf8";
  /** Whether `Stream.anchor` is kept up to date, and with a digest of the text. */
  anchor?: "plain" | "sha256" | "none";
  /** Tokens that may come beyond those taken; the client's own `window` when left out. */
  window?: number;
}

export interface StreamParams extends Params {
  /**
   * The rest of the prompt, piece by piece, as it comes: it goes on with the last message, which
   * must be a user's, or with `prompt`, or is the one message. The model reads it as it comes.
   */
  pieces?: AsyncIterable<string> | Iterable<string>;
  /** Aborting it cancels the request; the iteration ends with the signal's reason. */
  signal?: AbortSignal;
}

/** The next piece of text; `seq` is the number of the last token that it completes. */
export interface Delta {
  text: string;
  seq: number;
  /** With `return_token_ids`. */
  tokenIds?: number[];
  /** With `logprobs`: an entry a token. */
  logprobs?: { token_id: number; token: string; logprob: number; top?: { token_id: number; token: string; logprob: number }[] }[];
}

export interface CacheOutcome {
  outcome: "miss" | "exact" | "semantic" | "coalesced";
  tier?: string;
  similarity?: number;
  age_s?: number;
  reason?: string;
}

export interface Done {
  finishReason: "stop" | "length" | "tool_calls" | "cancelled" | "error";
  usage: { prompt_tokens: number; completion_tokens: number; total_tokens: number; cached_tokens?: number };
  timing: { queue_ms?: number; ttft_ms?: number; total_ms?: number };
  cache: CacheOutcome;
}

/** A checkpoint: `offset` tokens were sent when the pieces up to `inputId` were taken. */
export interface Anchor {
  inputId: number;
  offset: number;
  /** The server's monotonic clock, in ns. */
  ts: number;
  sha256: string | null;
}

export interface Hello {
  session: string;
  model: string;
  limits: Record<string, number>;
  heartbeat_s: number;
  resume_window_s: number;
}

/**
 * An answer that is streamed. Iterate it once; leaving the loop early cancels it on the server.
 * When its connection is lost it waits for the next one and goes on there.
 *
 * The iteration fails with a `SeedanceError` when the server refused or failed, with a
 * `ConnectionLost` when no connection came for it in time.
 */
export interface Stream extends AsyncIterable<Delta> {
  readonly id: string;
  /** What the cache decided; null until the request was accepted. */
  readonly cache: CacheOutcome | null;
  readonly queuePosition: number | null;
  /** The newest checkpoint, where `anchor` or `pieces` ask for any. */
  readonly anchor: Anchor | null;
  /** How it ended; null until it has. */
  readonly done: Done | null;
  /** Sends the request, if the iteration has not yet; resolves when the server accepted it. */
  start(): Promise<void>;
  /** The whole text: iterates it. */
  text(): Promise<string>;
  /** Asks the server to stop; what it had sent still arrives, and the iteration ends normally. */
  cancel(): void;
}

export interface Clock {
  /** Milliseconds that never go back. */
  now(): number;
  setTimeout(run: () => void, ms: number): unknown;
  clearTimeout(timer: unknown): void;
}

export interface ClientOptions {
  /** Exchanged for a one-use ticket at each connection; for programs and for pages of the server itself. */
  apiKey?: string;
  /** Gets a ticket from your own backend, which has the key; asked at each connection. */
  ticket?: () => string | Promise<string>;
  /** Tokens that a stream may send beyond those that its reader took; 256. 0: no bound but the buffers'. */
  window?: number;
  /** False: a stream ends with its connection. */
  resume?: boolean;
  /** How long a stream waits for another connection before it fails; 30. */
  reconnectTimeoutS?: number;
  /** Bound on a handshake, up to the server's first frame; 10. */
  openTimeoutS?: number;
  /** Hears of every change; with `open` comes the greeting, with the others what went wrong. */
  onState?: (state: "connecting" | "open" | "closed", detail: Hello | Error | null) => void;
  /** For a runtime that has none (Node has one from version 22 on). */
  WebSocket?: new (url: string, protocols: string[]) => unknown;
  fetch?: typeof fetch;
  /** Chance, 0 to 1, for the pauses between two tries. */
  random?: () => number;
  clock?: Clock;
}

export class SeedanceClient {
  /** @param url `http(s)://host[:port][/prefix]`, or the WebSocket address itself. */
  constructor(url: string | URL, options?: ClientOptions);
  readonly url: URL;
  /** The greeting of the server that was connected to last. */
  readonly hello: Hello | null;
  /** Used from the next connection on. */
  apiKey: string | undefined;
  /** An answer to come; the request is sent when it is iterated or started. */
  stream(messages?: string | Message[] | null, params?: StreamParams): Stream;
  /** Connects now, and not at the first stream; one try. */
  connect(): Promise<Hello>;
  /** Ends the connection and all streams; the next stream connects again. */
  close(): void;
}

/** The server refused a request, or failed in it; the codes are those of docs/protocol.md. */
export class SeedanceError extends Error {
  readonly code: string;
  readonly param: string | null;
  readonly limit: number | null;
  readonly retryable: boolean;
  readonly retryAfterS: number | null;
}

/** The connection could not be made, or ended; `code` is the close code where there was one. */
export class ConnectionLost extends Error {
  readonly code: number | null;
}
