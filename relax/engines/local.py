"""The embedded engine: continuous batching in a thread of its own, with an asyncio face.

    generate, load_weights, ... --calls--> engine thread: calls, then one step of the batch, and again --futures--> callers

Between two steps the thread makes all calls that have arrived, so a new version of the weights, a new request and an abort
take effect after at most one decoding step. Reading and checking a version happens beside it, in another thread.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from relax.config.model import ModelConfig
from relax.config.rollout import LocalEngineConfig
from relax.engines.engine import EngineAsleep, EngineStats, RequestError
from relax.engines.groups import Group
from relax.engines.media import PromptMedia
from relax.engines.policy import Policy
from relax.engines.request_check import check_request
from relax.engines.scheduler import Scheduler
from relax.engines.stopping import StopStrings
from relax.errors import EngineError, ModelError
from relax.models.device import pick_device
from relax.types import Completion, GenerateRequest, WeightManifest

log = logging.getLogger("relax.engines")


@dataclass(frozen=True, slots=True)
class _Call:
    """What the engine thread is to do between two steps. `future` is failed when it no longer can."""

    run: Callable[[], None]
    future: "Future[Any]"


class LocalEngine:
    """An `Engine` in this process: any transformers causal language model, on a CPU or one CUDA device.

    The model folder gives architecture and tokenizer; the weights come by `load_weights` alone. With `deterministic` a seed
    gives the same tokens and log-probs, bit by bit, whatever else is in the batch; without, to rounding. Raises `ModelError`
    for a folder or device that cannot be used. `close` ends the thread.
    """

    def __init__(
        self, model: ModelConfig, engine: LocalEngineConfig, *, deterministic: bool = False, name: str = "engine-0"
    ) -> None:
        self.name = name
        self._num_threads = engine.num_threads
        self._stop_strings = StopStrings(model)
        self._policy = Policy(model, pick_device(engine.device), use_fused=engine.use_fused_forward)
        self._scheduler = Scheduler(self._policy, engine, self._stop_strings, deterministic=deterministic)
        self._inbox: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = threading.Lock()  # of the inbox against the thread's end
        self._end: EngineError | None = None
        self._live: set[str] = set()
        self._stager = ThreadPoolExecutor(1, f"{name}-weights", torch.set_num_threads, (engine.num_threads,))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """One completion for each seed, in their order.

        Raises `RequestError` for a request that cannot be served (the message says which value and what would be right), and
        `EngineError` before any weights are loaded and when the engine is closed or fails meanwhile. Cancelling the call aborts
        the request.
        """
        self._check(request)
        if not request.seeds:
            return []
        if request.sampling.stop:
            try:
                await asyncio.to_thread(self._stop_strings.prepare)
            except ModelError as error:
                raise RequestError(f"request {request.request_id!r}: {error}") from error
        group = Group(request, Future(), media=self._read_media(request))
        self._live.add(request.request_id)
        try:
            self._post(_Call(lambda: self._submit(group), group.future))
            return await asyncio.wrap_future(group.future)
        except asyncio.CancelledError:
            self._post_abort([request.request_id])
            raise
        finally:
            self._live.discard(request.request_id)

    def _check(self, request: GenerateRequest) -> None:
        if self._end is not None:
            raise self._end
        if self._policy.version < 0:
            raise self._without_weights()
        if request.request_id in self._live:
            raise RequestError(f"request {request.request_id!r} is being served already: give each request an id of its own")
        check_request(request, self._policy.max_context, self._policy.vocab_size, self._policy.media_ids)

    def _read_media(self, request: GenerateRequest) -> PromptMedia | None:
        if self._policy.omni is None:
            return None
        if not request.features:
            if self._policy.omni.hears_throughout:  # else it would be an error of the pass, and of all who are in it
                raise RequestError(f"request {request.request_id!r} has no sound, and the model writes down what it hears")
            return None
        try:
            return PromptMedia(*self._policy.omni.positions(request.prompt_ids, request.features))
        except ModelError as error:
            raise RequestError(f"request {request.request_id!r}: {error}") from error

    def _without_weights(self) -> EngineError:
        if self._policy.is_asleep:
            return EngineAsleep(f"{self.name} sleeps while the trainer has its devices: it goes on with the next version")
        return EngineError(f"{self.name}: no weights loaded: the engine generates once it has taken a published version")

    def _submit(self, group: Group) -> None:
        if self._policy.version < 0:  # it fell asleep between the check and now
            group.fail(self._without_weights())
        else:
            self._scheduler.submit(group)

    async def progress(self, request_ids: Sequence[str]) -> dict[str, list[Completion]]:
        """What there is now of each of these requests that are in hand; `FinishReason.ABORT` on completions under way."""
        ids = tuple(request_ids)
        found: dict[str, list[Completion]] = await asyncio.wrap_future(self._call(lambda: self._scheduler.progress(ids)))
        return found

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests now: their `generate` returns what there is, with `FinishReason.ABORT`. Others are let alone."""
        done = self._post_abort(request_ids)
        if done is not None:
            await asyncio.wrap_future(done)

    def _post_abort(self, request_ids: Sequence[str]) -> "Future[None] | None":
        """None where the engine has ended, and so have its requests."""
        ids = tuple(request_ids)
        try:
            return self._call(lambda: self._scheduler.abort(ids))
        except EngineError:
            log.debug("%s has ended, and with it the requests to abort: %s", self.name, ids)
            return None

    async def load_weights(self, manifest: WeightManifest) -> float:
        """Takes a version in between two steps; returns the canary's difference.

        Raises `WeightSyncError`, and goes on with the weights it has, when content, names, shapes, types or canary disagree.
        Versions are taken in the order of the calls. Of weights that it holds already only the version is taken: nothing is
        read, and what was computed with them stays.
        """
        if self._end is not None:
            raise self._end
        return await asyncio.wrap_future(self._stager.submit(self._stage_and_take, manifest))

    def _stage_and_take(self, manifest: WeightManifest) -> float:
        if self._policy.holds(manifest):  # what it holds changes in this thread's calls alone
            return float(self._call(lambda: self._renumber(manifest)).result())
        with torch.no_grad():
            staged = self._policy.stage(manifest)

        def take() -> float:
            difference = self._policy.take(staged)
            self._scheduler.weights_changed()
            return difference

        return float(self._call(take).result())

    def _renumber(self, manifest: WeightManifest) -> float:
        difference = self._policy.renumber(manifest)
        self._scheduler.version_changed()
        return difference

    async def sleep(self) -> None:
        """Gives weights and caches up. Raises `EngineError` while requests are in hand; a second call does nothing.

        From then on `generate` raises `EngineAsleep`, until `load_weights`.
        """
        if self._end is not None:
            raise self._end
        await asyncio.wrap_future(self._stager.submit(lambda: self._call(self._fall_asleep).result()))  # after earlier loads

    def _fall_asleep(self) -> None:
        if not self._scheduler.is_idle:
            num = self._scheduler.num_running + self._scheduler.num_waiting
            raise EngineError(f"{self.name} cannot sleep: {num} completions are in hand")
        self._scheduler.forget()
        self._policy.sleep()

    async def stats(self) -> EngineStats:
        """Counters since the start; `version` is -1 before the first weights and while the engine sleeps."""
        if self._end is not None:
            raise self._end
        scheduler = self._scheduler
        return EngineStats(
            version=self._policy.version,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            generated_tokens=scheduler.generated_tokens,
            prefilled_tokens=scheduler.prefilled_tokens,
            busy_s=scheduler.busy_s,
        )

    async def close(self) -> None:
        """Ends the thread after its current step. Requests still in hand end with `EngineError`. A second call does nothing."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._stager.shutdown)

    def _call(self, function: Callable[[], Any]) -> "Future[Any]":
        """Has the engine thread call `function` between two steps. Raises `EngineError` when the thread has ended."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(error)

        self._post(_Call(run, future))
        return future

    def _post(self, call: _Call) -> None:
        with self._lock:
            if self._end is not None:
                raise self._end
            call.future.set_running_or_notify_cancel()  # from here on only the engine thread ends it
            self._inbox.put(call)

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # holds for this thread
        try:
            with torch.no_grad():
                while self._make_calls():
                    if not self._scheduler.is_idle:
                        self._scheduler.step()
            self._finish(EngineError(f"{self.name} was closed"))
        except Exception as error:
            log.exception("%s stops", self.name)
            failure = EngineError(f"{self.name} stopped: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._finish(failure)

    def _make_calls(self) -> bool:
        """Makes the calls that have arrived, waiting for one when there is nothing to decode. False: the engine is to end."""
        while self._scheduler.is_idle or not self._inbox.empty():
            call = self._inbox.get()
            if call is None:
                return False
            call.run()
            del call  # it may hold a version of the weights, and the next one may be long in coming
        return True

    def _finish(self, reason: EngineError) -> None:
        with self._lock:
            self._end = reason
        self._scheduler.fail(reason)
        while not self._inbox.empty():
            call = self._inbox.get()
            if call is not None:
                call.future.set_exception(reason)
