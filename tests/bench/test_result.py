from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hocket.bench import plots, result
from hocket.bench.compare import compare, differences
from hocket.bench.load import Level, Share, Workload
from hocket.bench.metrics import Trace
from hocket.bench.result import Result, level_result, new_result
from hocket.bench.tables import remarks, result_table
from hocket.errors import InvalidRequest, Unsupported
from hocket.results import check_plots, save


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.bench.compare.DRAWS", 200)


WORK = Workload(url="http://a", api_key="secret", model="m", texts=Path("meta.lst"))


def measured(
    ttfp_s: float = 0.1, *, load: int = 2, spread: float = 0.02, requests: int = 60, **work: Any
) -> Result:
    """A closed loop of requests that take half a second, bring a second of sound and vary in TTFP."""
    rng = np.random.default_rng(load)
    traces = []
    for n in range(requests):
        due = 50.0 + 0.5 * (n // load)
        first = ttfp_s + spread * rng.random()
        times = [due + first, due + 0.5]
        traces.append(Trace(due, due, n % load, 10, times, [24_000, 24_000], 48_000.0, due + 0.5))
    share = Share(traces, traces[-1].due, cpu_s=0.5, wall_s=10.0)
    made = new_result(replace(WORK, **work), ["hocket", "bench", "http://a", "--api-key", "secret"], {}, "0")
    level = Level(kind="closed", load=load, requests=requests)
    made.levels.append(level_result(level, [share], 50.0, stopped=False))
    return made


def test_file_comes_back_as_it_was(tmp_path: Path) -> None:
    made = measured()
    save(made, tmp_path / "a.json")
    assert result.load(tmp_path / "a.json") == made
    assert made.schema == "hocket-bench/1"
    assert made.failures == 0
    assert made.machine["cores"] >= 1


def test_key_is_never_written(tmp_path: Path) -> None:
    made = measured()
    save(made, tmp_path / "a.json")
    assert b"secret" not in (tmp_path / "a.json").read_bytes()
    assert made.command == "hocket bench http://a --api-key …"
    other = new_result(WORK, ["hocket", "--api-key=secret", "--extra", 'a="b c"'], {}, "0")
    assert other.command == "hocket --api-key=… --extra 'a=\"b c\"'"


SCHEMA = {
    "Result": "schema created command interrupted hocket machine server work levels",
    "LevelResult": "kind load name asked wall_s interrupted unfinished steady whole examples client requests "
    "block_audio_s block_ended sample",
    "Summary": "window requests failures req_s audio_s_per_s audio_each ttfp smooth_start gap worst_gap e2e "
    "rtf underruns underrun_share silence longest_silence continuity listeners_served in_flight packets_each "
    "send_lag retry_after_s",
    "Spread": "n mean p50 p90 p99 max",
    "Columns": "due_s ttfp_s smooth_start_s e2e_s audio_s worst_gap_s underruns silence_s longest_silence_s "
    "packets send_lag_s client",
    "Packets": "due_s ended_s times_s audio_s",
    "Window": "start_s end_s rule",
    "ClientCost": "processes cpu_share us_per_packet send_lag_p99_ms",
}


def test_schema_is_the_one_that_was_published() -> None:
    """A name that goes or changes its meaning makes a new `SCHEMA`; a new one joins the table."""
    found = msgspec.json.schema(Result)["$defs"]
    assert {name: " ".join(found[name]["properties"]) for name in SCHEMA} == SCHEMA


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "is of schema 'None', not 'hocket-bench/1'"),
        ('{"schema":"hocket-bench/9"}', "is of schema 'hocket-bench/9'"),
        ("[1]", "is not a result of hocket bench --json"),
        ('{"schema":"hocket-bench/1"}', "missing required field"),
    ],
)
def test_other_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InvalidRequest) as caught:
        result.load(tmp_path / "a.json")
    assert message in caught.value.message


def verdicts(before: Result, after: Result) -> dict[str, str]:
    return {row.figure: row.verdict for row in compare(before, after)}


def test_equal_runs_are_within_noise() -> None:
    assert set(verdicts(measured(), measured()).values()) == {"within noise"}


def test_difference_beyond_chance_is_told() -> None:
    rows = {row.figure: row for row in compare(measured(0.1), measured(0.2))}
    ttfp = rows["TTFP mean, ms"]
    assert (ttfp.verdict, rows["RTF mean"].verdict, rows["audio-s/s"].verdict) == (
        "worse", "within noise", "within noise",
    )  # fmt: skip
    assert ttfp.before == pytest.approx(110, abs=5)
    assert ttfp.change == pytest.approx(0.1 / 0.11, abs=0.05)
    assert ttfp.low < ttfp.change < ttfp.high
    assert verdicts(measured(0.2), measured(0.1))["TTFP P50, ms"] == "better"


def test_difference_that_two_runs_often_have_is_a_maybe() -> None:
    assert verdicts(measured(0.100), measured(0.107))["TTFP mean, ms"] == "maybe worse"


def test_difference_within_the_spread_is_noise() -> None:
    assert verdicts(measured(0.1, spread=0.2), measured(0.102, spread=0.2))["TTFP P50, ms"] == "within noise"


def test_few_requests_decide_nothing() -> None:
    assert set(verdicts(measured(requests=6), measured(0.3, requests=6)).values()) == {"too few"}


def test_results_need_a_level_in_common() -> None:
    with pytest.raises(
        InvalidRequest, match="share no level: 2 clients in the first, 4 clients in the second"
    ):
        compare(measured(), measured(load=4))


def test_what_was_asked_differently_is_told() -> None:
    assert differences(measured(), measured(seed=3, voice="ada")) == ["voice: None and ada", "seed: 0 and 3"]


def test_plots_are_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = measured()
    made.levels += measured(0.3, load=4).levels
    paths = plots.draw(made, tmp_path / "new")
    assert [path.name for path in paths] == [
        "bench-latency.png",
        "bench-throughput.png",
        "bench-waterfall.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_plots_without_matplotlib_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(Unsupported, match=r'pip install "hocket\[bench\]"'):
        check_plots("bench")


def test_reader_is_told_what_to_doubt() -> None:
    made = measured()
    (level,) = made.levels
    level.client.cpu_share = 0.9
    level.examples["HTTP 503"] = "full"
    level.unfinished = 2
    level.whole.retry_after_s = (1.0, 4.0)
    told = "\n".join(remarks(made))
    assert "2 clients: window 0.50 to 14.50 s of 15.00" in told
    assert "HTTP 503, the first: full" in told
    assert "2 requests were cut off" in told
    assert "come back after 1 to 4 s" in told
    assert "take --processes" in told


def test_listeners_sustained_is_the_largest_level_without_a_gap() -> None:
    made = measured()
    for load, late in ((8, False), (16, False), (32, True)):
        (level,) = measured(load=load).levels
        level.kind = "listeners"
        level.steady.continuity = 0.9 if late else 1.0
        level.load = load
        made.levels.append(level)
    assert list(remarks(made))[-1] == (
        "live listeners sustained: 16 of 8, 16, 32 (continuity ≥ 99%, no failure)"
    )
    assert result_table(made).row_count > 15
