// Draws the widgets of a built page: no kernel, no network. It needs widgets-bundle.js (made by
// book/widget_bundle.py), whose modules it mounts with a stand-in for anywidget's model.
(function () {
  "use strict";

  // The page's address holds the settings of the widgets that were touched:
  // #group-advantage.rewards=11000000&group-advantage.ddof=1&rare-success.k=2
  function readAddress() {
    const pairs = location.hash.includes("=")
      ? [...new URLSearchParams(location.hash.slice(1))]
      : [];
    return pairs.flatMap(([key, value]) => {
      const dot = key.indexOf(".");
      return dot > 0 ? [{ name: key.slice(0, dot), key: key.slice(dot + 1), value }] : [];
    });
  }

  function hashWith(name, entries) {
    const mine = entries.map(([key, value]) => ({ name, key, value }));
    const others = readAddress().filter((entry) => entry.name !== name);
    const pairs = [...mine, ...others].map((entry) => [`${entry.name}.${entry.key}`, entry.value]);
    return "#" + new URLSearchParams(pairs).toString();
  }

  function makeAddress(name) {
    let timer = 0;
    return {
      read: () =>
        readAddress()
          .filter((entry) => entry.name === name)
          .map(({ key, value }) => [key, value]),
      // replaceState leaves no trail in the browser's history. A slider moves faster than some
      // browsers let a page do that, and a page from a file may not be allowed to at all: then the
      // address stays as it was, and link() still gives the setting.
      write(entries) {
        clearTimeout(timer);
        timer = setTimeout(() => {
          try {
            history.replaceState(history.state, "", hashWith(name, entries));
          } catch {}
        }, 100);
      },
      link: (entries) => location.href.split("#")[0] + hashWith(name, entries),
      onChange: (callback) =>
        window.addEventListener("hashchange", () => {
          if (readAddress().some((entry) => entry.name === name)) callback();
        }),
    };
  }

  function makeModel(state, address) {
    const listeners = new Map();
    return {
      address,
      get: (key) => state[key],
      set(key, value) {
        if (state[key] === value) return;
        state[key] = value;
        for (const callback of listeners.get(`change:${key}`) ?? []) callback();
      },
      on(event, callback) {
        listeners.set(event, [...(listeners.get(event) ?? []), callback]);
      },
      off(event, callback) {
        listeners.set(
          event,
          (listeners.get(event) ?? []).filter((other) => other !== callback),
        );
      },
      save_changes() {},
    };
  }

  function mountAll() {
    const taken = new Set();
    const drawn = new Map();
    for (const place of document.querySelectorAll("[data-widget-mount]:not([data-mounted])")) {
      const module = window.bookWidgets?.[place.dataset.widgetMount];
      if (!module) continue; // the plain table stays
      const state = JSON.parse(place.dataset.state);
      let name = state.name;
      for (let i = 2; taken.has(name); i++) name = `${state.name}-${i}`;
      taken.add(name);
      const fallback = [...place.childNodes];
      place.replaceChildren();
      place.dataset.mounted = "";
      try {
        module.render({ model: makeModel(state, makeAddress(name)), el: place });
        drawn.set(name, place);
      } catch (error) {
        place.replaceChildren(...fallback);
        console.error(error);
      }
    }
    drawn.get(readAddress()[0]?.name)?.scrollIntoView();
    window.addEventListener("hashchange", () =>
      drawn.get(readAddress()[0]?.name)?.scrollIntoView(),
    );
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", mountAll);
  else mountAll();
})();
