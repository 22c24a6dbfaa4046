// RareSuccess: how far one success in G stands out, and what bounds it. See rare_success.py.

const LEAST = 2;
const MOST = 256;
const WRONG_TURN = 2;

const labels = {
  en: {
    title: "A rare success",
    size: "Group size G",
    successes: "Successes k",
    axis: "The curve runs over",
    overSize: "group size G, for this k",
    overSuccesses: "successes k, for this G",
    groupSize: "group size G",
    successCount: "successes k",
    success: "advantage of a success",
    failure: "advantage of a failure",
    bound: "largest advantage in any group of G",
    share: "share of successes, k / G",
    cantelli: "Cantelli's bound on that share, 1 / (1 + A²)",
    lines: ["advantage of a success", "largest in G:", "Cantelli's bound at this share, √(G/k − 1)", "2, the wrong turn"],
    plot: (x, a, bound) =>
      `Advantage of a success over ${x}. At this setting it is ${a}, and ${bound} is the largest possible.`,
    table: "The curve as a table",
    boundFormulas: ["√(G − 1)", "(G − 1) / √G"],
    wrongTurn: "A wrong turn: “standardised values lie within 2.”",
    wrongBody: (g, lone) =>
      `Nothing keeps them there. One success in ${g} gets ${lone}, and the larger the group, the more.`,
    met: (a, share) =>
      `What holds is Cantelli's bound: at most ${share} of the answers can lie ${a} or more above the mean. ` +
      `Exactly ${share} of them do: the bound is met.`,
    notMet: (a, share, bound) =>
      `Cantelli's bound counts in population stds. With the sample std, ${a} gives a bound of ${bound}, ` +
      `above the share of ${share}: true, but not met.`,
  },
  ko: {
    title: "드문 성공",
    size: "그룹 크기 G",
    successes: "성공 수 k",
    axis: "곡선의 가로축",
    overSize: "그룹 크기 G (k 고정)",
    overSuccesses: "성공 수 k (G 고정)",
    groupSize: "그룹 크기 G",
    successCount: "성공 수 k",
    success: "성공의 어드밴티지",
    failure: "실패의 어드밴티지",
    bound: "크기 G인 그룹에서 가능한 최댓값",
    share: "성공 비율, k / G",
    cantelli: "그 비율에 대한 칸텔리 상한, 1 / (1 + A²)",
    lines: ["성공의 어드밴티지", "G에서의 최댓값:", "이 비율에서의 칸텔리 상한, √(G/k − 1)", "2, 잘못된 길"],
    plot: (x, a, bound) =>
      `${x}에 따른 성공의 어드밴티지. 지금 설정에서는 ${a}이고 가능한 최댓값은 ${bound}입니다.`,
    table: "곡선을 표로 보기",
    boundFormulas: ["√(G − 1)", "(G − 1) / √G"],
    wrongTurn: "잘못된 길: “표준화한 값은 2 안에 있다.”",
    wrongBody: (g, lone) =>
      `그렇게 묶어 두는 것은 없습니다. ${g}개 중 하나뿐인 성공은 ${lone}을 받고, 그룹이 클수록 더 커집니다.`,
    met: (a, share) =>
      `성립하는 것은 칸텔리 부등식입니다: 평균보다 ${a} 이상 높은 응답의 비율은 많아야 ${share}입니다. ` +
      `실제 비율도 정확히 ${share}이므로 상한에 닿습니다.`,
    notMet: (a, share, bound) =>
      `칸텔리 상한은 모표준편차 단위로 셉니다. 표본표준편차로는 ${a}에서 상한이 ${bound}로, ` +
      `실제 비율 ${share}보다 큽니다: 맞는 말이지만 닿지는 않습니다.`,
  },
};

/** The advantage of a success: with k of G, sqrt((G - k) / k), less with the sample std. */
function advantageOf(size, successes, ddof) {
  const shrink = ddof ? Math.sqrt((size - 1) / size) : 1;
  return Math.sqrt((size - successes) / successes) * shrink;
}

/** Every whole number at first, then ever wider apart as the curve flattens; `last` too. */
function curvePoints(first, last) {
  const points = [];
  for (let x = first; x < last; x += Math.max(1, Math.floor((x - first) / 8))) points.push(x);
  return [...points, last];
}

