// Shared by all widgets: this text stands before each widget's own (see base.py), so it defines
// and never imports or exports. A widget gives startWidget its parameters, its pure compute() and
// build(), which draws once and returns the function that brings the drawing up to date.

const sharedLabels = {
  en: {
    browser: "computed in the browser",
    rlcore: "from rlcore",
    copyLink: "Copy a link to this setting",
    copied: "Link copied",
    copyThis: "Copy this address:",
    refused: "The address held a setting that cannot be shown: nothing was changed.",
    slider: (label) => `${label}, slider`,
  },
  ko: {
    browser: "브라우저에서 계산",
    rlcore: "rlcore에서 계산",
    copyLink: "이 설정의 링크 복사",
    copied: "링크를 복사했습니다",
    copyThis: "이 주소를 복사하세요:",
    refused: "주소에 보여 줄 수 없는 설정이 있어 아무것도 바꾸지 않았습니다.",
    slider: (label) => `${label}, 슬라이더`,
  },
};

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "circle", "rect", "text", "tspan", "title"]);
const KEY_TAGS = new Set(["button", "input", "summary"]);

/** Make an element: h("button", { class: "x", onclick: f }, "text", child). */
function h(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag)
    ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  // JupyterLab: keys pressed in a control are the control's, not shortcuts of the notebook.
  if (KEY_TAGS.has(tag) || "tabindex" in attributes)
    node.setAttribute("data-lm-suppress-shortcuts", "true");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function newId() {
  return "rw-" + Math.random().toString(36).slice(2, 10);
}

/** Fixed digits, with a sign if asked, and never "-0.000". ASCII minus: the text is a number. */
function formatNumber(value, { digits = 3, sign = false } = {}) {
  if (Number.isInteger(value) && digits === 0) return String(value);
  const text = value.toFixed(digits);
  if (Number(text) === 0) return text.replace("-", "");
  return sign && value > 0 ? "+" + text : text;
}

/** Show a number in an element made by readout(), with the exact value beside it. */
function setReadout(node, value, format = {}) {
  node.textContent = formatNumber(value, format);
  node.dataset.value = String(value);
}

function readout(name) {
  return h("span", { "data-readout": name, class: "rw-number" });
}

/** A list of labelled numbers: rows of [label node or text, value node]. */
function numberList(rows) {
  return h(
    "dl",
    { class: "rw-numbers" },
    ...rows.map(([label, node]) => h("div", {}, h("dt", {}, label), h("dd", {}, node))),
  );
}

function fieldset(legend, ...children) {
  return h("fieldset", { class: "rw-field" }, h("legend", {}, legend), ...children);
}

/** A whole number with a slider and a box: { node, set(value, least, most) }. */
function integerField(label, sliderLabel, onChange) {
  const box = h("input", { type: "number", step: 1, "aria-label": label, class: "rw-box" });
  const slider = h("input", { type: "range", step: 1, "aria-label": sliderLabel });
  const accept = (input) => {
    const value = Number(input.value);
    const inside = value >= Number(input.min) && value <= Number(input.max);
    if (input.value !== "" && Number.isInteger(value) && inside) onChange(value);
  };
  let shown = null;
  const clamp = () => {
    const value = Math.round(Number(box.value));
    if (box.value === "" || !Number.isFinite(value)) box.value = shown;
    else onChange(Math.min(Math.max(value, Number(box.min)), Number(box.max)));
    box.value = shown;
  };
  box.addEventListener("input", () => accept(box));
  box.addEventListener("change", clamp);
  slider.addEventListener("input", () => accept(slider));
  return {
    node: fieldset(label, h("div", { class: "rw-row rw-range" }, box, slider)),
    set(value, least, most) {
      shown = value;
      for (const input of [box, slider]) {
        input.min = least;
        input.max = most;
        if (Number(input.value) !== value || input.value === "") input.value = value;
      }
    },
  };
}

