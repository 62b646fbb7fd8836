// The public API, as any client sees it.

export class ApiError extends Error {}

export class Api {
  constructor(key) {
    this.key = key; // a function: the key may change at any time
  }

  async models() {
    return (await (await this.#get("v1/models")).json()).data;
  }

  async metrics() {
    return (await this.#get("metrics")).text();
  }

  /** Chunks of a streamed chat; aborting the signal closes the request. */
  async *chat(body, signal) {
    const reply = await ask("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.#headers() },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const data of events(reply.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
    throw new ApiError("The connection ended before the answer did.");
  }

  async #get(path) {
    return ask(path, { headers: this.#headers() });
  }

  #headers() {
    const key = this.key();
    return key ? { Authorization: `Bearer ${key}` } : {};
  }
}

async function ask(path, options) {
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `The server answered ${reply.status}.`);
}

/** The data of each server-sent event; comments are skipped. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
