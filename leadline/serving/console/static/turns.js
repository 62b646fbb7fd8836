// What a turn looks like: reasoning folded, text, tool calls, the count of tokens.

import { element, show } from "./markdown.js";

export const number = new Intl.NumberFormat("en");

/** A turn in the transcript: the user's, a tool's, or one that an answer grows in. */
export class Turn {
  constructor(list, role) {
    this.node = element("li");
    this.node.className = `turn ${role}`;
    const name = element("h3", { user: "You", assistant: "Model", tool: "Tools", error: "Error" }[role]);
    name.className = "hidden";
    this.body = element("div");
    this.body.className = "body";
    this.node.append(name, this.body);
    list.append(this.node);
  }

  /** Text as it stands. */
  plain(text) {
    const node = element("p", text);
    node.className = "plain";
    this.body.append(node);
  }
}

/** The turn of an answer, drawn at most once a frame. */
export class AnswerTurn extends Turn {
  message = { role: "assistant", content: "", reasoning_content: "", tool_calls: [] };
  #frame = 0;
  #parts = {};
  #began = performance.now();
  #first = 0;
  #thought = 0;

  constructor(list) {
    super(list, "assistant");
    this.node.classList.add("streaming");
    this.node.setAttribute("aria-busy", "true");
  }

  /** Take in one chunk of the stream. */
  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const { delta } = choice;
    const { message } = this;
    const thought = delta.reasoning_content ?? delta.reasoning; // by --reasoning-field
    if (thought || delta.content || delta.tool_calls) this.#first ||= performance.now();
    if (thought) message.reasoning_content += thought;
    if (delta.content) message.content += delta.content;
    for (const piece of delta.tool_calls ?? []) {
      const call = (message.tool_calls[piece.index] ??= { id: piece.id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += piece.function.name ?? "";
      call.function.arguments += piece.function.arguments ?? "";
    }
    if ((message.content || message.tool_calls.length) && !this.#thought) this.#thought = performance.now();
    if (choice.finish_reason) this.finish = choice.finish_reason;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  get hasAnswer() {
    const { content, reasoning_content, tool_calls } = this.message;
    return Boolean(content || reasoning_content || tool_calls.length);
  }

  /** The answer ended, by itself or not: `note` says how. */
  close(note) {
    cancelAnimationFrame(this.#frame);
    this.#draw();
    this.node.classList.remove("streaming");
    this.node.removeAttribute("aria-busy");
    const facts = this.#facts();
    if (note) facts.push(note);
    const line = element("p", facts.join("\u00a0\u00a0·  "));
    line.className = "usage";
    if (this.usage) line.prepend(depthMark(this.usage.total_tokens));
    this.body.append(line);
  }

  #facts() {
    const facts = [];
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: said } = this.usage;
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      const thought = this.usage.completion_tokens_details?.reasoning_tokens ?? 0;
      const elapsed = (performance.now() - this.#first) / 1000;
      facts.push(`prompt ${number.format(prompt)}, cached ${number.format(cached)}`);
      facts.push(`answer ${number.format(said)}${thought ? `, thinking ${number.format(thought)}` : ""}`);
      if (elapsed > 0.1) facts.push(`${number.format(Math.round(said / elapsed))} tokens/s`);
    }
    if (this.#first) facts.push(`first after ${seconds(this.#first - this.#began)}`);
    if (this.finish === "length") facts.push("cut at the limit");
    return facts;
  }

  #draw() {
    this.#frame = 0;
    const { reasoning_content: reasoning, content, tool_calls: calls } = this.message;
    if (reasoning) {
      const part = (this.#parts.reasoning ??= this.#thinking());
      part.text.textContent = reasoning;
      part.summary.textContent = this.#thought
        ? `Thought for ${seconds(this.#thought - this.#first)}`
        : "Thinking";
    }
    if (content) show((this.#parts.content ??= this.#part("prose")), content);
    calls.forEach((call, i) => {
      const part = (this.#parts[i] ??= this.#call());
      part.name.textContent = call.function.name;
      part.text.textContent = pretty(call.function.arguments);
    });
  }

  #part(name) {
    const node = element("div");
    node.className = name;
    this.body.append(node);
    return node;
  }

  #thinking() {
    const summary = element("summary");
    const text = element("div");
    const node = element("details", summary, text);
    node.className = "thinking";
    this.body.prepend(node);
    return { summary, text };
  }

  #call() {
    const name = element("strong");
    const text = element("pre");
    text.tabIndex = 0;
    const node = this.#part("call");
    node.append(element("p", "calls ", name), text);
    return { name, text };
  }

  /** Ask for the results of the calls; `done` gets the tool messages. */
  askForResults(done) {
    const fields = this.message.tool_calls.map((call) => {
      const field = element("textarea");
      field.rows = 2;
      const label = element("label", `Result of ${call.function.name}`, field);
      return { call, field, label };
    });
    const button = element("button", fields.length > 1 ? "Send results" : "Send result");
    button.className = "primary";
    const form = element("form", ...fields.map(({ label }) => label), button);
    form.className = "results";
    form.addEventListener("submit", (submitted) => {
      submitted.preventDefault();
      form.remove();
      done(fields.map(({ call, field }) => ({ role: "tool", tool_call_id: call.id, content: field.value })));
    });
    this.body.append(form);
    fields[0].field.focus();
  }
}

function seconds(milliseconds) {
  return `${(milliseconds / 1000).toFixed(milliseconds < 1000 ? 2 : 1)} s`;
}

/** How deep the context is after a turn; it hangs on the line beside it. */
function depthMark(tokens) {
  const mark = element("span", number.format(tokens));
  mark.className = "mark";
  mark.title = "Tokens of context so far";
  return mark;
}

/** JSON laid out, or as much of it as has come. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
