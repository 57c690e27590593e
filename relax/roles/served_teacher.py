"""A teacher behind a server: each sample's tokens go there once, and how likely they are found comes back.

rows of rollout --one request a row, `max_requests` at once--> `teacher_logprobs`, or its likeliest tokens at each place

A row without an answer is no reason to stop: NaN stands where the teacher's numbers would, and `taught` takes the row's tokens
out of the loss (`relax/roles/rows.py`). Only a teacher that is gone for long ends the run, with the first error.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import numpy as np
from numpy.typing import NDArray

from relax.config.algorithm import OPDFullConfig
from relax.config.run import RunConfig
from relax.errors import ConfigError, TeacherError
from relax.models.folder import ModelFolder, read_model_folder
from relax.rewards.http import NO_ANSWER, in_words, open_session, post
from relax.roles.columns import ColumnMaker
from relax.roles.logprobs import to_rows
from relax.roles.teacher_protocols import PROTOCOLS, Told, read_answer
from relax.roles.topology import teacher_columns
from relax.train.backend import NO_FEATURES, GroupFeatures, TrainBatch
from relax.types import Column, Ragged

_Answer = TypeVar("_Answer")

log = logging.getLogger("relax.roles")


class ServedTeacher(ColumnMaker):
    """Asks `teacher.server`; the same in a role of its own and inside the actor."""

    needs = ("tokens", "loss_mask")
    max_groups = 32

    def __init__(self, config: RunConfig) -> None:
        assert config.teacher is not None
        assert config.teacher.server is not None
        self._server, self._model = config.teacher.server, config.model
        self._protocol = PROTOCOLS[self._server.protocol]
        self._url = self._server.url.rstrip("/").removesuffix("/v1") + self._protocol.path
        self._top_k = config.algorithm.top_k if isinstance(config.algorithm, OPDFullConfig) else 0
        self.columns = teacher_columns(config.algorithm)
        self._num_ids = 0  # the policy's
        self._failed_in_a_row = 0
        self._why = ""
        self._answered_s: list[float] = []
        self._asking: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def load(self) -> None:
        """Asks about a few tokens, the policy's last one among them.

        Raises `ConfigError` when the server is not there, has other tokens, or answers in another form.
        """
        key = self._server.api_key_env
        if key is not None and not os.environ.get(key):
            raise ConfigError(f"teacher.server.api_key_env = {key!r}: this environment variable is not set")
        folder = read_model_folder(self._model)
        self._num_ids, last = folder.vocab_size, _last_token(folder)
        tokens = [last // 2, last, 0, last // 3]
        try:
            self._run(self._ask_once(tokens))
        except NO_ANSWER as error:
            raise ConfigError(
                f"teacher.server.url = {self._server.url!r} (teacher.server.protocol = {self._server.protocol!r}), asked about "
                f"tokens {tokens} of the policy: {self._in_words(error)}"
            ) from error

    def make(
        self, columns: Mapping[str, Column], group_ids: NDArray[np.int64], features: GroupFeatures = NO_FEATURES
    ) -> dict[str, Column]:
        """Raises `TeacherError` when `max_failed_in_a_row` rows got no answer."""
        batch = to_rows(columns, group_ids, features)
        told = self._run(self._ask_all([batch.tokens[row].tolist() for row in range(len(batch))]))
        if num_failed := told.count(None):
            log.warning("teacher: no answer about %d of %d samples: %s", num_failed, len(told), self._why)
        return self._as_columns(batch, told)

    def finish_step(self) -> dict[str, float]:
        answered, self._answered_s = self._answered_s, []
        return {"teacher/latency_s": sum(answered) / len(answered)} if answered else {}

    def stop(self) -> None:
        if self._asking is not None:
            loop, task = self._asking
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                loop.call_soon_threadsafe(task.cancel)

    # -- asking -------------------------------------------------------------------------------------------------------
    def _run(self, asking: Coroutine[Any, Any, _Answer]) -> _Answer:
        """To its end, in a loop of its own, since columns are made in threads; `stop` ends it before."""

        async def told() -> _Answer:
            task = asyncio.current_task()
            assert task is not None
            self._asking = (asyncio.get_running_loop(), task)
            return await asking

        try:
            return asyncio.run(told())
        finally:
            self._asking = None

    def _session(self) -> aiohttp.ClientSession:
        server = self._server
        return open_session(server.headers, server.api_key_env, server.request_time_limit_s)

    async def _ask_once(self, tokens: list[int]) -> Told:
        async with self._session() as session:
            return await self._ask(session, tokens)

    async def _ask_all(self, rows: Sequence[list[int]]) -> list[Told | None]:
        slots = asyncio.Semaphore(self._server.max_requests)
        async with self._session() as session:

            async def one(tokens: list[int]) -> Told | None:
                async with slots:
                    return await self._try(session, tokens)

            try:
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(one(tokens)) for tokens in rows]
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
        return [task.result() for task in asked]

    async def _try(self, session: aiohttp.ClientSession, tokens: list[int]) -> Told | None:
        """None when there is no answer, which is counted."""
        server, loop = self._server, asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(server.time_limit_s):
                told = await self._ask(session, tokens)
        except NO_ANSWER as error:
            self._failed_in_a_row += 1
            self._why = self._in_words(error)
            if self._failed_in_a_row < server.max_failed_in_a_row:
                return None
            raise TeacherError(
                f"teacher.server.url = {server.url!r}: no answer about {self._failed_in_a_row} samples in a row "
                f"(teacher.server.max_failed_in_a_row); the last one: {self._why}"
            ) from error
        self._failed_in_a_row = 0
        self._answered_s.append(loop.time() - started)
        return told

    async def _ask(self, session: aiohttp.ClientSession, tokens: list[int]) -> Told:
        server = self._server
        content = self._protocol.ask(tokens, self._top_k) | ({} if server.model is None else {"model": server.model})
        body = await post(session, self._url, content, retries=server.retries, backoff_s=server.backoff_s)
        return read_answer(self._protocol, body, tokens, self._top_k)

    def _in_words(self, error: Exception) -> str:
        return in_words(error, "teacher.server.request_time_limit_s and time_limit_s")

    # -- columns ------------------------------------------------------------------------------------------------------
    def _as_columns(self, batch: TrainBatch, told: Sequence[Told | None]) -> dict[str, Column]:
        """What was told about trained tokens, 0 at the others; NaN all over a row without an answer."""
        offsets, trained = batch.tokens.offsets, batch.loss_mask.values != 0
        shape = (len(trained), self._top_k) if self._top_k else (len(trained),)
        ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, answer in enumerate(told):
            places = slice(int(offsets[row]), int(offsets[row + 1]))
            if answer is None:
                logprobs[places] = np.nan
            elif not self._top_k:
                logprobs[places] = np.where(trained[places], answer.logprobs, 0.0)
            else:
                for place in np.flatnonzero(trained[places]).tolist():
                    here = places.start + place
                    ids[here], logprobs[here] = self._likeliest(answer.top[place])
        if self._top_k:
            return {"teacher_top_ids": Ragged(ids, offsets), "teacher_top_logprobs": Ragged(logprobs, offsets)}
        return {"teacher_logprobs": Ragged(logprobs, offsets)}

    def _likeliest(self, pairs: Sequence[tuple[float, int]]) -> tuple[list[int], list[float]]:
        """The ids that the policy has. The places of others stay empty, id 0 and -inf: they belong to all other tokens."""
        known = [(number, logprob) for logprob, number in pairs if number < self._num_ids]
        known += [(0, -np.inf)] * (self._top_k - len(known))
        return [number for number, _ in known], [logprob for _, logprob in known]


def _last_token(folder: ModelFolder) -> int:
    """The largest id that the policy's tokenizer has: those beyond are padding of its weights, which a teacher may lack."""
    try:
        described = json.loads((Path(folder.tokenizer_path) / "tokenizer.json").read_text("utf-8"))
        vocabulary = described["model"]["vocab"]
        last = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        return int(max([last, *(int(token["id"]) for token in described.get("added_tokens", []))]))
    except (OSError, ValueError, KeyError, TypeError):
        return folder.vocab_size - 1  # a tokenizer of another form, which is for whoever loads it to read
