// A client of the predictor's HTTP API for Node 18 or later, without packages: a whole answer, a stream,
// a cancel.
//
//     node examples/client/client.mjs whole  '{"prompt": "What is machine learning?"}'
//     node examples/client/client.mjs stream '{"prompt": "What is machine learning?"}'
//     node examples/client/client.mjs cancel '{"prompt": "What is machine learning?"}'
//
// The second argument has the inputs of docs/api.md; a third is the server's address.
import { randomUUID } from "node:crypto";
import { pathToFileURL } from "node:url";

/** The answer, when it is complete. */
export async function whole(url, input) {
  const reply = await send(`${url}/predictions`, "POST", input);
  const prediction = await reply.json();
  if (prediction.status !== "succeeded") throw new Error(prediction.error);
  return prediction.output.join("");
}

/**
 * The answer, piece by piece as it is made; after a cancel it ends early.
 * Leaving the loop before its end closes the connection, which stops the request as well.
 */
export async function* stream(url, id, input) {
  const reply = await send(`${url}/predictions/${id}`, "PUT", input, { Accept: "text/event-stream" });
  for await (const [name, data] of events(reply.body)) {
    if (name === "output") yield data.chunk;
    else if (name === "completed" && data.status === "failed") throw new Error(data.error);
  }
}

/** Stops a prediction. One that has already ended gives a 404, which is fine here. */
export async function cancel(url, id) {
  await fetch(`${url}/predictions/${id}/cancel`, { method: "POST" });
}

/** Sends the inputs; throws what the server refuses: 422 for a wrong input, 409 when it is full. */
async function send(url, method, input, headers = {}) {
  const reply = await fetch(url, {
    method,
    headers: { "Content-Type": "application/json", ...headers },
    body: JSON.stringify({ input }),
  });
  if (!reply.ok) throw new Error(`HTTP ${reply.status}: ${await reply.text()}`);
  return reply;
}

/** Server-sent events, name and data of each. An event ends with an empty line. */
export async function* events(pieces) {
  const decoder = new TextDecoder();
  let unfinished = "";
  for await (const piece of pieces) {
    const parts = (unfinished + decoder.decode(piece, { stream: true })).split("\n\n");
    unfinished = parts.pop();
    for (const part of parts) {
      const fields = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s)));
      if ("data" in fields) yield [fields.event, JSON.parse(fields.data)];
    }
  }
}

/** Prints an answer; with "cancel", of a request that is cancelled at its first piece. */
async function show(action, input, url) {
  if (action === "whole") {
    console.log(await whole(url, input));
    return;
  }
  const id = randomUUID();
  let cancelled = false;
  for await (const text of stream(url, id, input)) {
    process.stdout.write(text);
    if (action === "cancel" && !cancelled) {
      cancelled = true;
      await cancel(url, id);
    }
  }
  console.log();
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [
    action = "whole",
    input = '{"prompt": "What is machine learning?"}',
    url = "http://localhost:5000",
  ] = process.argv.slice(2);
  if (["whole", "stream", "cancel"].includes(action)) {
    await show(action, JSON.parse(input), url).catch((error) => {
      console.error(error.message);
      process.exitCode = 1;
    });
  } else {
    console.error("usage: client.mjs whole|stream|cancel [INPUT] [URL]");
    process.exitCode = 2;
  }
}
