// The box that talks to the model, through the endpoints that any OpenAI client uses.
// What the model and the user write becomes text nodes, never markup.

import { Refused, ask, events } from "./server.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  // `locked` is called where the server wants a key.
  constructor(model, locked) {
    this.model = model;
    this.locked = locked;
    this.messages = [];
    this.running = null;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort(); else this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.send();
      }
    });
    $("clear").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      $("talk").replaceChildren();
    });
    $("mode").addEventListener("change", () => { this.messages = []; });
  }

  async send() {
    const text = $("prompt").value;
    if (!text.trim()) return;
    const isChat = $("mode").value === "chat";
    this.line("you", text);
    $("prompt").value = "";
    if (isChat) this.messages.push({ role: "user", content: text });
    const line = this.line(isChat ? "it" : "it text", isChat ? "" : text);
    this.running = new AbortController();
    $("send").textContent = "Stop";
    const began = performance.now();
    try {
      const { written, usage, first } = await this.stream(isChat, text, line);
      if (isChat) this.messages.push({ role: "assistant", content: written });
      const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
      if (usage) {
        this.line("note", `${usage.completion_tokens} tokens in `
          + `${((performance.now() - began) / 1000).toFixed(1)} s, the first after `
          + `${Math.round(first - began)} ms; ${cached} of ${usage.prompt_tokens} prompt tokens `
          + "were cached");
      }
    } catch (error) {
      if (isChat) this.messages.pop();
      if (error.name === "AbortError") this.line("note", "stopped");
      else {
        this.line("bad", error.message);
        if (error instanceof Refused && error.status === 401) this.locked();
      }
    } finally {
      this.running = null;
      $("send").textContent = "Send";
    }
  }

  async stream(isChat, text, line) {
    const about = { model: this.model, stream: true, stream_options: { include_usage: true },
      max_tokens: Number($("tokens").value) || 128, temperature: Number($("heat").value) || 0 };
    const body = isChat ? { ...about, messages: this.messages } : { ...about, prompt: text };
    const path = isChat ? "v1/chat/completions" : "v1/completions";
    const answer = await ask(path, { body, signal: this.running.signal });
    let [written, usage, first, reasoning] = ["", null, performance.now(), null];
    for await (const { data } of events(answer)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(String(chunk.error.message));
      const choice = chunk.choices?.[0];
      const piece = isChat ? choice?.delta?.content : choice?.text;
      const thought = choice?.delta?.reasoning_content;
      if (thought) {
        reasoning ??= line.parentNode.insertBefore(document.createElement("div"), line);
        reasoning.className = "note";
        reasoning.append(thought);
      }
      if (piece) {
        if (!written) first = performance.now();
        written += piece;
        line.append(piece);
        $("talk").scrollTop = $("talk").scrollHeight;
      }
      usage = chunk.usage ?? usage;
    }
    return { written, usage, first };
  }

  line(kind, text) {
    const line = document.createElement("div");
    line.className = kind;
    line.append(text);
    $("talk").append(line);
    $("talk").scrollTop = $("talk").scrollHeight;
    return line;
  }
}
