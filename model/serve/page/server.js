// What the page asks of the server that it came from: server-sent events and JSON, with the API key
// that the user has typed, which is kept in this module's memory and nowhere else.

let key = "";

export const setKey = (text) => { key = text; };

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, { body, signal } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, signal,
    body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
    credentials: "omit" });
  if (!answer.ok) throw new Refused(answer.status, await reason(answer));
  return answer;
}

async function reason(answer) {
  try {
    const { error } = await answer.json();
    return String(error.message).slice(0, 500);
  } catch {
    return `The server says ${answer.status} ${answer.statusText}.`;
  }
}

// Yields {event, data} as they come.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const parts = rest.split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const fields = { event: "message", data: "" };
        for (const line of part.split(/\r?\n/)) {
          const at = line.indexOf(":");
          const name = line.slice(0, at);
          if (at > 0 && name in fields) {
            const text = line.slice(at + 1).replace(/^ /, "");
            fields[name] = name === "data" && fields.data ? `${fields.data}\n${text}` : text;
          }
        }
        if (fields.data) yield fields;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