function compute({ group_size, successes, ddof = 0, over = "group_size" }) {
  demand(isInteger(group_size, LEAST, MOST), `group_size must be ${LEAST} to ${MOST}`);
  demand(isInteger(successes, 1, group_size - 1), "successes must be 1 to group_size - 1");
  demand(ddof === 0 || ddof === 1, "ddof must be 0 or 1");
  demand(["group_size", "successes"].includes(over), "over must be group_size or successes");
  const bySize = over === "group_size";
  const x = bySize ? curvePoints(successes + 1, MOST) : curvePoints(1, group_size - 1);
  const pairs = x.map((value) => (bySize ? [value, successes] : [group_size, value]));
  const success = advantageOf(group_size, successes, ddof);
  return {
    advantage_success: success,
    advantage_failure: (-success * successes) / (group_size - successes),
    bound: advantageOf(group_size, 1, ddof),
    share: successes / group_size,
    cantelli: 1 / (1 + success ** 2),
    curve: {
      x,
      advantage: pairs.map(([size, count]) => advantageOf(size, count, ddof)),
      bound: pairs.map(([size]) => advantageOf(size, 1, ddof)),
      cantelli: pairs.map(([size, count]) => Math.sqrt(size / count - 1)),
    },
  };
}

function build({ body, words, change }) {
  let now = null;
  const size = integerField(words.size, words.slider(words.size), (group_size) =>
    change({ group_size, successes: Math.min(now.successes, group_size - 1) }),
  );
  const successes = integerField(words.successes, words.slider(words.successes), (count) =>
    change({ successes: count }),
  );
  const std = stdField(words, (ddof) => change({ ddof }));
  const axis = choiceField(
    words.axis,
    [
      { value: "group_size", label: words.overSize },
      { value: "successes", label: words.overSuccesses },
    ],
    (over) => change({ over }),
  );
  const names = [
    ["group-size", words.groupSize],
    ["successes", words.successCount],
    ["advantage-success", words.success],
    ["advantage-failure", words.failure],
    ["bound", words.bound],
    ["share", words.share],
    ["cantelli", words.cantelli],
  ];
  const numbers = Object.fromEntries(names.map(([name]) => [name, readout(name)]));
  const plot = h("div", { class: "rw-plot" });
  const legend = h("ul", { class: "rw-legend" });
  const table = h("table", {});
  const wrong = h("p", {});
  const bound = h("p", { role: "status", "aria-live": "polite" });

  body.append(
    h("div", { class: "rw-columns" }, size.node, successes.node, std.node, axis.node),
    numberList(names.map(([name, label]) => [label, numbers[name]])),
    plot,
    legend,
    h("details", {}, h("summary", {}, words.table), h("div", { class: "rw-scroll", tabindex: 0, role: "region", "aria-label": words.table }, table)),
    h("div", { class: "rw-sentence" }, h("strong", {}, words.wrongTurn), wrong, bound),
  );

  // Drawn in real pixels, so that its text keeps its size on a narrow screen.
  let drawn = 0;
  const draw = () => {
    const width = Math.max(240, Math.floor(plot.clientWidth) || 640);
    drawn = width;
    plot.replaceChildren(drawPlot(now, words, width));
  };
  if (typeof ResizeObserver !== "undefined")
    new ResizeObserver(() => {
      if (now && Math.floor(plot.clientWidth) !== drawn) draw();
    }).observe(plot);

  return function update(parameters, values) {
    const { group_size, ddof, over } = parameters;
    now = { ...parameters, values };
    size.set(group_size, LEAST, MOST);
    successes.set(parameters.successes, 1, group_size - 1);
    std.set(ddof);
    axis.set(over);
    setReadout(numbers["group-size"], group_size, { digits: 0 });
    setReadout(numbers.successes, parameters.successes, { digits: 0 });
    setReadout(numbers["advantage-success"], values.advantage_success, { sign: true });
    setReadout(numbers["advantage-failure"], values.advantage_failure, { sign: true });
    setReadout(numbers.bound, values.bound);
    setReadout(numbers.share, values.share);
    setReadout(numbers.cantelli, values.cantelli);

    const show = (value) => formatNumber(value, { sign: true });
    const share = formatNumber(values.share);
    wrong.textContent = words.wrongBody(group_size, show(values.bound));
    bound.textContent = ddof
      ? words.notMet(show(values.advantage_success), share, formatNumber(values.cantelli))
      : words.met(show(values.advantage_success), share);
    drawLegend(legend, words, ddof);
    fillTable(table, words, now);
    draw();
  };
}

const LINE_CLASSES = ["rw-line-a", "rw-line-bound", "rw-line-cantelli", "rw-line-two"];

function drawLegend(legend, words, ddof) {
  const items = words.lines.map((label, i) => {
    const sample = h(
      "svg",
      { class: "rw-sample", viewBox: "0 0 36 12", "aria-hidden": "true" },
      i === 2
        ? h("g", {}, ...[8, 28].map((cx) => h("circle", { cx, cy: 6, r: 4, class: LINE_CLASSES[i] })))
        : h("path", { d: "M0 6H36", class: LINE_CLASSES[i] }),
    );
    return h("li", {}, sample, i === 1 ? `${label} ${words.boundFormulas[ddof]}` : label);
  });
  legend.replaceChildren(...items);
}

