// The buffer against playback: seconds received (stairs) and seconds played (slope) over the time since the
// press. What lies between them is the sound in hand; where they meet, the player has run dry.

import { palette } from "./colour.js";

export class Flow {
  #canvas;
  #utterance = null;

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(utterance) {
    this.#utterance = utterance;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const scale = window.devicePixelRatio || 1;
    [this.#canvas.width, this.#canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
    const draw = this.#canvas.getContext("2d");
    draw.scale(scale, scale);
    const colours = palette();
    draw.fillStyle = colours.line;
    draw.fillRect(0, height - 1, width, 1);
    const points = this.#utterance?.flow ?? [];
    if (points.length < 2) return;
    const longest = Math.max(points.at(-1).ms, 1500);
    const most = Math.max(this.#utterance.seconds, 1);
    const x = (ms) => (ms / longest) * (width - 2);
    const y = (seconds) => height - 2 - (seconds / most) * (height - 6);

    const received = new Path2D();
    const played = new Path2D();
    const between = new Path2D();
    between.moveTo(x(points[0].ms), y(0));
    received.moveTo(x(0), y(0));
    played.moveTo(x(0), y(0));
    let before = 0;
    for (const point of points) {
      for (const path of [received, between]) {
        path.lineTo(x(point.ms), y(before));
        path.lineTo(x(point.ms), y(point.received));
      }
      played.lineTo(x(point.ms), y(point.played));
      before = point.received;
    }
    for (const point of points.toReversed()) between.lineTo(x(point.ms), y(point.played));
    draw.globalAlpha = 0.14;
    draw.fillStyle = colours.a;
    draw.fill(between);
    draw.globalAlpha = 1;
    draw.lineWidth = 1.5;
    draw.lineJoin = "round";
    draw.strokeStyle = colours.a;
    draw.stroke(received);
    draw.strokeStyle = colours.b;
    draw.stroke(played);
    draw.fillStyle = colours.bad;
    for (const ms of this.#utterance.dry) draw.fillRect(x(ms) - 1, height - 12, 2, 12);
  }
}