/** Radio buttons: options of { value, label, note }; { node, set(value) }. */
function choiceField(legend, options, onChange) {
  const name = newId();
  const inputs = options.map(({ value }) =>
    h("input", { type: "radio", name, value, onchange: () => onChange(value) }),
  );
  const choices = options.map(({ label, note }, i) =>
    h(
      "label",
      { class: "rw-choice" },
      inputs[i],
      h("span", {}, label, ...(note ? [h("small", {}, note)] : [])),
    ),
  );
  return {
    node: fieldset(legend, ...choices),
    set(value) {
      options.forEach((option, i) => (inputs[i].checked = option.value === value));
    },
  };
}

/** Buttons of which the one that matches the setting is pressed; { node, set(index) }. */
function buttonRow(legend, labels, onPick) {
  const buttons = labels.map((label, i) =>
    h("button", { type: "button", class: "rw-button", onclick: () => onPick(i) }, label),
  );
  return {
    node: fieldset(legend, h("div", { class: "rw-row" }, ...buttons)),
    set(index) {
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === index)));
    },
  };
}

/** The button of a text box: Enter in the box or a click hands the text to onEnter. No <form>: in
 * JupyterLab its submit event was not seen to arrive. */
function textEntry(input, label, onEnter) {
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return; // composing: Enter ends a syllable
    event.preventDefault();
    onEnter(input.value);
  });
  return h(
    "button",
    { type: "button", class: "rw-button", onclick: () => onEnter(input.value) },
    label,
  );
}

/** The switch that every group statistic has: divide the squares by G or by G - 1. */
const stdLabels = {
  en: {
    std: "Standard deviation",
    population: "population std, divides by G",
    populationNote: "numpy's default; this book",
    sample: "sample std, divides by G − 1",
    sampleNote: "torch.std's default; TRL, verl",
  },
  ko: {
    std: "표준편차",
    population: "모표준편차, G로 나눔",
    populationNote: "numpy 기본값, 이 책",
    sample: "표본표준편차, G − 1로 나눔",
    sampleNote: "torch.std 기본값, TRL과 verl",
  },
};

function stdField(words, onChange) {
  return choiceField(
    words.std,
    [
      { value: 0, label: words.population, note: words.populationNote },
      { value: 1, label: words.sample, note: words.sampleNote },
    ],
    onChange,
  );
}

/** Throw unless `ok`: how compute() refuses parameters, those of a page's address too. */
function demand(ok, message) {
  if (!ok) throw new RangeError(message);
}

function isInteger(value, least, most) {
  return Number.isInteger(value) && value >= least && value <= most;
}

/** Mean, std and advantages of one group, as rlcore.objectives.group_advantages. */
function groupStatistics(rewards, ddof) {
  demand(ddof === 0 || ddof === 1, `ddof must be 0 or 1, found ${ddof}`);
  const limit = Number.MAX_VALUE / (4 * rewards.length); // no sum overflows: rlcore's limit
  demand(rewards.every((reward) => Math.abs(reward) <= limit), `rewards must be at most ${limit}`);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const largest = Math.max(...rewards.map(Math.abs));
  // equal up to the rounding of a sum, as rlcore says it: 0.1 + 0.2 is 0.3
  if (Math.max(...rewards) - Math.min(...rewards) <= 8 * Number.EPSILON * largest)
    return { mean, std: 0, advantages: rewards.map(() => 0), equal: true };
  // Deviations are scaled before they are squared: huge or tiny rewards neither overflow nor vanish.
  const deviations = rewards.map((reward) => reward - mean);
  const scale = Math.max(...deviations.map(Math.abs));
  const squares = deviations.reduce((sum, deviation) => sum + (deviation / scale) ** 2, 0);
  const std = scale * Math.sqrt(squares / (rewards.length - ddof));
  return { mean, std, advantages: deviations.map((deviation) => deviation / std), equal: false };
}

/** The page's language, if the widget was given none. */
function pickLanguage(model, labels) {
  const asked = model.get("language") || document.documentElement.lang || "en";
  const short = asked.toLowerCase().split("-")[0];
  return short in labels ? short : "en";
}

