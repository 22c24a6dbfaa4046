// AnswerBox: type the result of an exercise, get a word back, and a hint for a known wrong turn.
// See answer_box.py, whose parser this one follows rule by rule.

const MOST_CHARACTERS = 100;

const labels = {
  en: {
    title: "Check yourself",
    browser: "checked in the browser",
    rlcore: "checked by Python",
    answer: "Your answer",
    check: "Check",
    help: "A number, such as 84,000, -1.732, 3/4 or sqrt(7).",
    status: {
      right: "Right",
      "wrong-turn": "Not yet",
      wrong: "Not yet",
      empty: "Nothing typed",
      unreadable: "Not read",
      "decimal-comma": "Not read",
    },
    feedback: {
      right: (value) => `Yes, ${value}.`,
      wrong: (value) => `${value} is not it. Go through the steps once more.`,
      empty: () => "Type a number first.",
      unreadable: () =>
        "This could not be read as a number. Digits, + - * /, brackets and sqrt( ) are understood; leave units out.",
      "decimal-comma": () =>
        "A comma only separates thousands here (96,000). Write decimals with a point: 0.577.",
    },
  },
  ko: {
    title: "스스로 확인하기",
    browser: "브라우저에서 확인",
    rlcore: "파이썬에서 확인",
    answer: "나의 답",
    check: "확인",
    help: "84,000, -1.732, 3/4, sqrt(7)처럼 수를 입력하세요.",
    status: {
      right: "맞음",
      "wrong-turn": "아직 아님",
      wrong: "아직 아님",
      empty: "입력 없음",
      unreadable: "읽지 못함",
      "decimal-comma": "읽지 못함",
    },
    feedback: {
      right: (value) => `네, ${value}입니다.`,
      wrong: (value) => `${value}은(는) 답이 아닙니다. 과정을 한 번 더 따라가 보세요.`,
      empty: () => "먼저 수를 입력하세요.",
      unreadable: () =>
        "수로 읽을 수 없습니다. 숫자, + - * /, 괄호, sqrt( )만 쓸 수 있고 단위는 빼 주세요.",
      "decimal-comma": () =>
        "쉼표는 천 단위 구분에만 씁니다(96,000). 소수는 점으로 쓰세요: 0.577.",
    },
  },
};

class Unreadable extends Error {}

