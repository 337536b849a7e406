"""`hocket eval`: texts spoken, and how well, by a recogniser and by measurement.

What the figures mean is in docs/eval.md. Exit codes: 0 done, 1 a gate does not hold, 2 bad usage,
130 interrupted; an interrupt gives what was judged until then.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import hocket
from hocket.cli.measured import (
    ApiKey,
    Compare,
    Extra,
    JsonOut,
    Plot,
    check_outputs,
    deliver,
    fields_of,
    first_model,
    names_of,
    tables,
)
from hocket.cli.report import Debug, console, note, progress, reports_errors, settings_of
from hocket.errors import InvalidRequest, Unsupported, clip

if TYPE_CHECKING:
    from hocket.eval.judge import Utterance
    from hocket.eval.result import Result
    from hocket.eval.speakers import Speak
    from hocket.eval.texts import Item


@reports_errors
def eval_(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A model (folder, or name on a hub), the address of a server, or a folder of WAV files."
        ),
    ] = None,
    texts: Annotated[
        str | None,
        typer.Option(
            help="A text a line, a Seed-TTS .lst, or heldout: 200 sentences that come with hocket. "
            "[heldout; of WAV files, the NAME.txt beside each]"
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Take so many of the texts, evenly spread.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Of a server; by default the first that it lists.")
    ] = None,
    voice: Annotated[str | None, typer.Option(help="By default the model's.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Speak each text with each of these seeds: 1,2.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Texts spoken at once.")] = 1,
    whisper: Annotated[str, typer.Option(help="Who listens: base, tiny.en, a folder, or none.")] = "base",
    language: Annotated[str, typer.Option(help="Of the texts, for who listens.")] = "en",
    reference_audio: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="The voice to be like: a WAV file or a folder; there NAME.wav is for the text of that name.",
        ),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with NAME.wav of each text, judged beside; its lengths and voice are expected.",
        ),
    ] = None,
    long: Annotated[
        float, typer.Option(min=1.0, help="So many times the expected length is a missed end.")
    ] = 2.5,
    max_frames: Annotated[int | None, typer.Option(min=1, help="Most frames of a text.")] = None,
    extra: Extra = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds a server may take for a text.")] = 300.0,
    api_key: ApiKey = None,
    profile: Annotated[str | None, typer.Option(help="Name or path of a model's profile.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="stage.field=value: a change of the profile.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of who listens.")] = 1,
    keep: Annotated[Path | None, typer.Option(help="Folder to leave the sounds and their texts in.")] = None,
    json_out: JsonOut = None,
    plot: Plot = None,
    max_wer: Annotated[float | None, typer.Option(min=0, help="Most word errors, in per cent.")] = None,
    min_similarity: Annotated[float | None, typer.Option(help="Least mean cosine to the voice.")] = None,
    max_missed: Annotated[int | None, typer.Option(min=0, help="Most missed ends.")] = None,
    max_length_ratio: Annotated[
        float | None, typer.Option(min=0, help="Longest utterance, over its expected length.")
    ] = None,
    max_clicking: Annotated[int | None, typer.Option(min=0, help="Most utterances with clicks.")] = None,
    max_clipping: Annotated[int | None, typer.Option(min=0, help="Most utterances that clip.")] = None,
    max_looped: Annotated[int | None, typer.Option(min=0, help="Most that repeat words.")] = None,
    max_dropped: Annotated[int | None, typer.Option(min=0, help="Most that leave words out.")] = None,
    max_failures: Annotated[int, typer.Option(min=0, help="Most texts that were not spoken.")] = 0,
    compare: Compare = None,
    debug: Debug = False,
) -> None:
    """Judge how well texts are spoken."""
    # Imported here: --help should not wait for NumPy.
    from hocket.eval import plots
    from hocket.eval.ears import NONE, Whisper
    from hocket.eval.judge import Judge
    from hocket.eval.likeness import Likeness
    from hocket.eval.result import judge_gates, new_result, totals
    from hocket.eval.run import evaluate, teacher_files, voices
    from hocket.eval.sound import read_wav
    from hocket.eval.speakers import Server, recordings

    if compare is not None:
        if target is not None:
            raise InvalidRequest("--compare takes two result files and no target")
        return _compare(*compare)
    if target is None:
        raise InvalidRequest("give a model, an address or a folder of WAV files, or --compare A.json B.json")
    items = _items(target, texts, limit)
    numbers = _seeds(seeds)
    if seeds is not None and _holds_recordings(target):
        raise InvalidRequest("--seeds is for what speaks; recordings are as they are")
    recorded = teacher_files(items, teacher)
    if teacher is not None and not recorded:
        raise InvalidRequest(f"--teacher {teacher} has no recording of any text, such as {items[0].name}.wav")
    cloned = voice is None and any(item.reference for item in items)
    known_voice = bool(reference_audio or recorded or cloned)
    if min_similarity is not None and not known_voice:
        raise InvalidRequest("--min-similarity needs a voice to be like: --reference-audio or --teacher")
    compares = _compares(known_voice, asked=reference_audio is not None or min_similarity is not None)
    check_outputs(json_out, plot, "eval")
    limits: dict[str, float | None] = {
        "--max-wer": max_wer,
        "--min-similarity": min_similarity,
        "--max-missed": max_missed,
        "--max-length-ratio": max_length_ratio,
        "--max-clicking": max_clicking,
        "--max-clipping": max_clipping,
        "--max-looped": max_looped,
        "--max-dropped": max_dropped,
        "--max-failures": max_failures,
    }
    asked: dict[str, Any] = {
        "texts": texts,
        "items": len(items),
        "seeds": seeds,
        "concurrency": concurrency,
        "voice": voice,
    }
    asked |= {"whisper": whisper, "language": language, "long": long, "max_frames": max_frames}
    with ExitStack() as stack:
        watch = stack.enter_context(progress("calling who listens"))
        judge = Judge(
            listen=None if whisper == NONE else Whisper(whisper, language=language, threads=threads),
            likeness=Likeness() if compares else None,
            language=language,
            long=long,
        )
        voice_of = voices(judge.likeness, items, reference_audio, recorded, cloned=cloned, watch=watch)
        watch("calling who speaks")
        if target.startswith(("http://", "https://")):
            server = Server(
                url=target, model=model, voice=voice, api_key=api_key, max_frames=max_frames,
                extra=fields_of(extra or []), timeout_s=timeout,
            )  # fmt: skip
            about = server.about()
            speak: Speak = replace(server, model=model or first_model(about))
        elif _holds_recordings(target):
            about = {"folder": target}
            speak = recordings({item.name: Path(target) / f"{item.name}.wav" for item in items})
        else:
            about = {"model": target}
            speak = stack.enter_context(
                _engine(target, voice, max_frames, profile, settings_of(settings or []))
            )
        result = new_result(["hocket", *sys.argv[1:]], hocket.__version__, about, asked)
        lengths = {name: read_wav(path).seconds for name, path in recorded.items()}
        judged = partial(evaluate, judge=judge, lengths=lengths, voice_of=voice_of, watch=watch)
        pairs = [(item, seed) for seed in numbers for item in items]
        run = judged(pairs, speak, concurrency=concurrency, keep=keep)
        result.interrupted = _collect(run, result.utterances)
        if recorded and not result.interrupted:
            watch("the teacher")
            known = [(item, None) for item in items if item.name in recorded]
            run = judged(known, recordings(recorded))
            result.interrupted = _collect(run, result.teacher)
    result.totals = totals(result.utterances)
    result.teacher_totals = totals(result.teacher) if result.teacher else None
    result.gates = judge_gates(result.totals, limits)
    deliver(result, json_out, plot, show=partial(_show, result), draw=plots.draw)
    if result.interrupted:
        note("interrupted: this is what there is")
        raise typer.Exit(130)
    for gate in result.gates:
        colour, word = ("green", "holds") if gate.holds else ("bold red", "fails")
        console.print(f"[{colour}]{word}[/] {gate.gate}: {gate.told}", soft_wrap=True)
    if not all(gate.holds for gate in result.gates):
        raise typer.Exit(1)


@contextmanager
def _engine(
    model: str, voice: str | None, max_frames: int | None, profile: str | None, overrides: dict[str, str]
) -> Iterator[Speak]:
    """A model in this process, as a function that speaks."""
    from hocket.audio.decode import check_reference, decode
    from hocket.core import Reference, SpeechRequest
    from hocket.engine.blocking import Engine
    from hocket.eval.sound import Sound
    from hocket.eval.speakers import Spoken

    def reference(item: Item) -> Reference | None:
        if item.reference is None or voice is not None:
            return None
        samples, rate_hz = decode(item.reference, param="--texts")
        check_reference(samples, rate_hz, param="--texts")
        return Reference(samples=samples, rate_hz=rate_hz, text=item.said, speaker_only=item.said is None)

    def speak(item: Item, seed: int | None) -> Spoken:
        speech = engine.speech(
            SpeechRequest(
                text=item.text, voice=voice, reference=reference(item), seed=seed, max_frames=max_frames
            )
        )
        return Spoken(Sound(speech.samples, speech.sample_rate_hz), speech.finish_reason)

    with Engine(model, profile=profile, overrides=overrides) as engine:
        yield speak


def _collect(run: Generator[Utterance, None, None], into: list[Utterance]) -> bool:
    """All of `run`. -> whether it was interrupted"""
    try:
        for utterance in run:
            into.append(utterance)
    except KeyboardInterrupt:
        run.close()
        return True
    return False


def _show(result: Result, out: Console) -> None:
    from hocket.eval.result import worst
    from hocket.eval.tables import result_columns, totals_table, worst_table

    out.print(totals_table(result_columns(result)), highlight=False)
    wrong = worst(result.utterances)
    if wrong:
        out.print()
        out.print(worst_table(wrong), highlight=False)


def _compare(before: Path, after: Path) -> None:
    from hocket.eval.result import load, same_sounds, wer_change
    from hocket.eval.tables import totals_table

    one, two = load(before), load(after)
    columns = list(zip(names_of(before, after), (one.totals, two.totals), strict=True))
    tables().print(totals_table(columns), highlight=False)
    both, same = same_sounds(one, two)
    note(f"{same} of {both} utterances that both have sound alike, to rounding")
    change = wer_change(one, two)
    if change is not None:
        found, low, high = (100 * value for value in change)
        verdict = "within noise" if low <= 0 <= high else "better" if found < 0 else "worse"
        note(f"word errors {found:+.2f} points, 95 % interval {low:+.2f} … {high:+.2f}: {verdict}")


# --- what the options mean -------------------------------------------------------------------


def _items(target: str, texts: str | None, limit: int | None) -> list[Item]:
    from hocket.eval.texts import HELD_OUT, items_beside, limited, read_items

    if texts is None and _holds_recordings(target):
        return limited(items_beside(Path(target)), limit)
    return limited(read_items(texts or HELD_OUT), limit)


def _holds_recordings(target: str) -> bool:
    """Whether the target is a folder of WAV files, and not of a model."""
    folder = Path(target)
    return folder.is_dir() and not (folder / "config.json").is_file() and any(folder.glob("*.wav"))


def _compares(possible: bool, *, asked: bool) -> bool:
    """Whether voices are compared: where they can be, or were to be. Raises Unsupported if asked in vain."""
    from hocket.eval import likeness

    if asked:
        likeness.check()
    elif possible:
        try:
            likeness.check()
        except Unsupported as error:
            note(error.message)
            return False
    return possible


def _seeds(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    found = text.split(",")
    if not all(part.strip().isdecimal() for part in found):
        raise InvalidRequest(f"--seeds {clip(text)!r} is not a list of whole numbers such as 1,2")
    return [int(part) for part in found]