/**
 * Draw a widget in `el` and keep it in step with `model` (anywidget's, or the built page's).
 *
 * spec.name        the class, for data-widget
 * spec.parameters  names of the traits that compute() takes
 * spec.compute     parameters -> values; throws RangeError on what it refuses
 * spec.labels      { en: {...}, ko: {...} }
 * spec.address     { trait: [key, encode, decode] }: what goes into the page's address
 * spec.build       ({ body, words, language, change, extra }) -> update(parameters, values)
 */
function startWidget(spec, { model, el }) {
  const language = pickLanguage(model, spec.labels);
  const words = { ...sharedLabels[language], ...stdLabels[language], ...spec.labels[language] };
  const titleId = newId();
  const badge = h("span", { class: "rw-badge" });
  const body = h("div", { class: "rw-body" });
  const root = h(
    "section",
    {
      class: "rw",
      lang: language,
      "data-widget": spec.name,
      "aria-labelledby": titleId,
    },
    h("header", { class: "rw-head" }, h("p", { class: "rw-title", id: titleId }, words.title), badge),
    body,
  );

  const snapshot = () =>
    Object.fromEntries(spec.parameters.map((trait) => [trait, model.get(trait)]));
  const view = spec.build({ body, words, language, change, extra: (trait) => model.get(trait) });
  const said = h("span", { role: "status", "aria-live": "polite", class: "rw-said" });
  let mine = false; // this view is setting traits: draw once, at the end

  function draw() {
    const parameters = snapshot();
    const reply = model.get("reply");
    // A reply counts only for the parameters on display; a late one answers others.
    const current =
      reply && JSON.stringify(order(reply.parameters)) === JSON.stringify(order(parameters));
    const source = current ? "rlcore" : "browser";
    badge.textContent = words[source];
    badge.dataset.badge = source;
    view(parameters, current ? reply.values : spec.compute(parameters));
  }

  function order(parameters) {
    return spec.parameters.map((trait) => parameters?.[trait]);
  }

  function change(part) {
    mine = true;
    for (const [trait, value] of Object.entries(part)) model.set(trait, value);
    mine = false;
    said.textContent = "";
    draw();
    model.save_changes();
    model.address?.write(encode());
  }

  function encode() {
    const parameters = snapshot();
    return Object.entries(spec.address ?? {}).map(([trait, [key, write]]) => [
      key,
      write(parameters[trait]),
    ]);
  }

  /** Take what the page's address says, if it is whole and compute() accepts it; else say so. */
  function restore() {
    const found = Object.fromEntries(model.address?.read() ?? []);
    const parameters = snapshot();
    try {
      for (const [trait, [key, , read]] of Object.entries(spec.address ?? {}))
        if (key in found) parameters[trait] = read(found[key]);
      spec.compute(parameters);
    } catch {
      said.textContent = words.refused;
      return;
    }
    said.textContent = "";
    mine = true;
    for (const [trait, value] of Object.entries(parameters)) model.set(trait, value);
    mine = false;
  }

  const onModel = () => {
    if (!mine) draw();
  };
  const watched = [...spec.parameters, "reply"].map((trait) => `change:${trait}`);
  for (const event of watched) model.on(event, onModel);

  if (model.address && spec.address) {
    root.append(linkControl(words, said, () => model.address.link(encode())));
    restore();
    model.address.onChange(() => {
      restore();
      draw();
    });
  }
  el.append(root);
  draw();
  return () => {
    for (const event of watched) model.off(event, onModel);
    root.remove();
  };
}

/** A button that copies the link, and shows it where the clipboard is closed to pages. */
function linkControl(words, said, link) {
  const copy = async () => {
    const address = link();
    try {
      await navigator.clipboard.writeText(address);
      said.textContent = words.copied;
    } catch {
      const box = h("input", { type: "text", readonly: true, "aria-label": words.copyThis });
      box.value = address;
      said.replaceChildren(words.copyThis + " ", box);
      box.select();
    }
  };
  return h(
    "footer",
    { class: "rw-foot" },
    h("button", { type: "button", class: "rw-button rw-link", onclick: copy }, words.copyLink),
    said,
  );
}
