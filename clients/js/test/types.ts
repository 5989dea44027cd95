/** Not run: `tsc` reads it to check that seedance.d.ts says what a program may do. */

import { SeedanceClient, SeedanceError, ConnectionLost } from "../seedance.js";
import type { Delta, Done, Hello, Stream } from "../seedance.js";

const client = new SeedanceClient("http://host", {
  apiKey: "sk-1",
  window: 64,
  onState: (state, detail) => {
    const known: "connecting" | "open" | "closed" = state;
    void [known, detail];
  },
});
const own = new SeedanceClient(new URL("http://host"), { ticket: async () => "ticket", WebSocket });

async function* pieces() {
  yield "piece";
}

export async function use(): Promise<Done | null> {
  const hello: Hello = await client.connect();
  const messages = [{ role: "user" as const, content: hello.model }];
  const { signal } = new AbortController();
  const stream: Stream = client.stream(messages, { pieces: pieces(), max_tokens: 5, signal });
  try {
    for await (const delta of stream) {
      const { text, seq, tokenIds }: Delta = delta;
      void [text.length, seq + 1, tokenIds?.length];
    }
  } catch (error) {
    if (error instanceof SeedanceError && error.retryable) void error.retryAfterS;
    if (error instanceof ConnectionLost) void error.code;
  }
  client.stream(null, { prompt: "continue", cache: "bypass" }).cancel();
  // @ts-expect-error there is no such policy
  client.stream("hi", { cache: "sometimes" });
  // @ts-expect-error there is no such field
  client.stream("hi", { temprature: 1 });
  const text: string = await own.stream("hi").text();
  void text;
  return stream.done;
}
