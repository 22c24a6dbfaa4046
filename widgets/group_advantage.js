// GroupAdvantage: toggle the rewards of a group, watch every advantage move. See group_advantage.py.

const LEAST = 2;
const MOST = 64;

const labels = {
  en: {
    title: "Group advantage",
    examples: "Examples",
    presets: ["6 of 8 correct", "All correct", "All wrong", "One of 8 correct"],
    size: "Group size",
    responses: "Responses: press one to turn right into wrong and back",
    response: (i) => `Response ${i}`,
    right: "right",
    wrong: "wrong",
    reward: (r) => `reward ${r}`,
    mean: "mean",
    stdShort: "std",
    formula: "A = (reward − mean) / std",
    up: "pushed up, sum of the positive",
    down: "pushed down, sum of the negative",
    equal:
      "In this group nothing is learned: all rewards are equal, so every advantage is exactly 0.",
    sides: (k, g, up, down, sum) =>
      `${k} of ${g} right: a right answer is pushed by ${up}, a wrong one by ${down}. ` +
      `Both sides weigh the same: ${sum}.`,
    mixed: (above, below, sum) =>
      `${above} above the mean, ${below} below it. Both sides weigh the same: ${sum}.`,
  },
  ko: {
    title: "그룹 어드밴티지",
    examples: "예시",
    presets: ["8개 중 6개 정답", "모두 정답", "모두 오답", "8개 중 1개 정답"],
    size: "그룹 크기",
    responses: "응답: 누르면 정답과 오답이 바뀝니다",
    response: (i) => `응답 ${i}`,
    right: "정답",
    wrong: "오답",
    reward: (r) => `보상 ${r}`,
    mean: "평균",
    stdShort: "표준편차",
    formula: "A = (보상 − 평균) / 표준편차",
    up: "올리는 힘, 양수의 합",
    down: "내리는 힘, 음수의 합",
    equal: "이 그룹에서는 배우는 것이 없습니다: 보상이 모두 같아 어드밴티지가 모두 정확히 0입니다.",
    sides: (k, g, up, down, sum) =>
      `${g}개 중 ${k}개 정답: 정답은 ${up}, 오답은 ${down}만큼 밀립니다. 양쪽의 무게는 ${sum}으로 같습니다.`,
    mixed: (above, below, sum) =>
      `평균보다 높은 응답 ${above}개, 낮은 응답 ${below}개. 양쪽의 무게는 ${sum}으로 같습니다.`,
  },
};

function compute({ rewards, ddof = 0 }) {
  demand(
    Array.isArray(rewards) && isInteger(rewards.length, LEAST, MOST),
    `rewards must hold ${LEAST} to ${MOST} numbers`,
  );
  demand(rewards.every(Number.isFinite), "rewards must be finite numbers");
  const { mean, std, advantages, equal } = groupStatistics(rewards, ddof);
  const sum = (keep) => advantages.filter(keep).reduce((total, a) => total + a, 0);
  return {
    mean,
    std,
    advantages,
    sum_positive: sum((a) => a > 0),
    sum_negative: sum((a) => a < 0),
    equal,
  };
}

/** The preset's rewards; "all" presets keep the group's size. */
function presetRewards(index, size) {
  const right = [6, size, 0, 1][index];
  const count = index === 1 || index === 2 ? size : 8;
  return Array.from({ length: count }, (_, i) => (i < right ? 1 : 0));
}

