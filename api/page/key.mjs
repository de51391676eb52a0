/** Asks for an API key, where the service wants one. The browser keeps it until the person signs out. */

import { html, useRef, useState } from "./vendor/preact.mjs";
import { go } from "./router.mjs";
import { ask, forgetKey, keepKey, wanted } from "./service.mjs";
import { useTitle } from "./shell.mjs";
import { Heading } from "./states.mjs";

export default function Key() {
  useTitle("API key");
  const field = useRef(null);
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    setProblem(refusal(key));
    if (refusal(key)) return field.current.focus();
    setBusy(true);
    const told = await tried(key);
    setBusy(false);
    setProblem(told);
    if (told) field.current.focus();
    else go(wanted());
  };
  return html`<${Heading}>API key<//>
    <form class="card narrow" onSubmit=${send} novalidate>
      <p>This server asks for a key. <code>autotune keys create</code>, run where the server's database is, makes one; who runs the server can.</p>
      <div class="field">
        <label for="key">API key</label>
        <input id="key" ref=${field} type="password" autocomplete="current-password" spellcheck=${false} required
          aria-invalid=${problem ? "true" : undefined} aria-describedby="key-hint key-problem" />
        <p class="hint" id="key-hint">Kept in this browser until you sign out, and sent to this server alone.</p>
        <p class="field-problem" id="key-problem" role="alert">${problem}</p>
      </div>
      <p class="actions"><button type="submit" class="primary" disabled=${isBusy}>${isBusy ? "Asking …" : "Use this key"}</button></p>
    </form>`;
}

/** Why a text can be no key; empty: it may be one. */
function refusal(key) {
  if (!key) return "Enter a key.";
  return /^[\x21-\x7e]+$/.test(key) ? "" : "A key has letters, digits and signs alone, and no spaces.";
}

/** Keep the key if the server takes it; else say why not. */
async function tried(key) {
  keepKey(key);
  try {
    await ask("/v1/jobs?limit=1");
    return "";
  } catch (error) {
    forgetKey();
    return error.status === 401 ? "The server does not know this key, or it has expired." : error.message;
  }
}
