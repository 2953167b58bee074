// Chat with the engine. Text of the model and of users is set as text, never as HTML.
"use strict";

const at = (id) => document.getElementById(id);
const CHART_SECONDS = 60;
let messages = JSON.parse(sessionStorage.getItem("messages") || "[]");
let model = "";
let running = null; // the AbortController of the answer that comes
const rates = new Map(); // tokens by second

function element(tag, className, parent) {
  const made = document.createElement(tag);
  made.className = className;
  if (parent) parent.append(made);
  return made;
}

function headers() {
  const key = at("key").value || sessionStorage.getItem("key") || "";
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// The message of an error envelope, or what else there is.
async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function showUser(content) {
  const article = element("article", "user", at("log"));
  if (typeof content === "string") {
    article.textContent = content;
    return;
  }
  for (const part of content) {
    if (part.type === "text") article.append(part.text);
    else element("img", "", article).src = part.image_url.url;
  }
}

// Where an answer goes: its parts, and what is told of it.
function openAnswer() {
  const article = element("article", "assistant", at("log"));
  const parts = {};
  for (const name of ["reasoning", "content", "calls", "error", "facts"]) {
    parts[name] = element("div", name, article);
  }
  return { article, ...parts };
}

// Appends text whose first `accepted` characters (code points) are drafts that were accepted.
function append(place, text, accepted) {
  const characters = [...text];
  const drafted = characters.slice(0, accepted).join("");
  if (drafted) element("span", "accepted", place).textContent = drafted;
  if (accepted < characters.length) place.append(characters.slice(accepted).join(""));
}

function follow(change) {
  const log = at("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function drawChart() {
  const canvas = at("chart"), context = canvas.getContext("2d");
  const now = Math.floor(Date.now() / 1000), width = canvas.width / CHART_SECONDS;
  for (const second of rates.keys()) if (second < now - CHART_SECONDS) rates.delete(second);
  const most = Math.max(1, ...rates.values());
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = getComputedStyle(document.body).color;
  for (const [second, count] of rates) {
    const height = (count / most) * canvas.height;
    const left = (CHART_SECONDS - 1 - (now - second)) * width;
    context.fillRect(left, canvas.height - height, Math.max(1, width - 1), height);
  }
  canvas.setAttribute("aria-label", `tokens per second, last minute, at most ${most}`);
}

// Events of a stream, one after the other.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment
      if (block === "data: [DONE]") return;
      yield JSON.parse(block.slice(6));
    }
  }
}

function request() {
  const body = {
    model, messages, stream: true, return_token_ids: true,
    stream_options: { include_usage: true, include_accepted: true },
  };
  for (const name of ["temperature", "top_p", "seed", "max_tokens"]) {
    if (at(name).value !== "") body[name] = Number(at(name).value);
  }
  return body;
}

async function answer() {
  const shown = openAnswer(), began = performance.now();
  let first = 0, last = 0, tokens = 0, steps = 0, usage = null, end = null;
  const message = { role: "assistant", content: "" };
  const tell = () => {
    const seconds = (last - first) / 1000, facts = [];
    if (first) facts.push(`first token after ${((first - began) / 1000).toFixed(2)} s`);
    if (seconds > 0) facts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    if (steps) facts.push(`${(tokens / steps).toFixed(2)} tokens a step`);
    if (usage) facts.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
    if (end) facts.push(end === "length" ? "cut at the limit" : end);
    shown.facts.textContent = facts.join(" · ");
  };
  running = new AbortController();
  setBusy(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      for (const choice of event.choices) {
        const { delta, accepted, token_ids: ids = [] } = choice;
        if (ids.length) {
          last = performance.now();
          first = first || last;
          tokens += ids.length;
          steps += 1;
          const second = Math.floor(Date.now() / 1000);
          rates.set(second, (rates.get(second) || 0) + ids.length);
        }
        follow(() => {
          if (delta.reasoning_content) {
            append(shown.reasoning, delta.reasoning_content, accepted.reasoning_content);
          }
          if (delta.content) append(shown.content, delta.content, accepted ? accepted.content : 0);
          for (const call of delta.tool_calls || []) {
            if (call.function.name) shown.calls.append(`${call.function.name} `);
            shown.calls.append(call.function.arguments);
          }
        });
        message.content += delta.content || "";
        end = choice.finish_reason || end;
      }
      follow(tell);
    }
  } catch (error) {
    if (error.name === "AbortError") end = "stopped";
    else shown.error.textContent = error.message;
    tell();
  } finally {
    running = null;
    setBusy(false);
  }
  const retry = element("button", "retry", shown.article);
  retry.type = "button";
  retry.textContent = "Retry";
  retry.onclick = () => {
    if (running) return;
    shown.article.remove();
    while (messages.length && messages.at(-1).role === "assistant") messages.pop();
    answer();
  };
  document.querySelectorAll(".retry").forEach((other) => other !== retry && other.remove());
  if (message.content) messages.push(message);
  keep();
}

function keep() {
  try {
    sessionStorage.setItem("messages", JSON.stringify(messages));
  } catch {
    sessionStorage.removeItem("messages"); // images can be more than it holds
  }
}

function setBusy(isBusy) {
  at("send").hidden = isBusy;
  at("stop").hidden = !isBusy;
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function send() {
  const text = at("text").value.trim(), files = [...at("files").files];
  if (running || (!text && !files.length)) return;
  const urls = await Promise.all(files.map(asDataUrl));
  const images = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  const content = images.length ? [...images, { type: "text", text }] : text;
  messages.push({ role: "user", content });
  follow(() => showUser(content));
  at("text").value = at("files").value = "";
  keep();
  await answer();
}

async function start() {
  for (const message of messages) {
    if (message.role === "user") showUser(message.content);
    else openAnswer().content.textContent = message.content;
  }
  const response = await fetch("server_info", { headers: headers() });
  if (!response.ok) {
    at("model").textContent = "InkRT: give the API key in the settings";
    return;
  }
  const info = await response.json();
  model = info.models[0];
  at("model").textContent = `${model} · ${info.engine.target} · drafts: ${info.speculation}`;
  at("images").hidden = !info.engine.reads.includes("vision");
}

at("form").onsubmit = (event) => {
  event.preventDefault();
  send();
};
at("text").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && running) running.abort();
};
at("stop").onclick = () => running && running.abort();
at("clear").onclick = () => {
  if (running) running.abort();
  messages = [];
  keep();
  at("log").replaceChildren();
};
at("key").onchange = () => {
  sessionStorage.setItem("key", at("key").value);
  start();
};
setInterval(drawChart, 1000);
start();
