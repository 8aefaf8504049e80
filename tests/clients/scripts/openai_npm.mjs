// The cases of OpenAI's client for JavaScript. Reports as reporting.py does: a line of JSON for each case.
import OpenAI, { AuthenticationError, BadRequestError, NotFoundError, toFile } from "openai";
import assert from "node:assert/strict";

const { CLIENTS_URL: url, CLIENTS_MODEL: model, CLIENTS_KEY: apiKey, CLIENTS_ONLY: only = "" } = process.env;
const CASE_MS = 180_000;
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
const hello = [{ role: "user", content: "Say hello." }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
  required: ["city"],
};
const weather = { type: "function", function: { name: "get_weather", description: "Get the weather.", parameters } };

const cases = {
  async models() {
    const listed = [];
    for await (const one of client.models.list()) listed.push(one.id);
    assert.deepEqual(listed, [model]);
  },

  async chat_with_defaults() {
    // With a seed, since a model this small may end at once, with an empty text.
    const answer = await client.chat.completions.create({ model, messages: hello, seed: 7 });
    assert.ok(answer.choices[0].message.content);
    assert.ok(["stop", "length"].includes(answer.choices[0].finish_reason));
  },

  async chat_stream_is_the_whole_answer() {
    const asked = { model, messages: hello, max_tokens: 12, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    let text = "";
    let usage;
    const stream = await client.chat.completions.create({
      ...asked,
      stream: true,
      stream_options: { include_usage: true },
    });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(usage, whole.usage);
  },

  async tool_by_name() {
    const answer = await client.chat.completions.create({
      model,
      messages: hello,
      tools: [weather],
      tool_choice: { type: "function", function: { name: "get_weather" } },
    });
    const [call] = answer.choices[0].message.tool_calls;
    assert.ok(["Paris", "Oslo"].includes(JSON.parse(call.function.arguments).city));
  },

  async tools_streamed() {
    const runner = client.chat.completions.stream({
      model,
      messages: hello,
      tools: [weather],
      tool_choice: { type: "function", function: { name: "get_weather" } },
    });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");
  },

  async run_tools() {
    const cities = [];
    const callable = { ...weather.function, function: ({ city }) => (cities.push(city), "20 degrees"), parse: JSON.parse };
    const runner = client.chat.completions.runTools({
      model,
      messages: hello,
      tools: [{ type: "function", function: callable }],
      tool_choice: { type: "function", function: { name: "get_weather" } },
    });
    await runner.done();
    assert.equal(cities.length, 1); // a function that is named is run once, and its result returned
  },

  async json_schema() {
    const schema = {
      type: "object",
      properties: { mood: { enum: ["good", "bad"] } },
      required: ["mood"],
    };
    const answer = await client.chat.completions.create({
      model,
      messages: hello,
      response_format: { type: "json_schema", json_schema: { name: "verdict", strict: true, schema } },
    });
    assert.ok(["good", "bad"].includes(JSON.parse(answer.choices[0].message.content).mood));
  },

  async completion_of_lists() {
    const answer = await client.completions.create({ model, prompt: ["Once", "In the night"], max_tokens: 4 });
    assert.deepEqual(
      answer.choices.map((choice) => choice.index),
      [0, 1],
    );
  },

  async completion_streamed() {
    let text = "";
    for await (const chunk of await client.completions.create({ model, prompt: "Once", max_tokens: 6, stream: true }))
      text += chunk.choices[0]?.text ?? "";
    assert.ok(text);
  },

  async abort_ends_a_stream() {
    const stream = await client.completions.create({ model, prompt: "Once", max_tokens: 200, stream: true });
    for await (const chunk of stream) {
      assert.ok(chunk.id);
      stream.controller.abort();
    }
  },

  async embeddings() {
    const asked = { model, input: ["Once", "Once upon a time"], pooling: "last", dimensions: 16 };
    const made = await client.embeddings.create(asked); // asks for base64, and unpacks it
    const plain = await client.embeddings.create({ ...asked, encoding_format: "float" });
    assert.deepEqual(made.data.map((one) => one.index), [0, 1]);
    for (const [number, one] of made.data.entries()) {
      const square = one.embedding.reduce((sum, value) => sum + value * value, 0);
      assert.equal(one.embedding.length, 16);
      assert.ok(Math.abs(square - 1) < 1e-5);
      one.embedding.forEach((value, at) => assert.ok(Math.abs(value - plain.data[number].embedding[at]) < 1e-6));
    }
  },

  async embeddings_of_a_model_that_is_not_made_for_them_are_refused() {
    await assert.rejects(client.embeddings.create({ model, input: "Once" }), BadRequestError);
  },

  async errors_have_their_classes() {
    await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages: hello }), NotFoundError);
    await assert.rejects(client.completions.create({ model, prompt: "Once", temperature: -1 }), BadRequestError);
    const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: "another key than that" });
    await assert.rejects(stranger.models.list(), AuthenticationError);
  },

  async responses() {
    const answer = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 16 });
    assert.ok(answer.output_text);
    assert.equal((await client.responses.retrieve(answer.id)).output_text, answer.output_text);
  },

  async responses_streamed() {
    let text = "";
    let final;
    const stream = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 16, stream: true });
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") text += event.delta;
      if (["response.completed", "response.incomplete"].includes(event.type)) final = event.response;
    }
    assert.equal(text, final.output.find((item) => item.type === "message").content[0].text);
  },

  async batch_of_a_file() {
    const body = { model, messages: hello, max_tokens: 4 };
    const row = JSON.stringify({ custom_id: "row-1", method: "POST", url: "/v1/chat/completions", body });
    const file = await client.files.create({ file: await toFile(Buffer.from(row), "night.jsonl"), purpose: "batch" });
    let batch = await client.batches.create({
      input_file_id: file.id,
      endpoint: "/v1/chat/completions",
      completion_window: "24h",
    });
    while (["validating", "in_progress", "finalizing"].includes(batch.status)) {
      await new Promise((resolve) => setTimeout(resolve, 300));
      batch = await client.batches.retrieve(batch.id);
    }
    assert.equal(batch.status, "completed");
    const result = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
    assert.ok(result.response.body.choices[0].message.content);
  },
};

function late(name) {
  return new Promise((_, reject) =>
    setTimeout(() => reject(new Error(`${name}: no end after ${CASE_MS / 1000} s`)), CASE_MS).unref(),
  );
}

for (const [name, run] of Object.entries(cases)) {
  if (only && !only.split(" ").includes(name)) continue;
  let error = "";
  try {
    await Promise.race([run(), late(name)]);
  } catch (caught) {
    console.error(caught);
    error = `${caught.constructor.name}: ${caught.message}`.replace(/\s+/g, " ").slice(0, 1500) || "an error";
  }
  console.log(JSON.stringify({ case: name, error }).replace('{"case":', '{"case": '));
}
console.log('{"end": true}');
