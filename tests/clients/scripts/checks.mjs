// What the Node scripts here share.

import { readFileSync } from "node:fs";
import { isDeepStrictEqual } from "node:util";

export const {
  SEEDANCE_URL: URL,
  SEEDANCE_KEY: KEY,
  SEEDANCE_MODEL: MODEL,
  SEEDANCE_EMBEDDER: EMBEDDER,
} = process.env;
export const PATIENCE_MS = 120_000;

export const PERSON = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 12 },
    age: { type: "integer", minimum: 0, maximum: 120 },
  },
  required: ["name", "age"],
  additionalProperties: false,
};
export const WEATHER = {
  type: "object",
  properties: {
    city: { type: "string", enum: ["Paris", "Rome"] },
    days: { type: "integer", minimum: 1, maximum: 9 },
  },
  required: ["city", "days"],
  additionalProperties: false,
};

/** Ends the script unless the server did what the words say. */
export function expect(isRight, what, got) {
  if (!isRight) throw new Error(`expected ${what}, got ${JSON.stringify(got)}`);
}

export function equal(got, wanted, what) {
  const told = `${what}: ${JSON.stringify(wanted)}`;
  expect(isDeepStrictEqual(got, wanted), told, got);
}

/** The error that a call throws. */
export async function refusal(call) {
  let answer;
  try {
    answer = await call();
  } catch (error) {
    return error;
  }
  throw new Error(`expected a refusal, got ${JSON.stringify(answer)}`);
}

export async function collected(iterable) {
  const items = [];
  for await (const item of iterable) items.push(item);
  return items;
}

/**
 * Runs the parts in order; prints one line of JSON, or says what was wrong and exits with 1.
 *
 * `packages`: whose versions the line tells. `parts`: what each exercises, and how.
 */
export async function run(packages, parts) {
  for (const [name, part] of parts) {
    try {
      await part();
    } catch (error) {
      console.error(error.stack, error.cause ?? "", error.responseBody ?? "");
      console.error(`${name}: ${error.name}: ${error.message}`);
      process.exit(1);
    }
  }
  const versions = { node: process.versions.node };
  for (const name of packages) {
    versions[name] = JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
  }
  console.log(JSON.stringify({ versions, exercised: parts.map(([name]) => name) }));
  process.exit(0);
}
