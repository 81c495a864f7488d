// OpenAI's client of npm on a server, whose address is the argument; prints how many checks have passed.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is machine learning?" }];
const fixed = { model: "demo", temperature: 0 };
const begins = /^Machine learning is/;
const parameters = { type: "object", properties: { on: { type: "boolean" } }, required: ["on"] };

const checks = [
  async () => {
    const stream = await client.chat.completions.create({ ...fixed, messages, stream: true });
    let text = "";
    let reason = null;
    for await (const chunk of stream) {
      text += chunk.choices[0].delta.content ?? "";
      reason = chunk.choices[0].finish_reason ?? reason;
    }
    assert.match(text, begins);
    assert.equal(reason, "stop");
  },
  async () => {
    const answer = await client.chat.completions.create({
      ...fixed,
      messages,
      tools: [{ type: "function", function: { name: "heat", parameters } }],
      tool_choice: { type: "function", function: { name: "heat" } },
    });
    const call = answer.choices[0].message.tool_calls[0];
    assert.equal(typeof JSON.parse(call.function.arguments).on, "boolean");
  },
  async () => {
    const stream = client.responses.stream({ ...fixed, input: messages });
    let text = "";
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.match(text, begins);
    assert.equal(text, (await stream.finalResponse()).output_text);
  },
  async () => {
    await assert.rejects(
      client.completions.create({ model: "other", prompt: "x" }),
      (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
    );
  },
];

for (const check of checks) await check();
console.log(JSON.stringify({ checks: checks.length }));
