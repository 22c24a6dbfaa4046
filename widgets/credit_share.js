// CreditShare: one number per response, so every token of it shares that number. See
// credit_share.py.

const LEAST = 2;
const MOST = 64;
const MOST_CHARACTERS = 200; // of a phrase
const EDGES = ".,;:!?\"'()";

const labels = {
  en: {
    title: "Who gets the credit",
    question: "Prompt",
    offered: "Phrases: how much is each pushed?",
    own: "Your own phrase",
    ownHint: "Type words of the answers, or select them in an answer with the mouse.",
    empty: "A phrase needs at least one word.",
    long: (most) => `A phrase holds at most ${most} characters.`,
    use: "Show",
    answer: (i) => `Answer ${i}`,
    right: "right",
    wrong: "wrong",
    tokens: (n) => (n === 1 ? "1 token" : `${n} tokens`),
    push: "each token",
    pushMean: "with the mean per response (A / |y|)",
    held: "holds the phrase",
    credit: "credit of the phrase: sum of the advantages of the answers that hold it",
    creditMean: "the same with the mean per response, for each token of the phrase",
    countRight: "right answers that hold it",
    countWrong: "wrong answers that hold it",
    none: (phrase) => `No answer holds “${phrase}”: nothing is pushed on it.`,
    said: (phrase, right, wrong, sum, credit) =>
      `“${phrase}” stands in ${right} right and ${wrong} wrong: ${sum} = ${credit}.`,
    verdicts: [
      "It becomes less likely, whatever its own worth.",
      "It stays where it is.",
      "It becomes more likely, whatever its own worth.",
    ],
    equal: "All rewards are equal: nothing is pushed.",
  },
  ko: {
    title: "누가 공을 가져가는가",
    question: "프롬프트",
    offered: "구절: 각각 얼마나 밀리나?",
    own: "직접 고른 구절",
    ownHint: "답에 있는 낱말을 입력하거나, 답에서 마우스로 선택하세요.",
    empty: "구절에는 낱말이 하나 이상 있어야 합니다.",
    long: (most) => `구절은 ${most}자까지입니다.`,
    use: "보기",
    answer: (i) => `답 ${i}`,
    right: "정답",
    wrong: "오답",
    tokens: (n) => `토큰 ${n}개`,
    push: "토큰마다",
    pushMean: "응답별 평균일 때 (A / |y|)",
    held: "구절이 있음",
    credit: "구절의 공: 이 구절이 있는 답들의 어드밴티지 합",
    creditMean: "응답별 평균일 때, 구절의 토큰 하나가 받는 합",
    countRight: "이 구절이 있는 정답",
    countWrong: "이 구절이 있는 오답",
    none: (phrase) => `“${phrase}” 구절이 있는 답이 없습니다: 아무 힘도 받지 않습니다.`,
    said: (phrase, right, wrong, sum, credit) =>
      `“${phrase}” 구절은 정답 ${right}개, 오답 ${wrong}개에 있습니다: ${sum} = ${credit}.`,
    verdicts: [
      "구절 자체의 좋고 나쁨과 상관없이 나올 확률이 낮아집니다.",
      "그대로입니다.",
      "구절 자체의 좋고 나쁨과 상관없이 나올 확률이 높아집니다.",
    ],
    equal: "보상이 모두 같습니다: 아무것도 밀리지 않습니다.",
  },
};

function tokensOf(text) {
  return typeof text === "string" ? text.split(/[ \t\r\n\f\v]+/).filter(Boolean) : [];
}

function isLong(phrase) {
  return [...phrase].length > MOST_CHARACTERS;
}

/** The token as it is compared: no letter case, no punctuation at its edges. */
function plainToken(token) {
  let [start, end] = [0, token.length];
  while (start < end && EDGES.includes(token[start])) start++;
  while (end > start && EDGES.includes(token[end - 1])) end--;
  return (token.slice(start, end) || token).toLowerCase();
}

