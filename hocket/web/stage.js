// Draws one utterance: its pieces, its waveform and its spectrogram over one axis of time, and the playhead.
//
// The pieces stand on two lines by turns, as in a hocket: each as wide as the sound that arrived in it. The
// waveform takes the colour of its piece. Sound that is not yet played is paler.

import { palette, ramp, theme } from "./colour.js";
import { place, ROWS } from "./spectrum.js";
import { PEAK } from "./utterance.js";

const TILE = 512; // columns in one picture of the spectrogram
const FIRST_SPAN_S = 6;
const MARKS_HZ = [250, 1000, 4000, 8000];
const TALLY = 22; // height of the two lines
const AXIS = 20;
const GUTTER = 46; // at the right, for the frequencies
const GAP = 10;

export class Stage {
  #canvas;
  #draw;
  #utterance = null;
  #tiles = []; // {canvas, columns, theme}
  #span = FIRST_SPAN_S;
  #colours = palette();
  #still = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(canvas) {
    this.#canvas = canvas;
    this.#draw = canvas.getContext("2d");
    new ResizeObserver(() => this.draw(this.head ?? null)).observe(canvas);
  }

  /** The sample at the playhead, or null where there is none. */
  head = null;

  show(utterance) {
    this.#utterance = utterance;
    this.#tiles = [];
    this.#span = utterance?.end ? this.#target() : FIRST_SPAN_S;
    this.head = null;
  }

  repaint() {
    this.#colours = palette();
    this.draw(this.head);
  }

  /** Seconds at a distance from the canvas's left edge, in CSS pixels. */
  secondsAt(x) {
    return (x / (this.#canvas.clientWidth - GUTTER)) * this.#span;
  }

  /** Draw everything, with the playhead at sample `head`. -> whether the picture is still on the move. */
  draw(head) {
    this.head = head;
    const { clientWidth, clientHeight: height } = this.#canvas;
    const width = clientWidth - GUTTER;
    if (width <= 0) return false;
    const scale = window.devicePixelRatio || 1;
    const [w, h] = [Math.round(clientWidth * scale), Math.round(height * scale)];
    if (this.#canvas.width !== w || this.#canvas.height !== h) [this.#canvas.width, this.#canvas.height] = [w, h];
    const draw = this.#draw;
    draw.setTransform(scale, 0, 0, scale, 0, 0);
    draw.clearRect(0, 0, clientWidth, height);
    const moving = this.#settle();

    const wave = { top: TALLY + GAP, height: Math.round((height - TALLY - AXIS - 2 * GAP) * 0.4) };
    const spectrogram = { top: wave.top + wave.height + GAP };
    spectrogram.height = height - AXIS - spectrogram.top;
    if (this.#utterance?.rate) {
      this.#axis(width, spectrogram);
      this.#spectrogram(width, spectrogram);
      this.#marks(width, spectrogram);
      this.#tally(width);
      this.#wave(width, wave, scale);
      this.#head(width, wave.top - 4, spectrogram.top + spectrogram.height);
    } else {
      this.#ghost(clientWidth);
    }
    return moving;
  }

  /** The span that shows all there is: fixed steps while sound comes, so that the picture seldom moves. */
  #target() {
    const { seconds, end } = this.#utterance;
    if (end && seconds) return Math.max(seconds, 0.25);
    let span = FIRST_SPAN_S;
    while (span < seconds * 1.05) span *= 1.5;
    return span;
  }

  #settle() {
    if (!this.#utterance) return false;
    const target = this.#target();
    const ratio = target / this.#span;
    const near = this.#still.matches || Math.abs(ratio - 1) < 0.002;
    this.#span = near ? target : this.#span * ratio ** 0.16;
    return !near;
  }

  #x(samples, width) {
    return (samples / this.#utterance.rate / this.#span) * width;
  }

  #axis(width, { top, height }) {
    const draw = this.#draw;
    const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600].find((s) => (s / this.#span) * width > 56) ?? 1200;
    draw.font = "11px ui-sans-serif, Inter, system-ui, sans-serif";
    draw.fillStyle = this.#colours.muted;
    draw.strokeStyle = this.#colours.line;
    draw.lineWidth = 1;
    draw.textBaseline = "alphabetic";
    draw.beginPath();
    for (let i = 0; i * step <= this.#span; i++) {
      const x = Math.round(((i * step) / this.#span) * width) + 0.5;
      if (i > 0) {
        draw.moveTo(x, TALLY + GAP);
        draw.lineTo(x, top + height);
      }
      const label = `${Number((i * step).toFixed(1))} s`;
      if (x + draw.measureText(label).width < width) draw.fillText(label, i ? x - 3 : 0, top + height + 15);
    }
    draw.stroke();
  }

  /** Before there is any sound: the two lines as they may come to look. */
  #ghost(width) {
    const draw = this.#draw;
    draw.fillStyle = this.#colours.line;
    let x = 0;
    for (let i = 0; x < width; i++) {
      const w = 14 + 10 * ((i * 5) % 7);
      draw.fillRect(x, i % 2 ? 13 : 4, w - 1, 5);
      x += w;
    }
  }

  #tally(width) {
    const draw = this.#draw;
    const { arrivals } = this.#utterance;
    let start = 0;
    for (const [i, { samples }] of arrivals.entries()) {
      const [x, end] = [this.#x(start, width), this.#x(samples, width)];
      const w = Math.max(end - x - (end - x > 3 ? 1 : 0), 0.75);
      draw.fillStyle = i % 2 ? this.#colours.b : this.#colours.a;
      draw.fillRect(x, i % 2 ? 13 : 4, w, 5);
      start = samples;
    }
  }

  #wave(width, { top, height }, scale) {
    const utterance = this.#utterance;
    const draw = this.#draw;
    const middle = top + height / 2;
    const loudness = height / 2 / 32768;
    const columns = Math.min(Math.ceil(this.#x(utterance.samples, width) * scale), Math.round(width * scale));
    const perColumn = (this.#span * utterance.rate) / (width * scale);
    const head = this.head ?? utterance.samples;
    const paths = [new Path2D(), new Path2D(), new Path2D(), new Path2D()]; // voice a, b; the same, unplayed
    const dense = columns / scale / utterance.arrivals.length < 3; // stripes so narrow would only flicker
    let piece = 0;
    for (let column = 0; column < columns; column++) {
      const from = column * perColumn;
      const to = Math.min(from + perColumn, utterance.samples);
      while (piece < utterance.arrivals.length - 1 && utterance.arrivals[piece].samples <= from) piece++;
      const [least, greatest] = utterance.peaks(Math.floor(from / PEAK), Math.ceil(to / PEAK));
      const y = middle - greatest * loudness;
      const tall = Math.max((greatest - least) * loudness, 1 / scale);
      paths[(dense ? 0 : piece % 2) + (from > head ? 2 : 0)].rect(column / scale, y, 1 / scale, tall);
    }
    for (const [i, path] of paths.entries()) {
      draw.fillStyle = i % 2 ? this.#colours.b : this.#colours.a;
      draw.globalAlpha = i < 2 ? 1 : 0.38;
      draw.fill(path);
    }
    draw.globalAlpha = 1;
  }

  #spectrogram(width, { top, height }) {
    const { spectrum, samples } = this.#utterance;
    const draw = this.#draw;
    const now = theme();
    const count = Math.ceil(spectrum.columns.length / TILE);
    draw.imageSmoothingQuality = "high";
    draw.save();
    draw.beginPath();
    draw.rect(0, top, this.#x(samples, width), height);
    draw.clip();
    for (let i = 0; i < count; i++) {
      const tile = (this.#tiles[i] ??= newTile());
      paint(tile, spectrum.columns.slice(i * TILE, (i + 1) * TILE), now);
      // A column is centred on its hop: the picture starts half a hop early.
      const x = this.#x((i * TILE - 0.5) * spectrum.hop, width);
      const w = this.#x(tile.columns * spectrum.hop, width);
      draw.drawImage(tile.canvas, 0, 0, tile.columns, ROWS, x, top, w, height);
    }
    draw.restore();
  }

  #marks(width, { top, height }) {
    const draw = this.#draw;
    draw.textBaseline = "middle";
    draw.textAlign = "right";
    draw.fillStyle = this.#colours.muted;
    for (const frequency of MARKS_HZ) {
      const y = top + height * (1 - place(frequency, this.#utterance.rate));
      if (y < top + 8) continue;
      const label = frequency < 1000 ? `${frequency} Hz` : `${frequency / 1000} kHz`;
      draw.fillText(label, width + GUTTER, y);
      draw.fillRect(width + 2, y - 0.5, 4, 1);
    }
    draw.textAlign = "left";
  }

  #head(width, top, bottom) {
    if (this.head === null) return;
    const x = Math.min(Math.max(this.#x(this.head, width), 0.75), width - 0.75);
    const draw = this.#draw;
    draw.fillStyle = this.#colours.ink;
    draw.fillRect(x - 0.75, top, 1.5, bottom - top);
    draw.beginPath();
    draw.arc(x, top, 3.5, 0, 2 * Math.PI);
    draw.fill();
  }
}

function newTile() {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [TILE, ROWS];
  return { canvas, columns: 0, theme: "" };
}

/** Bring a tile up to date with its columns. */
function paint(tile, columns, now) {
  if (tile.theme !== now) [tile.columns, tile.theme] = [0, now];
  const fresh = columns.slice(tile.columns);
  if (fresh.length === 0) return;
  const colours = ramp(now);
  const draw = tile.canvas.getContext("2d");
  const image = draw.createImageData(fresh.length, ROWS);
  const words = new Uint32Array(image.data.buffer);
  for (const [x, levels] of fresh.entries()) {
    for (let row = 0; row < ROWS; row++) words[(ROWS - 1 - row) * fresh.length + x] = colours[levels[row]];
  }
  draw.putImageData(image, tile.columns, 0);
  tile.columns = columns.length;
}

/** A small picture of a finished utterance. */
export function thumbnail(canvas, utterance) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  const draw = canvas.getContext("2d");
  draw.scale(scale, scale);
  const { a, b } = palette();
  const bars = Math.floor(width / 3);
  let piece = 0;
  for (let bar = 0; bar < bars; bar++) {
    const from = (bar / bars) * utterance.samples;
    const to = ((bar + 1) / bars) * utterance.samples;
    while (piece < utterance.arrivals.length - 1 && utterance.arrivals[piece].samples <= from) piece++;
    const [least, greatest] = utterance.peaks(Math.floor(from / PEAK), Math.ceil(to / PEAK));
    const tall = Math.max(((greatest - least) / 65536) * height, 1.5);
    draw.fillStyle = piece % 2 ? b : a;
    draw.fillRect(bar * 3, (height - tall) / 2, 2, tall);
  }
}
