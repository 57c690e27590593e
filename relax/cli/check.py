"""`relax check`: validates a run before anything is started, with neither torch nor Ray.

run file -> settings -> model folders -> data -> reward -> run folder, port -> memory, cores
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from relax.cli.check_data import data_findings, reward_findings
from relax.cli.check_judges import judge_findings
from relax.cli.check_media import FEW
from relax.cli.check_models import other_model_findings
from relax.cli.check_settings import setting_findings
from relax.cli.findings import CheckReport, Finding, error, gather, ok, warning
from relax.cli.memory import human_bytes, memory_bytes
from relax.config import RunConfig, load_config
from relax.config.load import read_config_file
from relax.errors import ConfigError, ModelError, RelaxError
from relax.models.folder import ModelFolder, read_model_folder
from relax.roles.topology import answering_roles, local_judges, takes_turns


def check(
    path: str | Path, overrides: Sequence[str] = (), *, ask_teacher: bool = False, all_media: bool = False
) -> CheckReport:
    """Everything that can be said about a run file without starting it. A file that does not load is a finding as well.
    `ask_teacher`: a teacher behind a server is asked about a few tokens; `all_media`: those of all rows are decoded."""
    try:
        config = load_config(path, overrides)
    except RelaxError as failure:
        return gather(str(path), [error(str(path), _other_kind(Path(path)) or str(failure))])
    return check_config(config, str(path), ask_teacher=ask_teacher, num_decoded=None if all_media else FEW)


def check_config(
    config: RunConfig, source: str | None = None, *, ask_teacher: bool = False, num_decoded: int | None = 0
) -> CheckReport:
    """The same for a configuration that is loaded already; `source` names it in the report. `num_decoded`: of how many prompts
    the media are decoded, which takes at least as long as it takes to import transformers; None: of all."""
    model: ModelFolder | None = None
    model_findings: list[Finding] = []
    try:
        model = read_model_folder(config.model)
        model_findings = list(_model(config, model))
    except ModelError as failure:
        model_findings = [error("model.path", str(failure))]
    return gather(
        source or config.run.name,
        setting_findings(config),
        model_findings,
        other_model_findings(config, model, ask_teacher=ask_teacher),
        data_findings(config, config.data, "data", model, num_decoded=num_decoded),
        data_findings(config, config.eval.data, "eval.data", model, num_decoded=num_decoded) if config.eval else (),
        reward_findings(config),
        judge_findings(config),
        _run_folder(config),
        _port(config),
        _machine(config, model),
    )


def _other_kind(path: Path) -> str | None:
    """What to say of a file of another verb, whose every key would be a mistake here."""
    try:
        is_sft = "output" in read_config_file(path)
    except ConfigError:
        return None  # which is the finding already
    return "a file with an [output] section is one of relax sft, which checks it when it starts" if is_sft else None


def _model(config: RunConfig, model: ModelFolder) -> Iterator[Finding]:
    yield ok(
        "model.path", f"{model.path}: {model.model_type}, {model.num_params / 1e6:.2f} M parameters, context {model.context}"
    )
    context = config.model.max_context or model.context
    if model.context and context > model.context:
        yield warning("model.max_context", f"{context} tokens, and the model was made for {model.context}")
    new = config.rollout.max_new_tokens
    if context and new >= context:
        yield error("rollout.max_new_tokens", f"{new} leaves no room for a prompt in a context of {context} tokens: use less")
    prompt = config.data.max_prompt_tokens
    if context and prompt is not None and prompt + new > context:
        yield error(
            "data.max_prompt_tokens", f"{prompt} + rollout.max_new_tokens = {new} is more than the context of {context} tokens"
        )
    odd = set(model.layer_types) - {"full_attention"}
    if odd:
        yield error("model.path", f"{model.path} has layers of kind {sorted(odd)}: relax computes full causal attention only")
    if config.data.chat_template and not model.has_chat_template:
        yield error(
            "data.chat_template", "the tokenizer has no chat template: set data.chat_template = false, or use a chat model's"
        )


def _run_folder(config: RunConfig) -> Iterator[Finding]:
    folder = Path(config.run.dir) / config.run.name
    if folder.exists() and not folder.is_dir():
        yield error("run.name", f"{folder} is a file: choose another run.name")
    elif (folder / "config.json").is_file():
        how = f"relax train --resume {folder} continues it, --overwrite replaces it, another run.name leaves it alone"
        yield warning("run.name", f"{folder} holds a run already: {how}")
    else:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
        if os.access(existing, os.W_OK | os.X_OK):
            yield ok("run.dir", f"{folder} will be made")
        else:
            yield error("run.dir", f"{existing} cannot be written to")


def _port(config: RunConfig) -> Iterator[Finding]:
    port = config.services.http_port
    if port == 0 or (config.run.runtime == "inprocess" and not answering_roles(config)):
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as failure:
            yield error(
                "services.http_port", f"{port} cannot be used ({failure.strerror}): choose another, or 0 for a free one"
            )
            return
    yield ok("services.http_port", f"{port} is free")


def _machine(config: RunConfig, model: ModelFolder | None) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    of_actor = config.train.backend.num_threads
    of_engines = config.rollout.num_engines * config.rollout.engine.num_threads
    threads = max(of_actor, of_engines) if takes_turns(config) else of_actor + of_engines
    threads += sum(judge.num_engines * judge.engine.num_threads for judge in local_judges(config).values())
    level: Callable[[str, str], Finding] = warning if threads > cores else ok
    hint = ": they will slow one another down; lower num_threads or rollout.num_engines" if threads > cores else ""
    yield level("cores", f"{threads} computing threads on {cores} cores{hint}")
    if model is None:
        return
    need, free = sum(memory_bytes(config, model).values()), psutil.virtual_memory().available
    if need > free:
        yield warning("memory", f"up to {human_bytes(need)} needed, {human_bytes(free)} free: see relax explain for the parts")
    else:
        yield ok("memory", f"up to {human_bytes(need)} needed, {human_bytes(free)} free")
    disk = _free_disk(Path(config.run.dir))
    saved = model.num_params * 12 * (config.train.checkpoint.keep + 1) + model.num_params * 4
    if saved > disk:
        yield warning("run.dir", f"checkpoints need about {human_bytes(saved)}, {human_bytes(disk)} are free")


def _free_disk(path: Path) -> int:
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    stats = os.statvfs(existing)
    return stats.f_bavail * stats.f_frsize
