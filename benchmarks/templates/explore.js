"use strict";
// Makes the interactive figures of a condition when the reader opens them, and obeys the controls beside them.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function paint(plot) {
    const ink = color("--ink"), line = color("--line");
    for (const axis of [...plot.below, ...plot.left]) {
      axis.setv({ axis_label_text_color: ink, major_label_text_color: ink, axis_line_color: line,
                  major_tick_line_color: line, minor_tick_line_color: null });
    }
    for (const grid of plot.center) grid.setv({ grid_line_color: line });
    for (const part of plot.renderers) {
      const own = color(part.tags[0]), glyph = part.glyph;
      for (const name of ["fill_color", "line_color", "hatch_color"]) if (name in glyph) glyph[name] = own;
    }
  }

  function choose(plot, shown, clock, logarithmic) {
    for (const part of plot.renderers) {
      part.visible = shown.has(part.name);
      if (part.data_source.columns().includes("steps")) {
        part.glyph.x = { field: clock ? "seconds" : "steps" };
        plot.below[0].axis_label = clock ? "training time, s" : "step";
      }
    }
    const [linear, log] = plot.left;
    const scale = logarithmic ? "LogScale" : "LinearScale";
    if (plot.y_scale.type !== scale) plot.y_scale = new (Bokeh.Models.get(scale))();
    linear.visible = !logarithmic;
    log.visible = logarithmic;
    plot.center[1].axis = logarithmic ? log : linear;
  }

  async function begin(box) {
    box.dataset.state = "begun";
    const plots = [];
    const places = box.querySelectorAll(".plot");
    for (const [i, item] of JSON.parse(box.querySelector("script").textContent).entries()) {
      const views = await Bokeh.embed.embed_item(item, places[i].id);
      plots.push(views.roots[0].model);
    }
    const update = () => {
      const checked = [...box.querySelectorAll("input:checked")];
      const of = (name) => checked.filter((input) => input.dataset.of === name).map((input) => input.value);
      for (const plot of plots) choose(plot, new Set(of("row")), of("axis")[0] === "seconds", of("scale").length > 0);
    };
    const repaint = () => plots.forEach(paint);
    repaint();
    update();
    box.addEventListener("change", update);
    dark.addEventListener("change", repaint);
    box.dataset.state = "ready";
  }

  Bokeh.set_log_level("error");
  for (const box of document.querySelectorAll("details.explore")) {
    box.hidden = false;
    const opened = () => { if (box.open && !box.dataset.state) begin(box); };
    box.addEventListener("toggle", opened);
    opened();
  }
})();
