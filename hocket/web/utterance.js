// One utterance: what was asked for, the sound that has come, and what is drawn of it.

import { Spectrum } from "./spectrum.js";

export const PEAK = 64; // samples in one pair of extremes
const POINTS = 1500; // of the buffer graph, at most

/** A typed array that grows at its end. */
class Growing {
  constructor(Kind) {
    this.items = new Kind(1 << 12);
    this.length = 0;
  }

  add(items) {
    const length = this.length + items.length;
    if (length > this.items.length) {
      const bigger = new this.items.constructor(Math.max(length, 2 * this.items.length));
      bigger.set(this.items.subarray(0, this.length));
      this.items = bigger;
    }
    this.items.set(items, this.length);
    this.length = length;
  }
}

export class Utterance {
  #pcm = new Growing(Int16Array);
  #peaks = new Growing(Int16Array); // least, greatest, least, greatest, …

  /** `wanted` is the form's content; `body` the request, whose seed is set once the server has named it. */
  constructor(wanted, body) {
    this.wanted = wanted;
    this.body = body;
    this.rate = 0;
    this.id = "";
    this.arrivals = []; // {ms, samples}: when how much had come, in ms since the press
    this.flow = []; // {ms, received, played}: in seconds; what the buffer graph draws
    this.flowStep_ms = 15;
    this.dry = []; // ms of each underrun
    this.first_ms = null; // from the press to the first sample played
    this.underruns = 0;
    this.end = ""; // "stop", "length", "aborted", "cut"; "" while sound comes
  }

  open(rate, id) {
    this.rate = rate;
    this.id = id;
    this.spectrum = new Spectrum(rate);
  }

  add(pcm, ms) {
    this.#pcm.add(pcm);
    this.arrivals.push({ ms, samples: this.#pcm.length });
    this.#addPeaks(false);
    this.spectrum.add(this.pcm);
  }

  /** Note for the buffer graph that `played` samples have been played. Twice the time, half as often. */
  note(ms, played) {
    if (ms - (this.flow.at(-1)?.ms ?? -Infinity) < this.flowStep_ms) return;
    this.flow.push({ ms, received: this.seconds, played: played / this.rate });
    if (this.flow.length < POINTS) return;
    this.flow = this.flow.filter((_, i) => i % 2 === 0);
    this.flowStep_ms *= 2;
  }

  finish(end) {
    this.end = end;
    if (this.rate === 0) return;
    this.#addPeaks(true);
    this.spectrum.finish(this.pcm);
  }

  /** All samples so far, int16. */
  get pcm() {
    return this.#pcm.items.subarray(0, this.#pcm.length);
  }

  get samples() {
    return this.#pcm.length;
  }

  get seconds() {
    return this.rate ? this.#pcm.length / this.rate : 0;
  }

  /** Waiting per second of sound: below 1 is faster than speech. */
  get rtf() {
    const last = this.arrivals.at(-1);
    return last && this.seconds ? last.ms / 1000 / this.seconds : null;
  }

  /** Extremes of samples from PEAK * from to PEAK * to. -> [least, greatest], in -32768 … 32767. */
  peaks(from, to) {
    let least = 0;
    let greatest = 0;
    const { items, length } = this.#peaks;
    for (let i = 2 * Math.max(0, from); i < Math.min(2 * to, length); i += 2) {
      if (items[i] < least) least = items[i];
      if (items[i + 1] > greatest) greatest = items[i + 1];
    }
    return [least, greatest];
  }

  #addPeaks(last) {
    const pcm = this.pcm;
    const found = [];
    for (let start = (this.#peaks.length / 2) * PEAK; start < pcm.length; start += PEAK) {
      const stop = Math.min(start + PEAK, pcm.length);
      if (stop - start < PEAK && !last) break;
      let least = 32767;
      let greatest = -32768;
      for (let i = start; i < stop; i++) {
        if (pcm[i] < least) least = pcm[i];
        if (pcm[i] > greatest) greatest = pcm[i];
      }
      found.push(least, greatest);
    }
    this.#peaks.add(found);
  }
}
