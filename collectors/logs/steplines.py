"""Step lines of training frameworks: what each prints, in one form. Units differ, and so does who prints and how often."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

NAN = math.nan
GATE = re.compile(
    rb"elapsed time per iteration|:::MLLOG|step|Step|it/s|s/it|'loss'|validat|checkpoint|train_batch_size|#save|#log|_timing"
)
"""What a line must contain to be looked at."""

_N = r"[-+]?(?:\d[\d,]{0,30}(?:\.\d{0,30})?(?:[eE][-+]?\d{1,4})?|[nN]a[nN]|[iI]nf(?:inity)?)"
_MAP = re.compile(r"iteration\s{1,20}(?P<step>\d{1,12})\s{0,4}/\s{0,20}\d{1,12} \|(?P<rest>.*)")
_TITAN = re.compile(
    rf"(?<!validate )step:\s{{1,8}}(?P<step>\d{{1,12}})\s{{1,8}}loss:\s{{1,8}}(?P<loss>{_N})(?P<rest>.*)"
)
_TITAN_PART = re.compile(rf"(?P<name>grad_norm|tps):\s{{1,8}}(?P<value>{_N})")
_DEEPSPEED = re.compile(r"\[Rank \d{1,8}\] step=(?P<step>\d{1,12}), skipped=(?P<skipped>\d{1,12})")
_DEEPSPEED_RATE = re.compile(
    rf"(?:global_step=|\s\d{{1,9}}/)(?P<step>\d{{1,12}}), (?:RunningAvgSamplesPerSec={_N}, Curr)?SamplesPerSec=(?P<rate>{_N})"
)
_BATCH = re.compile(r"^\s{0,40}(?:\[.{0,200}\] {0,4})?train_batch_size \.{3,80} (?P<batch>\d{1,12})")
_HF = re.compile(rf"\{{'loss': '?(?P<loss>{_N})'?(?P<rest>.*)")
_HF_PART = re.compile(rf"'grad_norm': '?(?P<value>{_N})")
_BAR = re.compile(
    rf"(?P<before>[^|]{{0,80}}?)\d{{1,3}}%\|[^|]{{0,200}}\| (?P<n>\d{{1,12}})/(?P<total>\d{{1,12}}) "
    rf"\[[\d:]{{2,12}}<[\d:?]{{1,12}}, {{1,4}}(?P<rate>{_N}|\?)(?P<unit>s/it|it/s)(?P<rest>.*)\]"
)
_PAIR = re.compile(rf"(?P<name>[A-Za-z_][\w /-]{{0,60}})=(?P<value>{_N})")
_EPOCH = re.compile(r"Epoch (?P<epoch>\d{1,6})")
_DLROVER = re.compile(r"\[\w{1,40}\] \[#(?P<what>step|log|save)\] \[(?P<phase>BEGIN|END|INSTANT)\] (?P<json>\{.*\})")
_PAUSE = re.compile(
    r"validate step:|validation loss at|[Ss]aving (?:the |a )?checkpoint|successfully saved checkpoint|Evaluating|Running validation"
)
_TIME = re.compile(r"(?P<day>\d{4}-\d\d-\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<fraction>\d{1,9}))?")
LOSSES = ("lm loss", "lm-loss", "reduced_train_loss", "train_loss", "loss", "total loss")
NORMS = ("grad norm", "grad_norm")


@dataclass(frozen=True)
class StepLine:
    """What one line says about a step; NaN and 0 where it does not say.

    Attributes
    ----------
    form
        Kind of line; lines of several kinds may speak of the same step.
    duration_ms
        Of one step; an average where the framework logs every so many steps.
    at_s
        The line's own time, for differences only: its zone is unknown.
    wall_ns
        Unix time, where the line has it.
    skipped
        Steps that the loss scaler skipped: since the last line, or in all where `skipped_in_all`.
    begins
        The step begins here; it has no duration yet.
    """

    form: str
    step: int
    duration_ms: float = NAN
    loss: float = NAN
    grad_norm: float = NAN
    finite: bool = True
    skipped: int = 0
    skipped_in_all: bool = False
    samples_per_s: float = NAN
    at_s: float = NAN
    wall_ns: int = 0
    begins: bool = False


@dataclass(frozen=True)
class Bar:
    """A progress bar: step, number of steps, time of one."""

    step: int
    total: int
    duration_ms: float


@dataclass(frozen=True)
class BatchSize:
    """Samples of a step, over all ranks."""

    samples: int


@dataclass(frozen=True)
class Losses:
    """The values of a step without its number: that of the progress bar before."""

    loss: float
    grad_norm: float
    finite: bool


@dataclass(frozen=True)
class Pause:
    """An evaluation or a checkpoint lies between two steps."""


Said = StepLine | Bar | BatchSize | Losses | Pause


def parse(text: str) -> Said | None:
    """What a line says of steps; None for most.

    Examples
    --------
    >>> parse(" iteration   10/ 100 | elapsed time per iteration (s): 2.5 | lm loss: 3.1E+00 |").duration_ms
    2500.0
    """
    for literal, read in _READERS:
        if literal in text and (said := read(text)) is not None:
            return said
    return None


def number(text: str) -> float:
    """A printed number; thousands may have commas.

    Examples
    --------
    >>> number("8,123"), number("inf")
    (8123.0, inf)
    """
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return NAN


def _map(text: str) -> StepLine | None:
    """Megatron-LM, Megatron-DeepSpeed and NeMo: ``iteration N/M | name: value | ...``, read by name."""
    found = _MAP.search(text)
    if found is None:
        return None
    fields = dict(_field(part) for part in found["rest"].split("|") if ":" in part)
    nemo = "global_step" in fields
    step = (
        int(number(fields["global_step"]))
        if nemo and math.isfinite(number(fields["global_step"]))
        else int(found["step"])
    )
    loss, norm = _first(fields, LOSSES), _first(fields, NORMS)
    broken = _count(fields, "number of nan iterations") > 0
    return StepLine("nemo" if nemo else "megatron", step, _map_duration_ms(fields), number(loss), number(norm),
                    finite=not broken and _finite(loss, norm), skipped=_count(fields, "number of skipped iterations"),
                    at_s=time_of(text))  # fmt: skip


def _field(part: str) -> tuple[str, str]:
    name, _, value = part.partition(":")
    return name.strip(), value.strip()


def _map_duration_ms(fields: Mapping[str, str]) -> float:
    for name, scale in (("elapsed time per iteration (ms)", 1.0), ("elapsed time per iteration (s)", 1000.0),
                        ("train_step_timing in s", 1000.0)):  # fmt: skip
        if name in fields:
            return number(fields[name]) * scale
    return NAN


def _titan(text: str) -> StepLine | None:
    found = _TITAN.search(text)
    if found is None:
        return None
    rest = {part["name"]: part["value"] for part in _TITAN_PART.finditer(found["rest"])}
    norm = rest.get("grad_norm", "")
    return StepLine("torchtitan", int(found["step"]), NAN, number(found["loss"]), number(norm),
                    finite=_finite(found["loss"], norm), at_s=time_of(text))  # fmt: skip


def _deepspeed(text: str) -> StepLine | None:
    found = _DEEPSPEED.search(text)
    if found is None:
        return None
    return StepLine(
        "deepspeed", int(found["step"]), skipped=int(found["skipped"]), skipped_in_all=True, at_s=time_of(text)
    )


def _deepspeed_rate(text: str) -> StepLine | None:
    found = _DEEPSPEED_RATE.search(text)
    return StepLine("deepspeed_rate", int(found["step"]), samples_per_s=number(found["rate"])) if found else None


def _batch(text: str) -> BatchSize | None:
    found = _BATCH.match(text)
    return BatchSize(int(found["batch"])) if found else None


def _hf(text: str) -> StepLine | Losses | None:
    found = _HF.search(text)
    if found is None:
        return None
    norm = _HF_PART.search(found["rest"])
    said = norm["value"] if norm else ""
    told = Losses(number(found["loss"]), number(said), _finite(found["loss"], said))
    bar = _bar(text[: found.start()])
    if isinstance(bar, Bar):
        return StepLine("hf", bar.step, bar.duration_ms, told.loss, told.grad_norm, told.finite)
    return told


def _bar(text: str) -> StepLine | Bar | None:
    """tqdm: seconds a step, or steps a second when it is fast. Lightning puts the values behind it."""
    found = _BAR.search(text)
    if found is None:
        return None
    rate, step, total = number(found["rate"]), int(found["n"]), int(found["total"])
    duration_ms = rate * 1000 if found["unit"] == "s/it" else (1000 / rate if rate > 0 else NAN)
    fields = {part["name"].strip(): part["value"] for part in _PAIR.finditer(found["rest"])}
    loss = _first(fields, LOSSES)
    if loss:
        epoch = _EPOCH.search(found["before"])
        number_of = (
            number(fields["global_step"])
            if "global_step" in fields
            else (int(epoch["epoch"]) * total if epoch else 0) + step
        )
        timing = fields.get("train_step_timing in s", "")
        return StepLine("lightning", int(number_of) if math.isfinite(number_of) else step,
                        number(timing) * 1000 if timing else duration_ms, number(loss), number(_first(fields, NORMS)),
                        finite=_finite(loss))  # fmt: skip
    return Bar(step, total, duration_ms) if not found["before"].strip() or _EPOCH.search(found["before"]) else None


def _mllog(text: str) -> StepLine | BatchSize | Pause | None:
    """MLPerf: JSON with unix time; ``tracked_stats`` carries the time of a step."""
    entry = _json(text.partition(":::MLLOG ")[2])
    key, value, metadata = entry.get("key"), entry.get("value"), entry.get("metadata")
    if key in ("eval_start", "eval_stop"):
        return Pause()
    if key == "global_batch_size" and isinstance(value, int) and value > 0:
        return BatchSize(value)
    if key != "tracked_stats" or not isinstance(value, dict) or not isinstance(metadata, dict):
        return None
    step, time_ms = _real(metadata.get("step")), _real(entry.get("time_ms"))
    if math.isnan(step) or "train_step_time" not in value:
        return None
    loss = _real(value.get("reduced_train_loss"))
    return StepLine("mllog", int(step), _real(value["train_step_time"]) * 1000, loss,
                    finite="reduced_train_loss" not in value or math.isfinite(loss),
                    wall_ns=int(time_ms * 1e6) if 0 < time_ms < 1e14 else 0)  # fmt: skip


def _dlrover(text: str) -> StepLine | Pause | None:
    found = _DLROVER.search(text)
    if found is None:
        return None
    if found["what"] == "save":
        return Pause()
    entry = _json(found["json"])
    step = _real(entry.get("global_step"))
    if math.isnan(step):
        return None
    if found["what"] == "step":
        # the step that begins after N is N + 1
        begins = found["phase"] == "BEGIN"
        return StepLine("dlrover", int(step) + begins, at_s=time_of(text), begins=begins)
    logs = entry.get("logs")
    fields = {str(k): str(v) for k, v in logs.items()} if isinstance(logs, dict) else {}
    loss, norm = _first(fields, LOSSES), _first(fields, NORMS)
    return StepLine("dlrover_log", int(step), _map_duration_ms(fields), number(loss), number(norm),
                    finite=_finite(loss, norm) and not _count(fields, "number of nan iterations"),
                    skipped=_count(fields, "number of skipped iterations"))  # fmt: skip


def _pause(text: str) -> Pause | None:
    return Pause() if _PAUSE.search(text) else None


_READERS: tuple[tuple[str, Callable[[str], Said | None]], ...] = (
    (":::MLLOG ", _mllog), (" | ", _map), ("[#", _dlrover), ("loss:", _titan), ("skipped=", _deepspeed), ("SamplesPerSec", _deepspeed_rate),
    ("train_batch_size", _batch), ("'loss'", _hf), ("it", _bar), ("", _pause),
)  # fmt: skip


def time_of(text: str) -> float:
    """Seconds of the first time stamp in a line, as if it were UTC; NaN without one."""
    found = _TIME.search(text)
    if found is None:
        return NAN
    try:
        moment = datetime.fromisoformat(f"{found['day']}T{found['clock']}+00:00")
    except ValueError:
        return NAN
    return moment.timestamp() + float(f"0.{found['fraction'] or 0}")


def _first(fields: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((fields[name] for name in names if fields.get(name)), "")


def _count(fields: Mapping[str, str], name: str) -> int:
    value = number(fields.get(name, ""))
    return int(value) if math.isfinite(value) else 0


def _finite(*texts: str) -> bool:
    """Whether everything that was printed is a finite number; nothing printed is no sign of trouble."""
    return all(math.isfinite(number(text)) for text in texts if text)


def _json(text: str) -> dict[str, Any]:
    try:
        entry = msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _real(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e15 else NAN
