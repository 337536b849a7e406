/** Mono int16 samples as a WAV file. */
export function wav(pcm, rate) {
  const file = new DataView(new ArrayBuffer(44 + 2 * pcm.length));
  const word = (at, text) => [...text].forEach((letter, i) => file.setUint8(at + i, letter.charCodeAt(0)));
  word(0, "RIFF");
  file.setUint32(4, 36 + 2 * pcm.length, true);
  word(8, "WAVEfmt ");
  file.setUint32(16, 16, true);
  file.setUint16(20, 1, true); // PCM
  file.setUint16(22, 1, true); // channels
  file.setUint32(24, rate, true);
  file.setUint32(28, 2 * rate, true);
  file.setUint16(32, 2, true);
  file.setUint16(34, 16, true);
  word(36, "data");
  file.setUint32(40, 2 * pcm.length, true);
  for (let i = 0; i < pcm.length; i++) file.setInt16(44 + 2 * i, pcm[i], true);
  return new Blob([file], { type: "audio/wav" });
}

/** Offer `blob` to the user as a file. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
