"""The embedded engine against the hand-written loop of `limit.py`: the same model and prompts, in turn, in one process.

    python benchmarks/engine.py --threads 1 2

`equal`: every completion has `--new` tokens; both do the same work. `natural`: completions end with the model's end token; the
loop goes on until the last one has, the engine's rows leave. A ratio above 1 means that the engine is the faster one.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
from limit import Mini, alternate, generate, median
from work import Task, encode_prompts, load_warm, warm_folder

from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.local import LocalEngine
from relax.types import Completion, GenerateRequest, Sampling, WeightManifest
from relax.weights.layout import lay_out, views
from relax.weights.manifest import make_manifest


def publish(model: Any, path: Path) -> WeightManifest:
    """The model's weights as version 0 in a file, with a canary."""
    named = dict(model.named_parameters())
    table, size = lay_out(named)
    content = bytearray(size)
    canary = torch.arange(3, 24)
    with torch.no_grad():
        for name, view in views(torch.frombuffer(content, dtype=torch.uint8), table).items():
            view.copy_(named[name])
        logprobs = torch.log_softmax(model(canary[None]).logits[0, :-1].float(), -1).gather(-1, canary[1:, None])[:, 0]
    path.write_bytes(content)
    return make_manifest(0, memoryview(content), table, (canary.tolist(), logprobs.tolist()), location=str(path))


def without_end(folder: Path, target: Path) -> Path:
    """A copy of the model's folder in which no token ends a completion."""
    shutil.copytree(folder, target)
    for name in ("config.json", "generation_config.json"):
        path = target / name
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"eos_token_id": None}))
    return target


class Bench:
    """Engines live in an event loop of their own thread; the loop of the limit runs in the calling thread."""

    def __init__(self, options: argparse.Namespace, threads: int) -> None:
        self._options, self._threads = options, threads
        torch.set_num_threads(threads)
        self._model, tokenizer = load_warm(options.size)
        self.end_id: int = tokenizer.eos_token_id
        pairs = Task(7).samples(options.batch // options.group)
        self._prompts = encode_prompts(tokenizer, pairs)
        self._mini = Mini(self._model)
        self._cache = self._mini.make_cache(options.batch)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._round = 0

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @torch.no_grad()
    def limit(self, stop: int | None) -> Callable[[], object]:
        prompts = self._prompts.repeat_interleave(self._options.group, 0)

        @torch.no_grad()
        def run() -> object:
            return generate(self._mini, prompts, self._options.new, self._cache, self._options.group, stop)

        return run

    def engine(self, folder: Path) -> tuple[LocalEngine, Callable[[], list[list[Completion]]]]:
        config = LocalEngineConfig(device="cpu", num_threads=self._threads, max_slots=self._options.batch)
        engine = LocalEngine(ModelConfig(path=str(folder)), config)
        with tempfile.TemporaryDirectory() as scratch:
            self.call(engine.load_weights(publish(self._model, Path(scratch) / "weights")))

        async def all_groups() -> list[list[Completion]]:
            self._round += 1
            first = self._round * self._options.batch
            requests = [
                GenerateRequest(
                    str(i),
                    prompt,
                    range(first + i * self._options.group, first + (i + 1) * self._options.group),
                    Sampling(self._options.new),
                )
                for i, prompt in enumerate(self._prompts.tolist())
            ]
            return await asyncio.gather(*(engine.generate(request) for request in requests))

        return engine, lambda: self.call(all_groups())

    def compare(self, folder: Path, stop: int | None) -> dict[str, float]:
        engine, run = self.engine(folder)
        lengths = [len(completion.token_ids) for group in run() for completion in group]
        if stop is None:
            assert set(lengths) == {self._options.new}, "work is not equal"
        times = alternate(self._options.repeats, limit=self.limit(stop), engine=run)
        self.call(engine.close())
        limit, own = (median(times[name]) for name in ("limit", "engine"))
        best = min(times["limit"]) / min(times["engine"])
        return {
            "ratio": limit / own,
            "ratio_of_best": best,
            "mean_length": sum(lengths) / len(lengths),
            "limit_s": limit,
            "engine_s": own,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = warm_folder(options.size)
        endless = without_end(folder, Path(scratch) / "model")
        for threads in options.threads:
            bench = Bench(options, threads)
            for name, place, stop in (("equal", endless, None), ("natural", folder, bench.end_id)):
                found[f"{name}, {threads} thread(s)"] = {k: round(v, 4) for k, v in bench.compare(place, stop).items()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
