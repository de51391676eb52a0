/** Several jobs in one picture: what each measured, and the best of each over its trials. */

import { html, useMemo } from "../vendor/preact.mjs";
import { line, lines, linkTo } from "../describe.mjs";
import { bytes, number, rate } from "../format.mjs";
import { course } from "../standing.mjs";
import { Canvas } from "../charts/canvas.mjs";
import { FigureCard } from "../charts/card.mjs";
import { axis, byteScale, cloud, cursor, ground, plain, upright } from "../charts/look.mjs";

const SYMBOLS = ["circle", "rect", "triangle", "diamond", "roundRect", "arrow", "pin", "emptyCircle"];

/** Points of a plot: of which job, which row, and where. */
const marks = (subjects, at) => subjects.flatMap(({ points }, place) => rowsOf(points).map((row) => ({ place, row, at: at(points, row) })));

function rowsOf(points) {
  const { columns, size } = points;
  return Array.from({ length: size }, (_, row) => row).filter((row) => columns.rate[row] !== null && columns.peak[row] !== null && !points.isRepeat(row));
}

const nameOf = ({ job }) => `${job.model} ${job.id}`;

export function JobsMeasured({ subjects }) {
  const plot = useMemo(() => {
    const { unit, size } = byteScale(Math.max(0, ...marks(subjects, ({ columns }, row) => columns.peak[row]).map(({ at }) => at)));
    const found = marks(subjects, (points, row) => [points.columns.peak[row] / size, points.rate(row)]);
    const series = (look) => subjects.map((subject, place) => scatter(subject, place, found, look));
    return plotOf(subjects, found, series, { x: `Peak memory (${unit})`, y: "samples/s" });
  }, [subjects]);
  const tables = () => subjects.map((subject) => ({
    caption: nameOf(subject), rows: rowsOf(subject.points),
    columns: [
      { key: "number", title: "Trial", numeric: true, value: (row) => subject.points.columns.number[row] },
      { key: "rate", title: "samples/s", numeric: true, value: (row) => subject.points.rate(row), cell: (row) => number(subject.points.rate(row), 4) },
      { key: "peak", title: "Memory", numeric: true, value: (row) => subject.points.columns.peak[row], cell: (row) => bytes(subject.points.columns.peak[row]) },
    ],
  }));
  const title = "Throughput against memory";
  return html`<${FigureCard} name="compared_throughput_memory" title=${title} summary=${summaryOf(subjects)} tables=${tables}><${Canvas} plot=${plot} label=${title} /><//>`;
}

export function JobsBest({ subjects }) {
  const courses = useMemo(() => subjects.map(({ points, job }) => course(points, job.request).filter(({ best }) => best !== null)), [subjects]);
  const plot = useMemo(() => {
    const at = ({ points }, { row, best }) => [points.columns.number[row], points.objective === "memory" ? best / 2 ** 20 : best];
    const found = subjects.flatMap((subject, place) => courses[place].map((step) => ({ place, row: step.row, at: at(subject, step) })));
    const series = (look) => subjects.map((subject, place) => steps(subject, place, found, look));
    return plotOf(subjects, found, series, { x: "Trial", y: subjects[0]?.points.objective === "memory" ? "MiB" : "samples/s" });
  }, [subjects, courses]);
  const tables = () => subjects.map((subject, place) => ({
    caption: nameOf(subject), rows: courses[place].filter(({ isBest }) => isBest),
    columns: [
      { key: "trial", title: "Trial", numeric: true, value: ({ row }) => row },
      { key: "best", title: "Best from there on", numeric: true, value: ({ best }) => best, cell: ({ best }) => (subject.points.objective === "memory" ? bytes(best) : rate(best)) },
    ],
  }));
  const title = "Best so far, over trials";
  return html`<${FigureCard} name="compared_best_so_far" title=${title} summary=${summaryOf(subjects)} tables=${tables}><${Canvas} plot=${plot} label=${title} /><//>`;
}

function summaryOf(subjects) {
  const best = subjects.map(({ job, points }) => `${job.model} (${job.id}): ${points.best ? rate(points.best.rate.mean) : "nothing yet"}`);
  return `The best of each. ${best.join("; ")}.`;
}

function plotOf(subjects, found, series, { x, y }) {
  const link = ({ place, row }) => linkTo(subjects[place].job.id, subjects[place].points, row);
  const told = ({ place, row }) => `${nameOf(subjects[place])}: ${line(subjects[place].points, row)}`;
  return {
    option: (look) => {
      const base = ground(look, found.length);
      return {
        ...base,
        grid: { ...base.grid, top: 60, bottom: 36 },
        tooltip: { ...base.tooltip, trigger: "item", formatter: ({ data }) => (data?.length > 3 ? plain(`${nameOf(subjects[data[2]])}\n${lines(subjects[data[2]].points, data[3])}`) : "") },
        xAxis: axis(look, { name: x, format: (value) => number(value) }),
        yAxis: upright(look, { name: y, format: (value) => number(value) }),
        series: [
          ...series(look),
          cursor(look),
        ],
      };
    },
    items: () => found.map((mark) => ({ at: mark.at, text: told(mark), href: link(mark) })),
    link: ({ data }) => (data?.length > 3 ? link({ place: data[2], row: data[3] }) : undefined),
  };
}

const dataOf = (found, place) => found.filter((mark) => mark.place === place).map(({ at, row }) => [...at, place, row]);

function scatter(subject, place, found, look) {
  return {
    id: `job-${place}`, name: plain(nameOf(subject)), type: "scatter", data: dataOf(found, place), symbol: SYMBOLS[place % SYMBOLS.length],
    ...cloud(found.length, 8), itemStyle: { color: look.color(`--series-${place + 1}`), opacity: 0.75 },
  };
}

function steps(subject, place, found, look) {
  const color = look.color(`--series-${place + 1}`);
  return {
    id: `job-${place}`, name: plain(nameOf(subject)), type: "line", step: "end", data: dataOf(found, place).sort((one, other) => one[0] - other[0]),
    symbol: SYMBOLS[place % SYMBOLS.length], showSymbol: false, lineStyle: { color, width: 2.5, type: place % 2 ? "dashed" : "solid" }, itemStyle: { color },
  };
}
