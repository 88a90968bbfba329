/** Server-sent events from a POST. (EventSource can only GET.) */

/** An error response. */
export class Refused extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @param {string} key @returns {Record<string, string>} */
function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** @param {Response} response */
async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server returned ${response.status}`;
  const seconds = response.headers.get("retry-after");
  throw new Refused(response.status, seconds ? message.replace(/ later$/, ` in about ${seconds} s`) : message);
}

/** @param {string} path @param {string} key */
export async function getJson(path, key) {
  return (await checked(await fetch(path, { headers: headers(key) }))).json();
}

/**
 * Yield the events of a response, in order.
 * @param {string} path @param {unknown} body @param {string} key @param {AbortSignal} signal
 * @returns {AsyncGenerator<any>}
 */
export async function* post(path, body, key, signal) {
  const init = { method: "POST", body: JSON.stringify(body), signal };
  const response = await checked(
    await fetch(path, { ...init, headers: { ...headers(key), "content-type": "application/json" } }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused(response.status, "the response was interrupted");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(response.status, event.error.message);
      yield event;
    }
  }
}