function findSpans(wanted, tokens) {
  const spans = [];
  let start = 0;
  while (start + wanted.length <= tokens.length) {
    const here = start;
    const hit = wanted.every((token, i) => token === tokens[here + i]);
    if (hit) spans.push([start, start + wanted.length]);
    start += hit ? wanted.length : 1;
  }
  return spans;
}

function compute({ answers, rewards, phrase, ddof = 0 }) {
  demand(
    Array.isArray(answers) && isInteger(answers.length, LEAST, MOST),
    `answers must be ${LEAST} to ${MOST} texts`,
  );
  demand(
    Array.isArray(rewards) && rewards.length === answers.length,
    "rewards must hold one number an answer",
  );
  demand(rewards.every((reward) => reward === 0 || reward === 1), "rewards must be 0 or 1");
  const wanted = tokensOf(phrase).map(plainToken);
  demand(wanted.length > 0, "phrase must hold at least one word");
  demand(!isLong(phrase), `phrase must hold at most ${MOST_CHARACTERS} characters`);
  const texts = answers.map(tokensOf);
  demand(texts.every((text) => text.length > 0), "every answer must hold at least one word");

  const spans = texts.map((text) => findSpans(wanted, text.map(plainToken)));
  const { advantages } = groupStatistics(rewards, ddof);
  const lengths = texts.map((text) => text.length);
  const push_mean = advantages.map((a, i) => a / lengths[i]);
  const held = (values) => values.filter((_, i) => spans[i].length > 0);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  return {
    advantages,
    push_mean,
    lengths,
    spans,
    credit: sum(held(advantages)),
    credit_mean: sum(held(push_mean)),
    count_right: held(rewards).filter((reward) => reward === 1).length,
    count_wrong: held(rewards).filter((reward) => reward === 0).length,
  };
}