function build({ body, words, change }) {
  let rewards = [];
  const presets = buttonRow(words.examples, words.presets, (i) =>
    change({ rewards: presetRewards(i, rewards.length) }),
  );
  // A larger group repeats its last reward, a smaller one drops from the end.
  const size = integerField(words.size, words.slider(words.size), (count) =>
    change({
      rewards: Array.from({ length: count }, (_, i) => rewards[i] ?? rewards[rewards.length - 1]),
    }),
  );
  const std = stdField(words, (ddof) => change({ ddof }));

  const numbers = { mean: readout("mean"), std: readout("std") };
  const sides = ["positive", "negative"].map((side) => ({
    side,
    number: readout(`sum-${side}`),
    bar: h("span", { class: `rw-fill rw-${side}` }),
  }));
  const sentence = h("p", { class: "rw-sentence", role: "status", "aria-live": "polite" });
  const cards = [];
  const grid = h("div", {
    class: "rw-cards",
    role: "group",
    "aria-label": words.responses,
    onkeydown: moveFocus,
  });

  function toggle(i) {
    change({ rewards: rewards.map((reward, j) => (j === i ? (reward > 0 ? 0 : 1) : reward)) });
  }

  function moveFocus(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const here = cards.findIndex((card) => card.node === document.activeElement);
    const count = rewards.length;
    const target = { Home: 0, End: count - 1 }[event.key] ?? here + (steps[event.key] ?? NaN);
    if (here < 0 || !(target >= 0 && target < count)) return;
    event.preventDefault();
    cards[target].node.focus();
  }

  function makeCard(i) {
    const advantage = readout(`advantage-${i + 1}`);
    advantage.id = newId();
    const reward = h("span", { class: "rw-reward", id: newId() });
    const fill = h("span", { class: "rw-fill" });
    const node = h(
      "button",
      {
        type: "button",
        class: "rw-card",
        "aria-label": words.response(i + 1),
        "aria-describedby": `${reward.id} ${advantage.id}`,
        onclick: () => toggle(i),
      },
      h("span", { class: "rw-index", "aria-hidden": "true" }, `${i + 1}`),
      reward,
      h("span", { class: "rw-bar", "aria-hidden": "true" }, fill),
      advantage,
    );
    return { node, reward, fill, advantage };
  }

  body.append(
    presets.node,
    h("div", { class: "rw-columns" }, size.node, std.node),
    h("p", { class: "rw-formula" }, words.formula),
    numberList([
      [words.mean, numbers.mean],
      [words.stdShort, numbers.std],
    ]),
    grid,
    h(
      "div",
      { class: "rw-sides" },
      ...sides.map(({ side, number, bar }) =>
        h(
          "div",
          { class: "rw-side" },
          h("span", {}, (side === "positive" ? "▲ " : "▼ ") + words[side === "positive" ? "up" : "down"]),
          number,
          h("span", { class: "rw-track", "aria-hidden": "true" }, bar),
        ),
      ),
    ),
    sentence,
  );

  return function update(parameters, values) {
    ({ rewards } = parameters);
    const count = rewards.length;
    const same = (preset) => preset.length === count && preset.every((r, i) => r === rewards[i]);
    presets.set([0, 1, 2, 3].findIndex((i) => same(presetRewards(i, count))));
    size.set(count, LEAST, MOST);
    std.set(parameters.ddof);
    setReadout(numbers.mean, values.mean);
    setReadout(numbers.std, values.std);

    while (cards.length > count) cards.pop().node.remove();
    while (cards.length < count) {
      cards.push(makeCard(cards.length));
      grid.append(cards[cards.length - 1].node);
    }
    grid.classList.toggle("rw-many", count > 16);
    const largest = Math.max(1, ...values.advantages.map(Math.abs));
    cards.forEach((card, i) => {
      const a = values.advantages[i];
      const reward = rewards[i];
      const mark = reward === 1 ? "✓ " : reward === 0 ? "✗ " : "";
      const word = reward === 1 ? words.right : reward === 0 ? words.wrong : "";
      card.node.setAttribute("aria-pressed", String(reward > 0));
      card.reward.replaceChildren(
        h("span", { "aria-hidden": "true" }, `${mark}${shortNumber(reward)}`),
        h("span", { class: "rw-hidden" }, `${word} ${words.reward(shortNumber(reward))}`),
      );
      card.fill.className = `rw-fill rw-${a > 0 ? "positive" : a < 0 ? "negative" : "zero"}`;
      card.fill.style.height = `${(50 * Math.abs(a)) / largest}%`;
      setReadout(card.advantage, a, { sign: true });
    });

    const heaviest = Math.max(values.sum_positive, -values.sum_negative) || 1;
    for (const { side, number, bar } of sides) {
      const value = values[`sum_${side}`];
      setReadout(number, value, { sign: true });
      bar.style.width = `${(100 * Math.abs(value)) / heaviest}%`;
    }
    sentence.textContent = describe(rewards, values);
  };

  function describe(rewards, values) {
    const show = (value) => formatNumber(value, { sign: true });
    const sum = formatNumber(values.sum_positive);
    if (values.equal) return words.equal;
    if (rewards.every((reward) => reward === 0 || reward === 1)) {
      const right = rewards.filter((reward) => reward === 1).length;
      const of = (reward) => show(values.advantages[rewards.indexOf(reward)]);
      return words.sides(right, rewards.length, of(1), of(0), sum);
    }
    const count = (keep) => values.advantages.filter(keep).length;
    return words.mixed(count((a) => a > 0), count((a) => a < 0), sum);
  }
}

function shortNumber(value) {
  return String(Number(value.toPrecision(3)));
}

/** In the address: "11111100", or numbers apart by commas. */
function encodeRewards(rewards) {
  const binary = rewards.every((reward) => reward === 0 || reward === 1);
  return rewards.join(binary ? "" : ",");
}

function decodeRewards(text) {
  return (text.includes(",") ? text.split(",") : [...text]).map((part) =>
    part.trim() === "" ? NaN : Number(part),
  );
}

function render(context) {
  return startWidget(
    {
      name: "GroupAdvantage",
      parameters: ["rewards", "ddof"],
      compute,
      labels,
      address: {
        rewards: ["rewards", encodeRewards, decodeRewards],
        ddof: ["ddof", String, Number],
      },
      build,
    },
    context,
  );
}

export { compute, labels };
export default { render };
