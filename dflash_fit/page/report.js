// Draws the charts of the page and answers its two controls.  Colours are those of report.css.

const page = JSON.parse(document.getElementById("report").textContent);
const views = new Map();

// The theme with the names of colours looked up, as the page is now: light or dark.
function coloured(theme, colours) {
  if (Array.isArray(theme)) return theme.map((value) => coloured(value, colours));
  if (theme && typeof theme === "object")
    return Object.fromEntries(
      Object.entries(theme).map(([name, value]) => [name, coloured(value, colours)]));
  return typeof theme === "string" && theme.startsWith("@")
    ? colours.getPropertyValue(`--${theme.slice(1)}`).trim()
    : theme;
}

async function draw(chart) {
  const place = document.getElementById(`chart-${chart.key}`);
  views.get(chart.key)?.finalize();
  const spec = {
    ...chart.spec,
    width: "container",
    height: chart.height,
    autosize: { type: "fit-x", contains: "padding" },
    datasets: page.rows,
    data: { name: chart.data },
    config: {
      ...coloured(page.theme, getComputedStyle(document.documentElement)),
      font: getComputedStyle(document.body).fontFamily,
    },
  };
  const drawn = await vegaEmbed(place, spec, {
    actions: false,
    ast: true, // no code is made from strings: the page forbids it
    defaultStyle: false,
    mode: "vega-lite",
    renderer: "svg",
    tooltip: { disableDefaultStyle: true },
  });
  views.set(chart.key, drawn);
  tell(drawn.view);
}

// The parameters that a chart has, as the controls stand.
function tell(view) {
  const axis = document.querySelector("input[name=axis]:checked")?.value ?? "step";
  const chosen = Number(document.getElementById("chosen")?.value ?? page.first);
  for (const [name, value] of Object.entries({ axis, chosen }))
    if (name in (view.getState({ signals: (signal) => signal === name }).signals ?? {}))
      view.signal(name, value);
  return view.runAsync();
}

async function drawAll() {
  for (const chart of page.charts) await draw(chart);
  document.documentElement.dataset.drawn = page.charts.length;
}

document.addEventListener("change", () => views.forEach(({ view }) => tell(view)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
