/** What a plot needs to know of the style sheet: a canvas does not read it. */

/**
 * @typedef {object} Look
 * @property {(name: string) => string} color - of a custom property, such as `--ok`
 * @property {boolean} isNarrow - whether there is little room
 * @property {boolean} moves - whether people want things to move
 */

const calm = matchMedia("(prefers-reduced-motion: reduce)");

/** @returns {Look} as the page stands now */
export function lookOf(host) {
  const style = getComputedStyle(document.documentElement);
  return {
    color: (name) => style.getPropertyValue(name).trim(),
    isNarrow: host.clientWidth < 480,
    moves: !calm.matches,
  };
}

/** Text that a canvas takes as it is: `{name|text}` would be read as a style. */
export const plain = (text) => String(text).replaceAll("{", "{\u200b");

/** The parts of an option that all plots have in common. */
export function ground(look, size = 0) {
  return {
    animation: look.moves && size < 500,
    animationDuration: 250,
    animationDurationUpdate: 200,
    textStyle: { color: look.color("--text"), fontFamily: getComputedStyle(document.body).fontFamily, fontSize: 12 },
    grid: { left: 8, right: 20, top: 36, bottom: 30, containLabel: true },
    legend: {
      type: "scroll", top: 0, left: 0, itemWidth: 14, itemHeight: 10, itemGap: 14,
      textStyle: { color: look.color("--text-soft") }, inactiveColor: look.color("--line-strong"),
      pageTextStyle: { color: look.color("--text-soft") }, pageIconColor: look.color("--accent"),
    },
    tooltip: {
      renderMode: "richText", confine: true, backgroundColor: look.color("--surface"), borderColor: look.color("--line-strong"),
      textStyle: { color: look.color("--text"), fontSize: 12, lineHeight: 18 }, padding: [8, 10],
    },
  };
}

/** Beyond this many, points are drawn as one: with a shape for each, a new drawing would hold up the page. */
const MANY = 1500;

/** The parts of a series of points that depend on how many there are. Below 4 pixels they are plain squares, which are quick. */
export const cloud = (count, symbolSize) =>
  count > MANY ? { large: true, largeThreshold: MANY, symbolSize: 3.5 } : { large: false, symbolSize };

/** The series that shows where the keyboard is. */
export const cursor = (look, symbolSize = 18) => ({
  id: CURSOR, type: "scatter", symbol: "circle", symbolSize, silent: true, data: [], z: 9,
  itemStyle: { color: "transparent", borderColor: look.color("--focus"), borderWidth: 3 },
});

/** Id of that series. */
export const CURSOR = "cursor";

/** A value axis with its name beside it. */
export function axis(look, { name, format, ...more }) {
  return {
    type: "value", scale: true, name, nameLocation: "middle", nameGap: 30,
    nameTextStyle: { color: look.color("--text-soft") },
    axisLabel: { color: look.color("--text-soft"), hideOverlap: true, formatter: format },
    axisLine: { show: true, lineStyle: { color: look.color("--line-strong") } },
    axisTick: { show: false },
    splitLine: { lineStyle: { color: look.color("--line") } },
    ...more,
  };
}

/** A value axis that stands upright: its name is above, where it takes no room from the plot. */
export function upright(look, { name, ...more }) {
  const named = axis(look, { name, ...more });
  return {
    ...named, nameLocation: "end", nameGap: 10,
    nameTextStyle: { ...named.nameTextStyle, align: "left" }, axisLine: { show: false },
  };
}

/** Bytes as an axis has them: in the unit that suits the largest. */
export function byteScale(largest) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (largest >= 2 * size) return { unit, size };
  }
  return { unit: "B", size: 1 };
}
