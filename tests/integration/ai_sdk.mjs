// The AI SDK on a server, whose address is the argument, by one of four providers; prints what it got as JSON.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, provider, task, modules] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, stepCountIs, streamText, tool } = await load("ai");
const { z } = await load("zod");

const options = { baseURL: `${url}/v1`, apiKey: "any" };
const models = {
  chat: async () => (await load("@ai-sdk/openai")).createOpenAI(options).chat("m"),
  responses: async () => (await load("@ai-sdk/openai")).createOpenAI(options).responses("m"),
  anthropic: async () => (await load("@ai-sdk/anthropic")).createAnthropic(options)("m"),
  compatible: async () =>
    (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({ ...options, name: "m" })("m"),
};
const model = await models[provider]();
const weather = tool({
  description: "Returns the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

const tasks = {
  // A streamed answer with a call, its result, and the turn after it.
  tools: async () => {
    const result = streamText({
      model,
      prompt: "How is the weather in Rome?",
      tools: { weather },
      stopWhen: stepCountIs(3),
      maxRetries: 0,
    });
    let pieces = 0;
    for await (const part of result.fullStream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") pieces += 1;
    }
    const steps = await result.steps;
    return { text: await result.text, pieces, steps: steps.length };
  },
  picture: async () => {
    const content = [
      { type: "text", text: "What is this?" },
      { type: "image", image: pixel, mediaType: "image/png" },
    ];
    const messages = [{ role: "user", content }];
    try {
      return { text: (await generateText({ model, messages, maxRetries: 0 })).text };
    } catch (error) {
      return { error: error.message, status: error.statusCode };
    }
  },
  cancel: async () => {
    const leaving = new AbortController();
    const abortSignal = leaving.signal;
    const result = streamText({
      model,
      prompt: "Speak.",
      tools: { weather },
      abortSignal,
      maxRetries: 0,
    });
    for await (const part of result.fullStream) {
      if (part.type === "text-delta") leaving.abort();
      if (part.type === "abort") return { aborted: true };
    }
    return { aborted: false };
  },
};
console.log(JSON.stringify(await tasks[task]()));
