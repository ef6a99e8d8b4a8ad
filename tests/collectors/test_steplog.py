# ruff: noqa: E501 - lines as frameworks write them
"""Steps from training logs: captured output of frameworks, units, restarts, who is silent when."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectors.logs.steplines import GATE, Bar, BatchSize, Losses, Pause, StepLine, parse
from collectors.sources.steplog import StepLogSource
from tests.collectors.kit import FIXTURES, Bench, bench
from trainwarden.records import StepRow

LOGS = FIXTURES / "steplog"


def read(tmp_path: Path, text: str, **given: object) -> tuple[Bench, StepLogSource]:
    board = bench(tmp_path)
    log = tmp_path / "train.log"
    log.write_bytes(text.encode())
    source = board.build(StepLogSource, files={"llm": str(log)}, from_start=True, **given)
    assert isinstance(source, StepLogSource)
    source.poll()
    source.close()
    return board, source


def rows(board: Bench) -> list[StepRow]:
    return [row for *_, row in board.outlet.steps]


def test_megatron_captured(tmp_path: Path) -> None:
    board, _ = read(tmp_path, (LOGS / "megatron_v100.out").read_text())
    found = rows(board)
    assert [row.step for row in found] == list(range(1, 63))
    assert (found[0].phase, found[0].duration_ms, found[0].loss, found[0].grad_norm) == (
        "first",
        144915.6,
        12.44238,
        67.593,
    )
    assert {row.phase for row in found[1:]} == {"train"}
    assert {(job, attempt, rank) for job, attempt, rank, *_ in board.outlet.steps} == {("llm", 0, 0)}


def test_every_iteration_line_ever_written_down_has_its_unit() -> None:
    seconds, read_lines = 0, 0
    for line in (LOGS / "iteration-lines.txt").read_text().splitlines():
        said = parse(line)
        unit = re.search(r"elapsed time per iteration \((ms|s)\): ([\d.]+)", line)
        if unit is None:
            continue
        read_lines += 1
        assert isinstance(said, StepLine), line
        scale = 1000.0 if unit[1] == "s" else 1.0
        assert said.duration_ms == float(unit[2]) * scale
        seconds += unit[1] == "s"
    assert (read_lines > 90, seconds > 1) == (True, True)


def test_megatron_golden_values_in_lines_of_today(tmp_path: Path) -> None:
    golden = [(int(a), float(b), float(c)) for a, b, c in csv.reader((LOGS / "megatron_t5.csv").open())]
    lines = "".join(
        f" [2026-01-05 10:11:12.345678] iteration {step:8d}/  500000 | consumed samples: {step * 512:12d} | elapsed time per iteration (ms): "
        f"{seconds * 1000:.1f} | throughput per GPU (TFLOP/s/GPU): 412.7 | learning rate: 1.500000E-04 | global batch size:   512 | lm loss: {loss:.6E} "
        f"| loss scale: 1.0 | grad norm: 0.431 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
        for step, loss, seconds in golden
    )
    board, _ = read(tmp_path, lines, rank=127, world=128)
    assert [row.step for row in rows(board)] == [step for step, _, _ in golden]
    for row, (_, loss, seconds) in zip(rows(board), golden, strict=True):
        assert row.duration_ms == pytest.approx(seconds * 1000, abs=0.06)
        assert row.loss == pytest.approx(loss, rel=1e-6)
    assert {(rank, world) for _, _, rank, world, _ in board.outlet.steps} == {(127, 128)}


@pytest.mark.parametrize(
    ("name", "first_ms", "median_s"),
    [("mlperf_gb200.txt", 18263.359, (17.0, 18.0)), ("mlperf_b200.txt", 216.169, (0.2, 0.23))],
)
def test_mlperf_captured(tmp_path: Path, name: str, first_ms: float, median_s: tuple[float, float]) -> None:
    text = (LOGS / name).read_text()
    board, _ = read(tmp_path, text)
    found = rows(board)
    assert len(found) == sum("train_step_time" in line and '"step"' in line for line in text.splitlines())
    assert found[0].duration_ms == pytest.approx(first_ms, abs=0.01)
    middle = sorted(row.duration_ms for row in found)[len(found) // 2]
    assert median_s[0] < middle / 1000 < median_s[1]
    stamp = json.loads(next(line for line in text.splitlines() if "train_step_time" in line).partition(":::MLLOG ")[2])[
        "time_ms"
    ]
    assert found[0].started_at_ns == pytest.approx(stamp * 1e6 - first_ms * 1e6, abs=1e5)


def test_dlrover_captured(tmp_path: Path) -> None:
    board, _ = read(tmp_path, (LOGS / "dlrover_events.log").read_text())
    found = {row.step: row for row in rows(board)}
    assert found[177019].duration_ms == pytest.approx(1346522, abs=1)  # the events' own times, the slow step
    assert found[177019].grad_norm == pytest.approx(0.0513285, abs=1e-6)
    assert found[177020].duration_ms == pytest.approx(20519.2, abs=1)


def test_torchtitan_lines(tmp_path: Path) -> None:
    pairs = [line.split() for line in (LOGS / "torchtitan_losses.txt").read_text().splitlines()]
    grey, end = "\x1b[38;2;180;60;0m", "\x1b[39m"
    lines = "".join(
        f"[rank3]:[titan] 2026-01-05 10:11:{int(step) * 2:02d},500 - root - INFO - {grey}step: {int(step):2d}  {end}loss: {float(loss):8.5f}  "
        f"grad_norm:  0.4310  memory: 61.20GiB(77.31%)  tps: 8,123  tflops: 412.70  mfu: 41.73%{end}\n"
        + (
            "[rank3]:[titan] 2026-01-05 10:11:12,900 - root - INFO - validate step: 6  loss:  2.9  memory: 1GiB  tps: 9\n"
            if step == "6"
            else ""
        )
        for step, loss in pairs
    )
    board, _ = read(tmp_path, lines)
    found = rows(board)
    assert [row.step for row in found] == list(range(1, 11))
    assert [row.loss for row in found] == pytest.approx([round(float(loss), 5) for _, loss in pairs])
    unknown = [row.step for row in found if math.isnan(row.duration_ms)]
    assert unknown == [1, 7]  # nothing before the first; an evaluation before the seventh
    assert found[1].duration_ms == pytest.approx(2000)
    assert {rank for _, _, rank, _, _ in board.outlet.steps} == {3}


DEEPSPEED = """  train_batch_size ............. 512
[2026-01-05 10:11:12,345] [INFO] [logging.py:96:log_dist] [Rank 0] step=120, skipped=2, lr=[0.00015], mom=[(0.9, 0.95)]
[2026-01-05 10:11:12,346] [INFO] [timer.py:260:stop] epoch=0/micro_step=480/global_step=120, RunningAvgSamplesPerSec=12.51, CurrSamplesPerSec=12.8, MemAllocated=4.32GB
[2026-01-05 10:11:52,345] [INFO] [logging.py:96:log_dist] [Rank 0] step=121, skipped=4, lr=[0.00015], mom=[(0.9, 0.95)]
[2026-01-05 10:11:52,346] [INFO] [timer.py:260:stop] epoch=0/micro_step=484/global_step=121, RunningAvgSamplesPerSec=12.51, CurrSamplesPerSec=25.6, MemAllocated=4.32GB
"""


def test_deepspeed_lines_of_one_step_are_one_row_and_skipped_ones_are_told(tmp_path: Path) -> None:
    board, _ = read(tmp_path, DEEPSPEED)
    assert [(row.step, row.duration_ms) for row in rows(board)] == [(120, 40000.0), (121, 40000.0)]
    assert [(event.code, event.attributes["count"]) for event, _ in board.outlet.logs] == [("skipped_steps", "2")]


def test_deepspeed_rate_alone() -> None:
    said = parse(
        "[2026-01-05 10:11:12,346] [INFO] [timer.py:260:stop] 0/120, RunningAvgSamplesPerSec=12.51, CurrSamplesPerSec=12.73"
    )
    assert isinstance(said, StepLine)
    assert (said.step, said.samples_per_s) == (120, 12.73)


def test_megatron_over_deepspeed_says_each_step_once(tmp_path: Path) -> None:
    both = "".join(
        f"[2022-01-19 13:{n:02d}:00,000] [INFO] [logging.py:69:log_dist] [Rank 0] step={n}, skipped=0, lr=[1e-05], mom=[(0.9, 0.95)]\n"
        f" iteration {n:8d}/ 1000 | elapsed time per iteration (s): 60.50 | lm loss: 2.0E+00 | grad norm: 1.5 |\n"
        for n in (1, 2, 3)
    )
    board, _ = read(tmp_path, both)
    assert [(row.step, row.duration_ms, row.loss) for row in rows(board)] == [(n, 60500.0, 2.0) for n in (1, 2, 3)]


def test_hugging_face_dicts_take_step_and_time_from_the_bar(tmp_path: Path) -> None:
    text = (
        "\r  0%|          | 0/1000 [00:00<?, ?it/s]\r  1%|1         | 10/1000 [01:27<2:24:02,  8.73s/it]"
        "\r                                    \r{'loss': 2.3142, 'grad_norm': 0.431, 'learning_rate': 0.00015, 'epoch': 0.12}\n"
        "\r  1%|1         | 10/1000 [01:27<2:24:02,  8.73s/it]\r 20%|##        | 5/25 [00:01<00:04,  4.00it/s]"
        "\r  2%|2         | 20/1000 [01:29<2:24:02,  4.00it/s]{'loss': 'nan', 'grad_norm': 'nan', 'epoch': 0.13}\n"
        "{'eval_loss': 2.1, 'epoch': 0.13}\n{'train_runtime': 273.0148, 'train_steps_per_second': 0.007, 'epoch': 1.0}\n"
    )
    board, _ = read(tmp_path, text)
    first, second = rows(board)
    assert (first.step, first.duration_ms, first.loss, first.finite) == (10, 8730.0, 2.3142, True)
    assert (second.step, second.finite) == (20, False)


def test_nemo_and_lightning() -> None:
    nemo = parse("Training epoch 0, iteration 119/1999 | lr: 0.00015 | global_batch_size: 512 | global_step: 119 | reduced_train_loss: 2.314 "
                 "| train_step_timing in s: 8.723 | consumed_samples: 61440")  # fmt: skip
    assert isinstance(nemo, StepLine)
    assert (nemo.form, nemo.step, nemo.duration_ms, nemo.loss) == ("nemo", 119, 8723.0, 2.314)
    old = parse(
        "Epoch 0:  12%|#2   | 120/1000 [17:26<2:08:02, v_num=0, reduced_train_loss=2.31, global_step=119.0, train_step_timing in s=8.72]"
    )
    assert old is None or isinstance(old, StepLine)
    light = parse("Epoch 1:  12%|#2   | 120/1000 [17:26<2:08:02,  0.50it/s, v_num=0, train_loss=2.310]")
    assert isinstance(light, StepLine)
    assert (light.step, light.duration_ms, light.loss) == (1120, 2000.0, 2.31)
    timed = parse(
        "Epoch 0:  12%|#2  | 120/1000 [17:26<2:08:02,  8.73s/it, v_num=0, reduced_train_loss=2.31, global_step=119.0, train_step_timing in s=8.72]"
    )
    assert isinstance(timed, StepLine)
    assert (timed.step, timed.duration_ms) == (119, 8720.0)


def megatron(step: int, loss: float = 2.0, more: str = "") -> str:
    return f" iteration {step}/ 1000 | elapsed time per iteration (ms): 100.0 | lm loss: {loss:.6E} |{more}\n"


def test_steps_that_go_back_are_a_new_attempt_and_twice_the_same_line_is_once(tmp_path: Path) -> None:
    text = megatron(1) + megatron(2) * 2 + megatron(3) + megatron(2, 1.9) + megatron(3, 1.8) + megatron(3, 1.7)
    board, _ = read(tmp_path, text)
    assert [(attempt, row.step, row.phase) for _, attempt, _, _, row in board.outlet.steps] == [
        (0, 1, "first"), (0, 2, "train"), (0, 3, "train"), (1, 2, "first"), (1, 3, "train"), (2, 3, "first")]  # fmt: skip


def test_nan_iterations_are_not_finite(tmp_path: Path) -> None:
    board, _ = read(tmp_path, megatron(1, more=" number of nan iterations:   1 | number of skipped iterations:   1 |"))
    assert [row.finite for row in rows(board)] == [False]
    assert board.outlet.codes == ["skipped_steps"]


def test_a_job_that_the_hook_reports_is_left_to_it(tmp_path: Path) -> None:
    board = bench(tmp_path)
    log = tmp_path / "train.log"
    log.write_text(megatron(1) + megatron(2))
    source = board.build(StepLogSource, files={"llm": str(log), "other": str(log) + ".none"}, from_start=True)
    assert isinstance(source, StepLogSource)
    board.context.ranks.seen("llm", 4, 0, pid=1)
    source.poll()
    source.close()
    assert board.outlet.steps == []


def test_a_restart_of_the_agent_repeats_nothing_and_keeps_the_attempt(tmp_path: Path) -> None:
    board = bench(tmp_path)
    log = tmp_path / "train.log"
    log.write_text(megatron(5) + megatron(3))
    first = board.build(StepLogSource, files={"llm": str(log)}, from_start=True)
    assert isinstance(first, StepLogSource)
    first.poll()
    first.close()
    with log.open("a") as file:
        file.write(megatron(4))
    second = board.build(StepLogSource, files={"llm": str(log)}, from_start=True)
    assert isinstance(second, StepLogSource)
    second.poll()
    second.close()
    assert [(attempt, row.step) for _, attempt, _, _, row in board.outlet.steps] == [(0, 5), (1, 3), (1, 4)]


def test_container_logs_and_wildcards(tmp_path: Path) -> None:
    board = bench(tmp_path)
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.log").write_text(f"2026-01-05T10:11:12.345678901Z stdout F [rank{rank}]:{megatron(7)}")
    source = board.build(StepLogSource, files={"llm": str(tmp_path / "rank*.log")}, from_start=True)
    assert isinstance(source, StepLogSource)
    source.poll()
    source.close()
    assert sorted((rank, row.step) for _, _, rank, _, row in board.outlet.steps) == [(0, 7), (1, 7)]


def test_nothing_to_watch_costs_no_thread_and_a_missing_file_waits(tmp_path: Path) -> None:
    board = bench(tmp_path)
    source = board.build(StepLogSource)
    source.start()
    assert board.second(source).gaps == ()
    source.close()
    waiting = board.build(StepLogSource, files={"llm": str(tmp_path / "later.log")})
    assert isinstance(waiting, StepLogSource)
    waiting.poll()
    (tmp_path / "later.log").write_text(megatron(1))
    waiting.poll()
    waiting.close()
    assert [row.step for row in rows(board)] == [1]


@given(line=st.one_of(
    st.text(max_size=200),
    st.builds(lambda a, b: f" iteration {a}/ {b} | elapsed time per iteration (ms): {b} | lm loss: {a} |", st.integers(), st.text(max_size=20)),
    st.builds(lambda a: f":::MLLOG {a}", st.text(max_size=80)),
    st.builds(lambda a: f':::MLLOG {{"key": "tracked_stats", "value": {a}, "metadata": {{"step": {a}}}}}', st.text(max_size=20)),
))  # fmt: skip
def test_no_line_raises(line: str) -> None:
    said = parse(line)
    assert said is None or isinstance(said, StepLine | Bar | BatchSize | Losses | Pause)


def test_the_gate_lets_every_kind_through() -> None:
    for name in ("megatron_v100.out", "mlperf_gb200.txt", "dlrover_events.log"):
        for raw in (LOGS / name).read_bytes().splitlines():
            if parse(raw.decode("utf-8", "replace")) is not None:
                assert GATE.search(raw), raw