function fillTable(table, words, { values, over }) {
  const { x, advantage, bound } = values.curve;
  const head = [over === "group_size" ? words.groupSize : words.successCount, words.success, words.bound];
  // Powers of two, and the ends: enough to read the shape.
  const rows = x
    .map((value, i) => [value, advantage[i], bound[i]])
    .filter(([value], i) => i === 0 || i === x.length - 1 || Number.isInteger(Math.log2(value)));
  table.replaceChildren(
    h("thead", {}, h("tr", {}, ...head.map((label) => h("th", { scope: "col" }, label)))),
    h(
      "tbody",
      {},
      ...rows.map(([value, ...rest]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, String(value)),
          ...rest.map((number) => h("td", {}, formatNumber(number))),
        ),
      ),
    ),
  );
}

function drawPlot({ values, over, group_size, successes }, words, width) {
  const { curve } = values;
  const height = width < 480 ? 240 : 300;
  const box = { left: 36, right: width - 14, top: 12, bottom: height - 44 };
  const bySize = over === "group_size";
  const [first, last] = [curve.x[0], curve.x[curve.x.length - 1]];
  const top = 1.08 * Math.max(2.5, ...curve.bound);
  const scale = bySize ? Math.log2 : (value) => value;
  const span = scale(last) - scale(first);
  const px = (value) =>
    span === 0
      ? (box.left + box.right) / 2
      : box.left + 6 + ((box.right - box.left - 12) * (scale(value) - scale(first))) / span;
  const py = (value) => box.bottom - ((box.bottom - box.top) * value) / top;
  const path = (heights) =>
    curve.x.map((x, i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(heights[i]).toFixed(1)}`).join("");

  const step = [0.5, 1, 2, 4].find((s) => top / s <= 6);
  const yTicks = Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
  const powers = [1, 2, 4, 8, 16, 32, 64, 128, 256].filter((x) => x >= first && x <= last);
  const stride = Math.max(1, Math.ceil((last - first) / 6));
  const linear = Array.from({ length: 7 }, (_, i) => first + i * stride).filter((x) => x <= last);
  const xTicks = bySize ? (powers.length ? powers : [first]) : linear;
  const here = { x: px(bySize ? group_size : successes), y: py(values.advantage_success) };
  const axisName = bySize ? words.groupSize : words.successCount;
  const show = (value) => formatNumber(value);
  const labelLeft = bySize ? here.x > box.left + 60 : here.x > box.right - 60;
  // Open circles on the curve: few enough to tell apart.
  const every = Math.max(1, Math.ceil(curve.x.length / (width / 40)));

  return h(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      "aria-label": words.plot(axisName, show(values.advantage_success), show(values.bound)),
    },
    ...yTicks.map((y) =>
      h(
        "g",
        {},
        h("line", { x1: box.left, x2: box.right, y1: py(y), y2: py(y), class: "rw-grid" }),
        h("text", { x: box.left - 6, y: py(y) + 4, "text-anchor": "end" }, String(y)),
      ),
    ),
    ...xTicks.map((x) =>
      h("text", { x: px(x), y: box.bottom + 18, "text-anchor": "middle" }, String(x)),
    ),
    h("text", { x: (box.left + box.right) / 2, y: height - 8, "text-anchor": "middle" }, axisName),
    h("line", { x1: box.left, x2: box.right, y1: py(WRONG_TURN), y2: py(WRONG_TURN), class: "rw-line-two" }),
    h("line", { x1: here.x, x2: here.x, y1: box.bottom, y2: here.y, class: "rw-grid" }),
    h("path", { d: path(curve.advantage), class: "rw-line-a" }),
    h("path", { d: path(curve.bound), class: "rw-line-bound" }),
    ...curve.x
      .filter((_, i) => i % every === 0)
      .map((x) =>
        h("circle", { cx: px(x), cy: py(curve.cantelli[curve.x.indexOf(x)]), r: 4, class: "rw-line-cantelli" }),
      ),
    h("circle", { cx: here.x, cy: here.y, r: 6, class: "rw-dot" }),
    h(
      "text",
      {
        // Beside the curve: above its rising side, or its falling one, unless the frame is near.
        x: here.x + (labelLeft ? -8 : 8),
        y: Math.max(here.y - 12, 14),
        "text-anchor": labelLeft ? "end" : "start",
        class: "rw-dot-label",
      },
      formatNumber(values.advantage_success, { sign: true }),
    ),
  );
}

function render(context) {
  return startWidget(
    {
      name: "RareSuccess",
      parameters: ["group_size", "successes", "ddof", "over"],
      compute,
      labels,
      address: {
        group_size: ["G", String, Number],
        successes: ["k", String, Number],
        ddof: ["ddof", String, Number],
        over: ["over", (over) => over.replace("_", "-"), (text) => text.replace("-", "_")],
      },
      build,
    },
    context,
  );
}

export { compute, labels };
export default { render };
