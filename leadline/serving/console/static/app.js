// The page: settings, composer, one conversation at a time.

import { Api } from "./api.js";
import { Gauges } from "./gauges.js";
import { element } from "./markdown.js";
import { AnswerTurn, Turn, number } from "./turns.js";

const $ = (id) => document.getElementById(id);
const api = new Api(() => $("key").value.trim());
let models = [];
let messages = [];
let running = null; // the AbortController of the answer that streams

// The conversation.

async function ask(added) {
  if (running) return;
  const chat = messages; // another one once "New chat" was pressed
  let body;
  try {
    body = request([...chat, ...added]);
  } catch (error) {
    fail(`Tools are not valid JSON: ${error.message}`, added);
    return;
  }
  $("empty").hidden = true;
  const turn = new AnswerTurn($("turns"));
  setRunning(new AbortController());
  follow(true);
  const announce = announcer();
  let failure = null;
  try {
    for await (const chunk of api.chat(body, running.signal)) {
      turn.add(chunk);
      announce(turn.message.content);
      requestAnimationFrame(() => follow());
    }
  } catch (error) {
    failure = error;
  }
  setRunning(null);
  if (chat !== messages) return;
  announce(turn.message.content, true);
  if (failure && !turn.hasAnswer && failure.name !== "AbortError") {
    turn.node.remove();
    fail(failure.message, added);
    return;
  }
  const note = failure && (failure.name === "AbortError" ? "stopped" : failure.message);
  turn.close(note);
  say(note ? `Answer ends: ${note}` : "Answer complete");
  chat.push(...added, sent(turn.message));
  showContext(turn.usage);
  if (turn.finish === "tool_calls") {
    turn.askForResults((results) => {
      const node = new Turn($("turns"), "tool");
      for (const { content } of results) node.plain(content);
      ask(results);
    });
  } else if (document.activeElement === document.body) {
    $("prompt").focus(); // the stop button had it
  }
  follow();
}

function request(all) {
  const system = $("system").value.trim();
  const tools = $("tools").value.trim();
  const effort = $("effort").value;
  const limit = $("limit").valueAsNumber;
  return {
    model: $("model").value || undefined,
    messages: system ? [{ role: "system", content: system }, ...all] : all,
    ...(tools && { tools: JSON.parse(tools) }),
    ...(effort && { reasoning_effort: effort }),
    ...(limit && { max_tokens: limit }),
  };
}

/** An answer as it goes back with the next request. */
function sent({ content, reasoning_content, tool_calls }) {
  return {
    role: "assistant",
    content,
    ...(reasoning_content && { reasoning_content }),
    ...(tool_calls.length && { tool_calls }),
  };
}

/** Tell of an error; a message that found no answer goes back into its box. */
function fail(text, [{ role, content }]) {
  new Turn($("turns"), "error").plain(text);
  if (role === "user") $("prompt").value ||= content;
  $("empty").hidden = true;
  say(text);
  follow(true);
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  document.body.classList.toggle("running", Boolean(controller));
}

function newChat() {
  running?.abort();
  messages = [];
  $("turns").replaceChildren();
  $("empty").hidden = false;
  showContext(null);
  $("prompt").focus();
}

// What is said aloud, and what stays in sight.

function say(text) {
  const line = element("p", text);
  $("announcer").append(line);
  while ($("announcer").children.length > 20) $("announcer").firstChild.remove();
}

/** Reads an answer out paragraph by paragraph, not word by word. */
function announcer() {
  let said = 0;
  return (text, isWhole = false) => {
    const end = isWhole ? text.length : text.lastIndexOf("\n\n");
    if (end <= said) return;
    say(text.slice(said, end).trim());
    said = end;
  };
}

let isAtEnd = true;
$("scroll").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("scroll");
  isAtEnd = scrollHeight - scrollTop - clientHeight < 60;
});

function follow(always = false) {
  if (always || isAtEnd) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function showContext(usage) {
  const limit = models.find((model) => model.id === $("model").value)?.max_model_len;
  const used = usage?.total_tokens ?? 0;
  $("context").textContent = limit ? `${number.format(used)} of ${number.format(limit)} tokens deep` : "";
}

// Controls.

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  new Turn($("turns"), "user").plain(text);
  ask([{ role: "user", content: text }]);
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});

if (!CSS.supports("field-sizing", "content")) {
  $("prompt").addEventListener("input", ({ target }) => {
    target.style.height = "auto";
    target.style.height = `${target.scrollHeight}px`;
  });
}

addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (document.body.classList.contains("panel-open")) togglePanel();
});

$("stop").addEventListener("click", () => running?.abort());
$("new-chat").addEventListener("click", newChat);

function togglePanel() {
  const open = document.body.classList.toggle("panel-open");
  $("panel-toggle").setAttribute("aria-expanded", open);
  if (!open) $("panel-toggle").focus();
}
$("panel-toggle").addEventListener("click", togglePanel);

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light");
function showTheme() {
  $("theme").setAttribute("aria-pressed", theme() === "dark");
}
$("theme").addEventListener("click", () => {
  const next = theme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("leadline-theme", next);
  showTheme();
});
prefersDark.addEventListener("change", showTheme);
showTheme();

// The key and the models it opens.

async function loadModels() {
  try {
    models = await api.models();
  } catch (error) {
    $("depth").textContent = error.message;
    return;
  }
  const chosen = $("model").value;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id, false, id === chosen)));
  const [{ id, max_model_len: limit }] = models;
  $("depth").textContent = `${id} holds ${number.format(limit)} tokens of context.`;
  showContext(null);
}

$("key").value = sessionStorage.getItem("leadline-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("leadline-key", $("key").value.trim());
  loadModels();
});

loadModels();
new Gauges($("gauges"), $("health"), api).start();