function build({ body, words, change, extra }) {
  const phrases = extra("phrases") ?? [];
  const question = extra("question");
  const offered = buttonRow(words.offered, phrases, (i) => change({ phrase: phrases[i] }));
  const input = h("input", {
    type: "text",
    class: "rw-text",
    "aria-label": words.own,
    maxlength: MOST_CHARACTERS,
  });
  const complaint = h("span", { role: "status", "aria-live": "polite", class: "rw-said" });
  const entry = h(
    "div",
    { class: "rw-row" },
    input,
    textEntry(input, words.use, pick),
    complaint,
  );
  const std = stdField(words, (ddof) => change({ ddof }));
  const names = [
    ["credit", words.credit],
    ["count-right", words.countRight],
    ["count-wrong", words.countWrong],
    ["credit-mean", words.creditMean],
  ];
  const numbers = Object.fromEntries(names.map(([name]) => [name, readout(name)]));
  const sentence = h("p", { class: "rw-sentence", role: "status", "aria-live": "polite" });
  const list = h("ol", { class: "rw-answers", onpointerup: pickSelected });
  let items = [];

  body.append(
    ...(question ? [h("p", { class: "rw-prompt" }, h("b", {}, `${words.question}: `), question)] : []),
    ...(phrases.length ? [offered.node] : []),
    fieldset(words.own, entry, h("small", {}, words.ownHint)),
    sentence,
    list,
    numberList(names.map(([name, label]) => [label, numbers[name]])),
    std.node,
  );

  function pick(phrase) {
    const chosen = tokensOf(phrase).join(" ");
    const wrong = chosen === "" ? words.empty : isLong(chosen) ? words.long(MOST_CHARACTERS) : "";
    complaint.textContent = wrong;
    if (!wrong) change({ phrase: chosen });
  }

  /** Words selected with the mouse in one answer, widened to whole tokens. */
  function pickSelected() {
    const selection = getSelection();
    if (!selection || selection.isCollapsed) return;
    const range = selection.getRangeAt(0);
    for (const item of items) {
      const chosen = item.tokens.filter((token) => range.intersectsNode(token.firstChild));
      if (chosen.length === 0) continue;
      selection.removeAllRanges();
      pick(chosen.map((token) => token.textContent).join(" "));
      return;
    }
  }

  function makeItem(answer, i) {
    const tokens = tokensOf(answer).map((token) => h("span", { class: "rw-token" }, token));
    const spaced = tokens.flatMap((token, j) => (j ? [" ", token] : [token]));
    const parts = {
      tokens,
      verdict: h("span", { class: "rw-verdict" }),
      held: h("span", { class: "rw-held" }, words.held),
      push: readout(`push-${i + 1}`),
      pushMean: readout(`push-mean-${i + 1}`),
      length: h("span", {}),
    };
    parts.node = h(
      "li",
      { class: "rw-answer", "aria-label": words.answer(i + 1) },
      h("p", { class: "rw-answer-head" }, `${i + 1} `, parts.verdict, " ", parts.length, " ", parts.held),
      h("p", { class: "rw-answer-text" }, ...spaced),
      h(
        "p",
        { class: "rw-answer-push" },
        h("span", {}, `${words.push} `, parts.push),
        " ",
        h("span", {}, `${words.pushMean} `, parts.pushMean),
      ),
    );
    return parts;
  }

  let shownAnswers = "";
  return function update({ answers, rewards, phrase, ddof }, values) {
    if (JSON.stringify(answers) !== shownAnswers) {
      shownAnswers = JSON.stringify(answers);
      items = answers.map(makeItem);
      list.replaceChildren(...items.map((item) => item.node));
    }
    offered.set(phrases.indexOf(phrase));
    if (document.activeElement !== input) input.value = phrase;
    std.set(ddof);
    items.forEach((item, i) => {
      const a = values.advantages[i];
      const held = values.spans[i].length > 0;
      const side = a > 0 ? "positive" : a < 0 ? "negative" : "zero";
      item.node.classList.toggle("rw-holds", held);
      item.verdict.textContent = rewards[i] === 1 ? `✓ ${words.right}` : `✗ ${words.wrong}`;
      item.length.textContent = words.tokens(values.lengths[i]);
      item.held.hidden = !held;
      setReadout(item.push, a, { sign: true });
      setReadout(item.pushMean, values.push_mean[i], { sign: true, digits: 4 });
      item.tokens.forEach((token, j) => {
        const inside = values.spans[i].some(([start, end]) => j >= start && j < end);
        token.className = inside ? `rw-token rw-marked rw-${side}` : "rw-token";
      });
    });
    setReadout(numbers.credit, values.credit, { sign: true });
    setReadout(numbers["credit-mean"], values.credit_mean, { sign: true, digits: 4 });
    setReadout(numbers["count-right"], values.count_right, { digits: 0 });
    setReadout(numbers["count-wrong"], values.count_wrong, { digits: 0 });
    sentence.textContent = describe(rewards, phrase, values);
  };

  function describe(rewards, phrase, values) {
    if (rewards.every((reward) => reward === rewards[0])) return words.equal;
    const { count_right: right, count_wrong: wrong, credit } = values;
    if (right + wrong === 0) return words.none(phrase);
    const size = (reward) => formatNumber(Math.abs(values.advantages[rewards.indexOf(reward)]));
    const up = right ? `${right} × ${size(1)}` : "";
    const down = wrong ? `- ${wrong} × ${size(0)}` : "";
    const sum = [up, down].filter(Boolean).join(" ");
    const flat = Math.abs(credit) < 1e-9;
    return (
      words.said(phrase, right, wrong, sum, formatNumber(credit, { sign: true })) +
      " " +
      words.verdicts[flat ? 1 : credit < 0 ? 0 : 2]
    );
  }
}

function render(context) {
  const asIs = (text) => text;
  return startWidget(
    {
      name: "CreditShare",
      parameters: ["answers", "rewards", "phrase", "ddof"],
      compute,
      labels,
      address: { phrase: ["phrase", asIs, asIs], ddof: ["ddof", String, Number] },
      build,
    },
    context,
  );
}

export { compute, labels };
export default { render };