/** { status: "number", value }, or { status: "empty" | "unreadable" | "decimal-comma" }. */
function readNumber(typed) {
  const text = typed
    .replace(/[\u2212\u2013]/g, "-")
    .replace(/[×·]/g, "*")
    .replace(/[÷\u2044\u2215]/g, "/")
    .replace(/[ \t\r\n\f\v\u00a0\u2009\u202f]+/g, " ")
    .replace(/^ | $/g, "");
  if (!text) return { status: "empty", value: null };
  const unreadable = { status: "unreadable", value: null };
  if ([...text].length > MOST_CHARACTERS) return unreadable;
  const pattern = /sqrt|[-+*/()√]|(?:[0-9][0-9,]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?/y;
  const tokens = [];
  let position = 0;
  while (position < text.length) {
    pattern.lastIndex = position;
    const match = pattern.exec(text);
    if (match) tokens.push(match[0]);
    else if (text[position] !== " ") return unreadable;
    position += match ? match[0].length : 1;
  }
  const thousands = /^[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?$/;
  if (tokens.some((token) => token.includes(",") && !thousands.test(token)))
    return { status: "decimal-comma", value: null };
  try {
    const rest = tokens.map((token) => token.replaceAll(",", ""));
    const value = readSum(rest);
    return rest.length || !Number.isFinite(value) ? unreadable : { status: "number", value };
  } catch (error) {
    if (error instanceof Unreadable) return unreadable;
    throw error;
  }
}

// Each takes what it reads from the front of `tokens`.
function readSum(tokens) {
  let value = readProduct(tokens);
  while (tokens[0] === "+" || tokens[0] === "-") {
    const sign = tokens.shift() === "+" ? 1 : -1;
    value += sign * readProduct(tokens);
  }
  return value;
}

function readProduct(tokens) {
  let value = readFactor(tokens);
  while (["*", "/", "(", "sqrt", "√"].includes(tokens[0])) {
    const divide = tokens[0] === "/";
    if (divide || tokens[0] === "*") tokens.shift();
    const other = readFactor(tokens);
    if (divide && other === 0) throw new Unreadable();
    value = divide ? value / other : value * other;
  }
  return value;
}

function readFactor(tokens) {
  const first = tokens.shift();
  if (first === "+") return readFactor(tokens);
  if (first === "-") return -readFactor(tokens);
  if (first === "(") {
    const value = readSum(tokens);
    if (tokens.shift() !== ")") throw new Unreadable();
    return value;
  }
  if (first === "sqrt" || first === "√") {
    const value = readFactor(tokens);
    if (value < 0) throw new Unreadable();
    return Math.sqrt(value);
  }
  if (first === undefined || !/^[0-9.]/.test(first)) throw new Unreadable();
  return Number(first);
}

function isNear(value, target, tolerance) {
  return Math.abs(value - target) <= tolerance + 1e-12 * Math.max(1, Math.abs(target));
}

function compute({ text, answer, tolerance, wrong_turns = [] }) {
  demand(Number.isFinite(answer), "answer must be a finite number");
  demand(Number.isFinite(tolerance) && tolerance >= 0, "tolerance must be 0 or more");
  demand(typeof text === "string", "text must be a text");
  for (const [wrong] of wrong_turns)
    demand(
      Number.isFinite(wrong) && !isNear(wrong, answer, tolerance),
      "a wrong turn must be finite and farther than the tolerance from the answer",
    );
  const { status, value } = readNumber(text);
  if (value === null) return { status, value, turn: -1 };
  if (isNear(value, answer, tolerance)) return { status: "right", value, turn: -1 };
  const distances = wrong_turns.map(([wrong]) => Math.abs(value - wrong));
  const turn = distances.indexOf(Math.min(...distances));
  if (turn >= 0 && isNear(value, wrong_turns[turn][0], tolerance))
    return { status: "wrong-turn", value, turn };
  const pointed = text.includes(",") ? readNumber(text.replaceAll(",", ".")).value : null;
  const meant = pointed !== null && isNear(pointed, answer, tolerance);
  return { status: meant ? "decimal-comma" : "wrong", value, turn: -1 };
}

function build({ body, words, language, change, extra }) {
  const say = (text) =>
    typeof text === "string" ? text : (text[language] ?? text.en ?? Object.values(text)[0]);
  const help = h("small", { id: newId() }, words.help);
  const input = h("input", {
    type: "text",
    class: "rw-text rw-answer-input",
    autocomplete: "off",
    spellcheck: "false",
    maxlength: MOST_CHARACTERS,
    "aria-describedby": help.id,
  });
  const status = h("strong", { "data-readout": "status", class: "rw-status" });
  const feedback = h("span", { "data-readout": "feedback" });
  const live = h("p", { class: "rw-sentence", role: "status", "aria-live": "polite" });
  let checked = false;
  body.append(
    h("p", { class: "rw-prompt" }, say(extra("question"))),
    h(
      "div",
      { class: "rw-row" },
      h("label", { class: "rw-answer-label" }, words.answer, " ", input),
      textEntry(input, words.check, (text) => {
        checked = true;
        change({ text });
      }),
    ),
    help,
    live,
  );

  return function update({ text, wrong_turns }, { status: outcome, value, turn }) {
    if (document.activeElement !== input) input.value = text;
    const shown = checked || text !== "";
    live.hidden = !shown;
    if (!shown) return;
    const mark = { right: "✓ ", "wrong-turn": "✗ ", wrong: "✗ " }[outcome] ?? "";
    status.textContent = mark + words.status[outcome];
    status.dataset.value = outcome;
    live.dataset.status = outcome;
    feedback.textContent =
      outcome === "wrong-turn"
        ? say(wrong_turns[turn][1])
        : words.feedback[outcome](value === null ? "" : grouped(value));
    if (!live.firstChild) live.append(status, " ", feedback);
  };
}

/** As the number was read: 84,000 or -1.732. */
function grouped(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e15 || size < 1e-6)) return String(value);
  return value.toLocaleString("en-US", { maximumSignificantDigits: 10 });
}

function render(context) {
  return startWidget(
    {
      name: "AnswerBox",
      parameters: ["text", "answer", "tolerance", "wrong_turns"],
      compute,
      labels,
      build,
    },
    context,
  );
}

export { compute, labels };
export default { render };
