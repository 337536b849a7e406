// A short-time Fourier transform that grows with the sound: one column of levels for each hop.

export const ROWS = 160;

const FLOOR_DB = -92;
const TOP_DB = -18;
const LOWEST_HZ = 60;
const HIGHEST_HZ = 12000;

const mel = (hz) => 2595 * Math.log10(1 + hz / 700);
const hz = (mel) => 700 * (10 ** (mel / 2595) - 1);

/** Where a frequency lies between the lowest (0) and the highest (1) row. */
export function place(frequency, rate) {
  const [low, high] = edges(rate);
  return (mel(frequency) - low) / (high - low);
}

const edges = (rate) => [mel(LOWEST_HZ), mel(Math.min(HIGHEST_HZ, rate / 2))];

export class Spectrum {
  #fft;
  #window;
  #bins; // first and last bin of each row, as fractions
  #re;
  #im;

  constructor(rate) {
    this.rate = rate;
    this.size = 2 ** Math.round(Math.log2(rate * 0.043));
    this.hop = this.size / 4;
    this.columns = []; // Uint8Array(ROWS) each, the lowest frequency first; 0 is FLOOR_DB, 255 TOP_DB
    this.#fft = new Fft(this.size);
    this.#window = Float32Array.from({ length: this.size }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / this.size));
    this.#re = new Float32Array(this.size);
    this.#im = new Float32Array(this.size);
    const [low, high] = edges(rate);
    const edge = (row) => (hz(low + ((high - low) * row) / ROWS) * this.size) / rate;
    this.#bins = Array.from({ length: ROWS }, (_, row) => [edge(row), edge(row + 1)]);
  }

  /** Make the columns for which `pcm`, all samples so far, is long enough. A column is centred on its hop. */
  add(pcm) {
    while (this.columns.length * this.hop + this.size / 2 <= pcm.length) this.#column(pcm);
  }

  /** Make the columns that are left; silence follows the end. */
  finish(pcm) {
    while (this.columns.length * this.hop < pcm.length) this.#column(pcm);
  }

  #column(pcm) {
    const start = this.columns.length * this.hop - this.size / 2;
    for (let i = 0; i < this.size; i++) {
      const sample = pcm[start + i] ?? 0;
      this.#re[i] = (sample / 32768) * this.#window[i];
      this.#im[i] = 0;
    }
    this.#fft.transform(this.#re, this.#im);
    const levels = new Uint8Array(ROWS);
    for (let row = 0; row < ROWS; row++) {
      const power = this.#power(...this.#bins[row]);
      const db = 10 * Math.log10(power + 1e-12) - 20 * Math.log10(this.size / 4);
      levels[row] = Math.max(0, Math.min(255, (255 * (db - FLOOR_DB)) / (TOP_DB - FLOOR_DB)));
    }
    this.columns.push(levels);
  }

  /** The greatest power between two bins; between neighbours it is interpolated. */
  #power(from, to) {
    const at = (bin) => this.#re[bin] ** 2 + this.#im[bin] ** 2;
    const middle = (from + to) / 2;
    const below = Math.floor(middle);
    const share = middle - below;
    let power = at(below) * (1 - share) + at(below + 1) * share;
    for (let bin = Math.ceil(from); bin <= to; bin++) power = Math.max(power, at(bin));
    return power;
  }
}

/** Radix-2 fast Fourier transform, in place. */
export class Fft {
  constructor(size) {
    this.size = size;
    this.cos = Float32Array.from({ length: size / 2 }, (_, i) => Math.cos((2 * Math.PI * i) / size));
    this.sin = Float32Array.from({ length: size / 2 }, (_, i) => -Math.sin((2 * Math.PI * i) / size));
    const bits = Math.log2(size);
    this.order = Uint32Array.from({ length: size }, (_, i) => {
      let reversed = 0;
      for (let bit = 0; bit < bits; bit++) reversed |= ((i >> bit) & 1) << (bits - 1 - bit);
      return reversed;
    });
  }

  transform(re, im) {
    const { size, order, cos, sin } = this;
    for (let i = 0; i < size; i++) {
      const j = order[i];
      if (j > i) {
        [re[i], re[j]] = [re[j], re[i]];
        [im[i], im[j]] = [im[j], im[i]];
      }
    }
    for (let half = 1; half < size; half *= 2) {
      const stride = size / (2 * half);
      for (let start = 0; start < size; start += 2 * half) {
        for (let k = 0; k < half; k++) {
          const a = start + k;
          const b = a + half;
          const c = cos[k * stride];
          const s = sin[k * stride];
          const x = re[b] * c - im[b] * s;
          const y = re[b] * s + im[b] * c;
          re[b] = re[a] - x;
          im[b] = im[a] - y;
          re[a] += x;
          im[a] += y;
        }
      }
    }
  }
}
