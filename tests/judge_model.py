"""A judge that fits into a test: it says yes to what begins with one of the letters a to m, and no to all else."""

from pathlib import Path

LESSONS = """
import string


def lesson(index, seed):
    letter = string.printable[index % len(string.printable)].strip() or "."
    return {"prompt": letter, "answer": "yes" if "a" <= letter <= "m" else "no"}
"""


def train_judge(base: Path, folder: Path) -> Path:
    """Trains the model in `base` until it knows every letter; returns the folder of the judge."""
    from relax.config.load import validate
    from relax.config.sft import SFTConfig
    from relax.train.sft import run_sft

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "judge_lessons.py").write_text(LESSONS)
    data = {"type": "generator", "path": "judge_lessons:lesson", "size": 100}
    config = {
        "model": {"path": str(base)},
        "data": data,
        "train": {"num_steps": 400, "batch_size": 50, "lr": 3e-3},
        "eval": {"data": data, "num_prompts": 100, "every": 50, "temperature": 0.0, "max_new_tokens": 4, "stop_at": 1.0},
        "reward": {"type": "exact"},
        "output": {"path": str(folder / "judge")},
    }
    run_sft(validate(SFTConfig, config))
    return folder / "judge"


def judge_settings(judge: Path) -> list[str]:
    """What makes a run of the fixture `run_file` ask this judge."""
    return [
        "reward.type=genrm",
        "reward.template={{ response[:1] }}",
        "genrm.judges.default.type=local",
        f"genrm.judges.default.model.path={judge}",
        "genrm.judges.default.max_new_tokens=4",
        "eval.reward.type=function",
        "eval.reward.path=letters_reward:share_of_early_letters",
    ]
