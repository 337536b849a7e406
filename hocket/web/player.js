// Plays mono PCM while it arrives, without a gap or a seam.
//
// The audio context runs at the rate of the stream, so that samples are played as they came; the browser
// resamples once, behind everything, for the device. Each piece is scheduled at a whole frame of the
// context's clock, exactly where the piece before it ends. A piece that comes too late is an *underrun*: it
// is counted, and sound goes on a little later, so that the next pieces have time to come.
//
//     frames of the clock  ──┤ piece 0 ├┤ piece 1 ├┤ piece 2 ├─ ─ ─ nothing ─ ─ ─┤ piece 3 ├──
//     runs                   └ at, first = 0                                     └ at, first = 3's first sample
//
// Not an AudioWorklet, which browsers give to secure origins only: a server in the local network often is none.

const START_S = 0.05; // from the first piece to its sound, beyond the guard
const RECOVER_S = 0.25; // the same after an underrun
const FADE_S = 0.015; // against the click of a sudden stop

/** Events: "underrun"; "ended", when the last sample after `finish` has been played. */
export class Player extends EventTarget {
  #context = null;
  #gain = null;
  #runs = []; // {at: frame of the clock, first: sample}; sound between runs is silence
  #next = 0; // frame at which the next piece starts
  #sources = new Set(); // scheduled and not yet played to the end
  #last = null; // the source that plays last
  #finished = false;
  #offset = 0; // sample of the utterance that is this player's first

  samples = 0; // given to the player since `begin`
  underruns = 0;
  playing = false;

  /** Get ready for sound at `rate` Hz. Call it from a click or a key: browsers want one before any sound. */
  open(rate) {
    this.stop();
    if (this.#context?.sampleRate === rate) {
      this.#context.resume();
      return;
    }
    this.#context?.close();
    this.#context = new AudioContext({ sampleRate: rate, latencyHint: "interactive" });
    this.#context.resume();
  }

  /** Start an utterance. The first sample pushed is its sample `offset`. */
  begin(offset = 0) {
    this.stop();
    this.#gain = new GainNode(this.#context);
    this.#gain.connect(this.#context.destination);
    this.#runs = [];
    this.#sources.clear();
    this.#last = null;
    this.#finished = false;
    this.#offset = offset;
    this.samples = 0;
    this.underruns = 0;
    this.playing = true;
  }

  /** Play `pcm` (Int16Array) after all that was pushed before. */
  push(pcm) {
    if (!this.playing || pcm.length === 0) return;
    const { sampleRate } = this.#context;
    const soonest = Math.ceil((this.#context.currentTime + this.#guard) * sampleRate);
    if (this.#runs.length === 0 || this.#next < soonest) {
      const late = this.#runs.length > 0;
      this.#next = soonest + Math.round((late ? RECOVER_S : START_S) * sampleRate);
      this.#runs.push({ at: this.#next, first: this.samples });
      if (late) {
        this.underruns += 1;
        this.dispatchEvent(new Event("underrun"));
      }
    }
    const buffer = this.#context.createBuffer(1, pcm.length, sampleRate);
    const channel = buffer.getChannelData(0);
    for (let i = 0; i < pcm.length; i++) channel[i] = pcm[i] / 32768;
    const source = new AudioBufferSourceNode(this.#context, { buffer });
    source.connect(this.#gain);
    source.start(this.#next / sampleRate);
    source.onended = () => this.#ended(source);
    this.#sources.add(source);
    this.#last = source;
    this.#next += pcm.length;
    this.samples += pcm.length;
  }

  /** No more sound will come. */
  finish() {
    if (!this.playing) return;
    this.#finished = true;
    if (this.#last === null || this.waiting) this.#end();
  }

  /** Silence, now. */
  stop() {
    if (!this.playing) return;
    this.playing = false;
    const now = this.#context.currentTime;
    const gain = this.#gain;
    gain.gain.setTargetAtTime(0, now, FADE_S / 4);
    for (const source of this.#sources) source.stop(now + FADE_S);
  }

  /** The sample of the utterance that is being played. */
  get position() {
    const frame = this.#frame();
    let position = 0;
    for (const [i, run] of this.#runs.entries()) {
      if (frame < run.at) break;
      const end = this.#runs[i + 1]?.first ?? this.samples;
      position = Math.min(run.first + frame - run.at, end);
    }
    return this.#offset + position;
  }

  /** Seconds until the first sample is played; negative afterwards. */
  get startsIn() {
    if (this.#runs.length === 0) return Infinity;
    return this.#runs[0].at / this.#context.sampleRate - this.#context.currentTime;
  }

  /** Seconds of sound in hand: pushed, and not yet played. */
  get ahead() {
    if (!this.playing) return 0;
    return (this.#offset + this.samples - this.position) / this.#context.sampleRate;
  }

  /** Whether all that came has been played, and more is to come. */
  get waiting() {
    return this.playing && this.#runs.length > 0 && this.#frame() >= this.#next;
  }

  /** The clock is read here, but sound is rendered elsewhere, this many seconds ahead of it. */
  get #guard() {
    return Math.max(this.#context.baseLatency || 0, 0.005);
  }

  #frame() {
    return this.#context ? Math.floor(this.#context.currentTime * this.#context.sampleRate) : 0;
  }

  #ended(source) {
    source.disconnect();
    this.#sources.delete(source);
    if (this.#finished && source === this.#last) this.#end();
  }

  #end() {
    if (!this.playing) return;
    this.playing = false;
    this.dispatchEvent(new Event("ended"));
  }
}
