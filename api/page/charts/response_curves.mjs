/** What samples/s would be with another value of each knob, all else as in the best. */

import { html } from "../vendor/preact.mjs";
import { number } from "../format.mjs";
import { rowsOf } from "./figure_data.mjs";

const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [240, 138, 34, 10, 34];

export function ResponseCurves({ figure }) {
  const points = Map.groupBy(rowsOf(figure, "points"), ({ knob }) => knob);
  const known = [...points.values()].flat().flatMap(({ samples_per_second: rate, low, high }) => [rate, low, high]).filter((value) => value !== null);
  const range = [Math.min(...known), Math.max(...known)];
  return html`
    <ul class="legend">
      <li><span class="swatch round fill-1" aria-hidden="true"></span>Measured</li>
      <li><span class="swatch round hollow" aria-hidden="true"></span>Predicted</li>
      <li><span class="swatch round best" aria-hidden="true"></span>The best</li>
    </ul>
    <ul class="curves">
      ${rowsOf(figure, "knobs").map((knob) => html`<li key=${knob.knob}><${Curve} knob=${knob} points=${points.get(knob.knob) ?? []} range=${range} /></li>`)}
    </ul>`;
}

function Curve({ knob, points, range: [least, most] }) {
  const step = (WIDTH - LEFT - 26) / Math.max(1, points.length - 1);
  const x = (place) => (points.length === 1 ? (WIDTH + LEFT) / 2 : LEFT + 8 + step * place);
  const y = (rate) => TOP + (HEIGHT - TOP - BOTTOM) * (most === least ? 0.5 : (most - rate) / (most - least));
  // Long values stand in two rows in turn, so that each has twice the room.
  const isTight = points.some(({ value }) => String(value).length > charactersIn(step));
  const drawn = points.map((point, place) => ({ ...point, x: x(place) }));
  const rated = drawn.filter(({ samples_per_second: rate }) => rate !== null);
  return html`<p class="curve-title"><strong>${knob.knob}</strong> <span class="soft">= ${knob.best}</span></p>
    <svg class="curve" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label=${`${knob.knob}: ${knob.text}`}>
      ${[least, most].map((rate) => html`<line key=${rate} class="grid" x1=${LEFT} x2=${WIDTH} y1=${y(rate)} y2=${y(rate)} /><text class="tick" x=${LEFT - 4} y=${y(rate) + 3}>${number(rate)}</text>`)}
      <polyline points=${rated.map((point) => `${point.x},${y(point.samples_per_second)}`).join(" ")} />
      ${rated.map((point) => point.low !== null && html`<line key=${`i${point.value}`} class="interval" x1=${point.x} x2=${point.x} y1=${y(point.low)} y2=${y(point.high)} />`)}
      ${rated.map((point) => html`<circle key=${point.value} cx=${point.x} cy=${y(point.samples_per_second)} r="4.5" class=${classOf(point, knob)}><title>${textOf(point)}</title></circle>`)}
      ${drawn.map((point, place) => isLabelled(place, points.length) && html`<text key=${`v${point.value}`} class=${`value${point.samples_per_second === null ? " none" : ""}`} x=${point.x} y=${HEIGHT - (isTight && place % 2 ? 4 : 17)}>${shortened(point.value, (isTight ? 2 : 1) * step)}</text>`)}
    </svg>
    <p class="soft curve-text">${knob.text}</p>`;
}

const isLabelled = (place, size) => size <= 6 || place % Math.ceil(size / 6) === 0;

const charactersIn = (width) => Math.max(4, Math.floor(width / 5));

const shortened = (value, width) => (String(value).length > charactersIn(width) ? `${String(value).slice(0, charactersIn(width) - 1)}…` : value);

function classOf(point, knob) {
  if (String(point.value) === String(knob.best)) return "best";
  return point.trial === null ? "predicted" : "measured";
}

function textOf({ value, samples_per_second: rate, low, high, trial, note }) {
  const from = trial === null ? "predicted" : `trial ${trial}`;
  return `${value}: ${number(rate)} [${number(low)}, ${number(high)}] samples/s, ${from}${note ? `; ${note}` : ""}`;
}
