/** The best configuration in the format of a framework: to look at, copy, or download. */

import { html, useEffect, useRef, useState } from "./vendor/preact.mjs";
import { ask, send } from "./service.mjs";
import { say } from "./shell.mjs";
import { ProblemNote } from "./states.mjs";

/** Format -> what it is called, and the name of its file. */
const FORMATS = {
  json: ["Best configuration (JSON)", "best-config.json"],
  deepspeed: ["DeepSpeed", "ds_config.json"],
  "accelerate-fsdp": ["Accelerate with FSDP", "accelerate_fsdp.yaml"],
  "accelerate-deepspeed": ["Accelerate with DeepSpeed", "accelerate_deepspeed.yaml"],
  transformers: ["Transformers", "training_arguments.json"],
  torchtitan: ["torchtitan", "torchtitan.sh"],
  megatron: ["Megatron-LM", "megatron.sh"],
  lightning: ["Lightning", "lightning_trainer.py"],
  torch: ["PyTorch", "train.py"],
  ray: ["Ray Train", "ray_train.py"],
  slurm: ["Slurm", "launch.sbatch"],
  torchrun: ["torchrun", "launch.sh"],
};

/**
 * @param {object} props
 * @param {string} props.job
 * @param {any} props.version - of the best: what was read before is old when it changes
 */
export function Exports({ job, version }) {
  const [format, setFormat] = useState("json");
  const [isOpen, setOpen] = useState(false);
  const formats = useFormats(isOpen);
  const { file, problem, load } = useExport(job, format, version, isOpen);
  const name = FORMATS[format]?.[1] ?? `best.${format}`;
  const onToggle = (event) => setOpen(event.currentTarget.open);
  return html`<section class="exports" aria-labelledby="exports-title">
    <div class="chart-top">
      <h3 id="exports-title">Take it away</h3>
      <label class="inline">Format
        <select value=${format} onChange=${(event) => setFormat(event.target.value)}>
          ${formats.map((value) => html`<option key=${value} value=${value} selected=${value === format}>${FORMATS[value]?.[0] ?? value}</option>`)}
        </select>
      </label>
      <span class="actions">
        <button type="button" onClick=${() => load((found) => copied(found.text))}>Copy</button>
        <button type="button" onClick=${() => load((found) => download(name, found.text))}>Download</button>
      </span>
    </div>
    <${ProblemNote} problem=${problem} />
    ${file && file.notes.length > 0 && html`<ul class="notes">${file.notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>`}
    <details open=${isOpen} onToggle=${onToggle}>
      <summary>What is in it</summary>
      ${file && html`<pre class="file" tabindex="0" role="region" aria-label="Content of the file">${file.text}</pre>`}
    </details>
  </section>`;
}

/** Those that are known here, until the service was asked what it has. */
function useFormats(isWanted) {
  const [formats, setFormats] = useState(Object.keys(FORMATS));
  useEffect(() => void (isWanted && ask("/v1/choices").then(({ exports }) => setFormats(exports), () => {})), [isWanted]);
  return formats;
}

/** The file, read when somebody wants it: of a large job it takes the server seconds to make. */
function useExport(job, format, version, isWanted) {
  const [state, setState] = useState({ key: "", file: null, problem: null });
  const key = `${job} ${format} ${version}`;
  const wanted = useRef(key);
  wanted.current = key;
  const put = (changes) => wanted.current === key && setState({ key, file: null, problem: null, ...changes });
  const load = async (use = () => {}) => {
    if (state.key === key && state.file) return use(state.file);
    try {
      const file = await read(job, format);
      put({ file });
      use(file);
    } catch (problem) {
      put({ problem });
    }
  };
  useEffect(() => void (isWanted && load()), [key, isWanted]);
  const isCurrent = state.key.startsWith(`${job} ${format} `);
  return { file: isCurrent ? state.file : null, problem: isCurrent ? state.problem : null, load };
}

async function read(job, format) {
  const answer = await send(`/v1/jobs/${job}/export?format=${encodeURIComponent(format)}`);
  const notes = (answer.headers.get("Autotune-Note") ?? "").split("; ").filter(Boolean);
  return { text: await answer.text(), notes };
}

/** Put a text on the clipboard. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser does not let this page use the clipboard: select the text and copy it.");
  }
}

/** Have the browser save a text as a file. */
export function download(name, text, type = "text/plain") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
