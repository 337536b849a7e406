// Colours of the drawings. The spectrogram's ramp runs evenly in OKLab lightness from the surface it lies on
// through the first voice's hue to the second's, so that equal steps of level look equal.

const RAMPS = {
  // lightness, chroma, hue
  light: [
    [0.9943, 0.0013, 286], // --surface
    [0.829, 0.08, 290],
    [0.664, 0.16, 300],
    [0.5, 0.18, 335],
    [0.335, 0.12, 15],
    [0.17, 0.05, 40],
  ],
  dark: [
    [0.2189, 0.0183, 270], // --surface
    [0.369, 0.12, 282],
    [0.519, 0.18, 305],
    [0.669, 0.18, 355],
    [0.82, 0.14, 60],
    [0.97, 0.06, 95],
  ],
};

const ramps = {};

/** 256 colours as RGBA words for an ImageData of Uint32. */
export function ramp(theme) {
  ramps[theme] ??= Uint32Array.from({ length: 256 }, (_, level) => {
    const stops = RAMPS[theme].map(toLab);
    const at = (level / 255) * (stops.length - 1);
    const i = Math.min(Math.floor(at), stops.length - 2);
    const [r, g, b] = toRgb(stops[i].map((value, axis) => value + (at - i) * (stops[i + 1][axis] - value)));
    return (255 << 24) | (b << 16) | (g << 8) | r;
  });
  return ramps[theme];
}

const toLab = ([l, c, h]) => [l, c * Math.cos((h * Math.PI) / 180), c * Math.sin((h * Math.PI) / 180)];

// Björn Ottosson, "A perceptual color space for image processing" (2020).
function toRgb([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => Math.round(255 * gamma(Math.max(0, Math.min(1, x)))));
}

const gamma = (x) => (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055);

/** "light" or "dark": what is shown now. */
export function theme() {
  const chosen = document.documentElement.dataset.theme;
  return chosen || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

/** The style sheet's colours by name, as they are now. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ink", "muted", "line", "surface", "a", "b", "bad"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
