"""`relax status RUN`: where a run stands, from its folder alone; works while it runs and after."""

import io
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relax.observe.ledger_file import LedgerFile, conservation
from relax.observe.progress import duration, shown_waits, sparkline, without_weights
from relax.observe.run_folder import RunFolder

_NUM_WARNINGS = 5
_NUM_RECOVERIES = 3
_STALE = {"dropped": "dropped", "masked": "trained with their oldest tokens masked", "surplus": "given up as surplus"}
_STATS_FRESH_S = 15.0
_COLORS = {"running": "blue", "finished": "green", "stopped": "yellow", "failed": "red", "unknown": "dim"}


def status_dict(run_dir: Path) -> dict[str, Any]:
    """JSON values: state, step, last metrics and evaluation, ages, waits, versions, ledger, recoveries, checkpoints, warnings.

    Raises `ConfigError` when `run_dir` is not a run folder, `DataError` when a file in it cannot be read.
    """
    folder = RunFolder(run_dir)
    folder.check_is_run()
    state, config, rows, evaluations = folder.state(), folder.config(), folder.metrics(), folder.evaluations()
    events, stats = folder.events(), folder.stats()
    is_live = state.state == "running" and time.time() - float(stats.get("time", 0)) < _STATS_FRESH_S
    warnings = [event for event in events if event.get("kind") in ("warning", "error") or event.get("rejected")]
    recoveries = [event for event in events if event.get("kind") == "recovery"]
    ledger = LedgerFile(run_dir)
    return {
        "run": str(run_dir),
        "name": config.get("run", {}).get("name"),
        "state": state.state,
        "message": state.message,
        "pid": state.pid if state.state == "running" else None,
        "step": int(rows[-1]["step"]) if rows else 0,
        "num_steps": config.get("train", {}).get("num_steps"),
        "max_staleness": config.get("rollout", {}).get("max_staleness"),
        "metrics": rows[-1] if rows else {},
        "evaluations": evaluations,
        "waits": shown_waits(stats) if is_live else [],
        "versions": stats.get("versions", {}).get("acknowledged", {}) if is_live else {},
        "without_weights": without_weights(stats) if is_live else {},
        "ages": _ages(rows),
        "stale": stats.get("stale", {}),
        "ledger": ledger.counts(),
        "ledger_faults": ledger.faults(),
        "drops": ledger.drops(),
        "recoveries": recoveries[-_NUM_RECOVERIES:],
        "num_recoveries": len(recoveries),
        "num_faults": sum(event.get("kind") == "fault" for event in events),
        "checkpoints": folder.checkpoints(),
        "exported": str(run_dir / "hf") if (run_dir / "hf" / "config.json").is_file() else None,
        "events": dict(Counter(str(event.get("kind")) for event in events)),
        "warnings": [_warning(event) for event in warnings[-_NUM_WARNINGS:]],
        "num_warnings": len(warnings),
    }


def render_status(run_dir: Path) -> str:
    """The same for people, in colour when the output is a terminal."""
    status = status_dict(run_dir)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in _lines(status, [row.get("reward/mean") for row in RunFolder(run_dir).metrics()]):
        grid.add_row(name, text if isinstance(text, Text) else Text(text))  # never taken for markup
    out = io.StringIO()
    console = Console(file=out, force_terminal=sys.stdout.isatty(), width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _lines(status: Mapping[str, Any], rewards: list[float | None]) -> Iterator[tuple[str, Text | str]]:
    metrics, state = status["metrics"], status["state"]
    yield "run", Text(f"{status['name']} ({status['run']})", style="bold")
    about = f" (process {status['pid']})" if status["pid"] else f": {status['message']}" if status["message"] else ""
    yield "state", Text.assemble((state, _COLORS[state]), about)
    elapsed = f", {duration(metrics['time_s'])} since the roles started" if metrics.get("time_s") is not None else ""
    yield "step", f"{status['step']} of {status['num_steps']}{elapsed}"
    if metrics.get("reward/mean") is not None:
        history = sparkline([reward for reward in rewards if reward is not None])
        yield "reward", f"{metrics['reward/mean']:.3f}  {history}"
    accuracies = [(row["step"], row["eval/accuracy"]) for row in status["evaluations"] if row.get("eval/accuracy") is not None]
    if accuracies:
        shown = accuracies if len(accuracies) <= 6 else [accuracies[0], *accuracies[-5:]]
        yield "held-out", " → ".join(f"{value:.3f} (step {step})" for step, value in shown)
    if metrics.get("response/length_mean") is not None:
        yield "response", f"{metrics['response/length_mean']:.1f} tokens"
    if metrics.get("age/mean") is not None:
        ages = ", ".join(f"{count} of age {age}" for age, count in status["ages"].items())
        so_far = f"; samples so far: {ages}" if ages else ""
        yield "age", f"mean {metrics['age/mean']:.2f}, max {metrics['age/max']}, {status['max_staleness']} allowed{so_far}"
    if stale := {what: count for what, count in status["stale"].items() if count}:
        yield "stale", ", ".join(f"{count} groups {_STALE[what]}" for what, count in stale.items() if what in _STALE)
    if metrics.get("tokens_per_s") is not None and metrics.get("step_s"):
        yield "speed", f"{metrics['tokens_per_s']:,.0f} tokens/s, {metrics['step_s']:.2f} s a step"
        yield "waiting", _shares(metrics)
    for wait in status["waits"]:
        yield "", wait
    if status["versions"]:
        why = status["without_weights"]
        held = (f"{name} {f'none, {why[name]}' if held is None else held}" for name, held in sorted(status["versions"].items()))
        yield "weights", f"versions held: {', '.join(held)}"
    if status["ledger"] is not None:
        yield "prompts", conservation(status["ledger"])
    for fault in status["ledger_faults"]:
        yield "", Text(f"the ledger is wrong: {fault}", style="bold red")
    for reason, count in status["drops"]:
        yield "", f"{count} dropped: {reason}"
    yield "saved", ", ".join(status["checkpoints"]) or "no checkpoint yet"
    if status["exported"]:
        yield "model", status["exported"]
    rehearsed = f", {status['num_faults']} faults on purpose" if status["num_faults"] else ""
    for index, event in enumerate(reversed(status["recoveries"])):
        yield (f"recoveries ({status['num_recoveries']}{rehearsed})" if index == 0 else ""), _recovery(event)
    for index, warning in enumerate(status["warnings"]):
        yield (f"warnings ({status['num_warnings']})" if index == 0 else ""), Text(warning, style="yellow")


def _shares(metrics: Mapping[str, Any]) -> str:
    roles = [role for role in ("actor", "rollout") if metrics.get(f"wait/{role}_s") is not None]
    return ", ".join(f"{role} {min(1.0, max(0.0, metrics[f'wait/{role}_s'] / metrics['step_s'])):.0%}" for role in roles)


def _ages(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Samples trained so far by their age."""
    counts: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if name.startswith("age/count_") and value:
                counts[name.removeprefix("age/count_")] += int(value)
    return dict(sorted(counts.items(), key=lambda item: int(item[0])))


def _recovery(event: Mapping[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(event["time"])) if "time" in event else ""
    return f"{when} {event['role']} ran again after {event['down_s']:.1f} s, at step {event['step']}: {event['cause']}".strip()


def _warning(event: Mapping[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(event["time"])) if "time" in event else ""
    what = event.get("text") or event.get("error") or f"version {event.get('version')}: {event.get('rejected')}"
    return " ".join(part for part in (when, f"{event.get('role') or event.get('subscriber') or event['kind']}:", what) if part)
