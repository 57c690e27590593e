"""The rollout role.

    admit -> the ticket's prompt, its media decoded -> engines generate the group -> reward workers score it -> put_group
      waits for: a place within the staleness bound (training, weight sync), engines, reward workers, room in the queue
      unblocks:  advantages, reference, actor_fwd, actor

A group that fails gives its place back and is counted; it never stops the run by itself, too many in a row do. A ticket that is
void when its group is done (the trainer went back meanwhile) is forgotten: its prompt was issued again.
"""

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax.bus.transfer_queue import Ticket, TransferQueue
from relax.config.run import RunConfig
from relax.data.media.source import Spool
from relax.data.prompts import PromptSource
from relax.data.render import Renderer
from relax.data.tokenizer import load_tokenizer
from relax.engines.pool import EnginePool
from relax.envs.single_turn import play_single_turn
from relax.errors import BusGone, DataError, EngineError, GroupTooLarge, RoleError, StaleHandle, WaitTimeout
from relax.models.preparer import Features, Preparer
from relax.observe.samples import sample_row
from relax.rewards.pool import RewardPool
from relax.roles.engine_room import EngineRoom
from relax.roles.evaluation import Evaluation, longest_prompt, open_checked
from relax.roles.role import Role
from relax.types import Column, Completion, GenerateRequest, Prompt, Ragged, Sample, Sampling, newest_version_only

_REPORT_S = 0.2  # totals are sent this often at most, and every so often while groups come
_HEARTBEAT_S = 1.0


class Rollout(Role):
    """Keeps as many groups in flight as the staleness bound and the engines' slots allow.

    `first_step`: what is trained already; there is an evaluation before the next one unless `is_restart`. `services`: where
    rewards find the roles that they ask.
    """

    def __init__(
        self,
        config: RunConfig,
        bus: TransferQueue,
        engines: EnginePool,
        first_step: int,
        *,
        is_restart: bool = False,
        services: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("rollout", config, bus)
        self.engines = engines
        self._first_step, self._is_restart = first_step, is_restart
        self._services = services or {}
        self.counts: Counter[str] = Counter()
        self._failed_in_a_row = 0
        self._filtered_in_a_row = 0
        self._first_error: str | None = None
        self._reported = 0.0
        self._recorded: Counter[int] = Counter()
        self._rewards: RewardPool | None = None
        self._eval_rewards: RewardPool | None = None
        self._source: PromptSource | None = None
        self._renderer: Renderer | None = None
        self._preparer: Preparer | None = None
        self._next_prompt = 0  # after all that were asked for
        self._engine_room = EngineRoom(self._groups_in_slots(), time.monotonic)
        self._evaluation: Evaluation | None = None

    async def start(self) -> None:
        config = self.config
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        self._renderer = Renderer(tokenizer, config.data)
        room = longest_prompt(config, config.data, config.rollout.max_new_tokens)
        spool = Spool()  # of training and evaluation, for rewards that show media to others
        self._source = await asyncio.to_thread(open_checked, config.data, config.run.seed, self._renderer, room, spool)
        self._preparer = Preparer(config.model, config.data, self._renderer, spool=self._source.spool, max_tokens=room)
        await self._preparer.start()
        self._rewards = RewardPool(config.reward, services=self._services, spool=spool)
        await self._rewards.start()
        if config.eval is not None:
            rewards = self._rewards
            if config.eval.reward is not None:
                rewards = self._eval_rewards = RewardPool(config.eval.reward, services=self._services, spool=spool)
                await rewards.start()
            self._evaluation = Evaluation(config, tokenizer, rewards, self.engines, self.bus, spool)
            await self._evaluation.start()

    async def stop(self) -> None:
        for rewards in (self._rewards, self._eval_rewards):
            if rewards is not None:
                await rewards.close()
        if self._evaluation is not None:
            await self._evaluation.close()
        if self._preparer is not None:
            await self._preparer.close()

    def max_groups_in_flight(self) -> int:
        """Enough groups to fill every engine's slots while others are being scored."""
        return max(2, int(1.5 * self._groups_in_slots()) + 1)

    def _groups_in_slots(self) -> float:
        rollout = self.config.rollout
        return rollout.num_engines * rollout.engine.max_slots / rollout.group_size

    async def run(self) -> None:
        heartbeat = asyncio.create_task(self._heartbeat())
        groups: set[asyncio.Task[None]] = set()
        evaluating = None
        try:
            if self._evaluation is not None:
                if not self._is_restart:
                    self.activity = "evaluating before training"
                    await self._evaluation.at(self._first_step)
                evaluating = asyncio.create_task(self._evaluation.follow(self._first_step))
            while True:
                free = self.max_groups_in_flight() - len(groups)
                if free == 0:
                    self.activity = f"{len(groups)} groups in flight"
                    groups = await self._settle(groups)
                    continue
                tickets = await self._admit(free, groups)
                if tickets is None:
                    groups = await self._settle(groups, block=False)
                elif not tickets:
                    break
                else:
                    groups |= {asyncio.create_task(self._group(ticket)) for ticket in tickets}
            await asyncio.gather(*groups)
            if evaluating is not None:
                self.activity = "evaluating after training"
                await evaluating
        finally:
            background = [heartbeat, *groups, *([evaluating] if evaluating else [])]
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        await self._report()

    async def _admit(self, count: int, groups: set[asyncio.Task[None]]) -> list[Ticket] | None:
        """Tickets; an empty list at the end of the run; None when a group's failure has to be looked at first."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.activity = "waiting for a place within the staleness bound"
        admit = asyncio.create_task(self.bus.admit(count, wait_s=60.0))
        try:
            while True:
                done, _ = await asyncio.wait({admit, *groups}, return_when=asyncio.FIRST_COMPLETED)
                if admit in done:
                    return admit.result()
                if any(task.exception() for task in done if not task.cancelled()):
                    return None
                groups -= done
        except WaitTimeout:
            return None
        finally:
            if not admit.done():
                admit.cancel()
            self.waited_s += loop.time() - started
            self.activity = "generating"

    @staticmethod
    async def _settle(groups: set[asyncio.Task[None]], *, block: bool = True) -> set[asyncio.Task[None]]:
        """Waits for a group to end; raises what it raised."""
        if not groups:
            return groups
        done, pending = await asyncio.wait(groups, timeout=None if block else 0, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return pending

    async def _group(self, ticket: Ticket) -> None:
        try:
            await self._generate(ticket)
        except StaleHandle:
            self.counts["groups/void"] += 1

    async def _generate(self, ticket: Ticket) -> None:
        assert self._source is not None
        assert self._renderer is not None
        assert self._preparer is not None
        assert self._rewards is not None
        rollout, issue = self.config.rollout, ticket.issue
        prompt = self._source.prompt(ticket.prompt)
        try:
            with self._engine_room.waiting():
                ready = await self._preparer.prepare(prompt, self._following(ticket.prompt))
            samples = await play_single_turn(
                prompt=prompt,
                group_id=issue,
                prompt_ids=ready.ids,
                features=ready.features,
                seeds=sample_seeds(self.config.run.seed, ticket.prompt, rollout.group_size),
                sampling=Sampling(rollout.max_new_tokens, rollout.temperature, stop=rollout.stop),
                generate=self._completions,
                score=self._rewards.score,
                to_text=self._renderer.text,
            )
        except (EngineError, DataError) as error:
            await self._failed(issue, f"prompt {prompt.key}: {error}")
            return
        for sample in samples:
            self.counts[f"outcome/{sample.outcome}"] += 1
            self.counts["tokens/generated"] += int(sample.loss_mask.sum())
        kept = [sample for sample in samples if sample.outcome.is_trainable]
        if not kept:
            errors = [str(sample.metadata.get("error")) for sample in samples if sample.metadata.get("error")]
            await self._failed(issue, f"prompt {prompt.key}: no sample could be scored: {errors[0] if errors else 'aborted'}")
            return
        if rollout.filter_zero_signal and len({sample.reward for sample in kept}) == 1:
            self._failed_in_a_row = 0
            await self._filtered(issue, kept[0].reward)
            return
        self._filtered_in_a_row = 0
        if rollout.mask_older_versions:
            for sample in kept:
                sample.loss_mask = newest_version_only(sample.loss_mask, sample.versions)
        await self._record(ticket, kept)
        try:
            await self._put(issue, kept, ready.features)
        except GroupTooLarge as error:
            await self._failed(issue, f"prompt {prompt.key}: {error}")
            return
        self._failed_in_a_row = 0
        self.counts["groups"] += 1
        self.progress += 1
        if asyncio.get_running_loop().time() - self._reported >= _REPORT_S:
            await self._report()

    async def _completions(self, request: GenerateRequest) -> list[Completion]:
        with self._engine_room.working():
            return await self.engines.generate(request)

    def _following(self, number: int) -> list[Prompt]:
        """The prompts that will be asked for next, as far as media are looked ahead for."""
        assert self._source is not None
        assert self._preparer is not None
        self._next_prompt = max(self._next_prompt, number + 1)
        found: list[Prompt] = []
        with contextlib.suppress(DataError):  # a bad row is an error once its turn comes
            found += (self._source.prompt(self._next_prompt + later) for later in range(self._preparer.look_ahead))
        return found

    async def _put(self, issue: int, samples: Sequence[Sample], features: Features) -> None:
        columns = to_columns(samples)
        while True:
            try:
                await self.bus.put_group(issue, columns, wait_s=60.0, shared=features)
                return
            except WaitTimeout:
                self.activity = "waiting for room in the transfer queue"

    async def _failed(self, issue: int, reason: str) -> None:
        self.counts["groups/failed"] += 1
        self._failed_in_a_row += 1
        self._first_error = self._first_error if self._failed_in_a_row > 1 and self._first_error else reason
        await self.bus.forfeit(issue, "failed", reason)
        await self.bus.emit({"kind": "warning", "role": self.name, "text": reason})
        if self._failed_in_a_row >= self.config.rollout.max_failed_in_a_row:
            raise RoleError(f"rollout: {self._failed_in_a_row} groups failed one after another; the first: {self._first_error}")

    async def _filtered(self, issue: int, reward: float | None) -> None:
        self.counts["groups/filtered"] += 1
        self.progress += 1
        self._filtered_in_a_row += 1
        await self.bus.forfeit(issue, "filtered", f"every reward is {reward}")
        limit = self.config.rollout.max_filtered_in_a_row
        if self._filtered_in_a_row >= limit:
            raise RoleError(
                f"rollout: {limit} groups one after another had equal rewards within the group (the last: {reward}), so "
                "nothing can be learned: the task is too hard or too easy for this model, or the reward does not see the answer"
            )

    async def _record(self, ticket: Ticket, samples: Sequence[Sample]) -> None:
        room = self.config.observe.samples_per_step - self._recorded[ticket.batch]
        if room <= 0:
            return
        assert self._source is not None
        prompt = self._source.prompt(ticket.prompt)
        rows = [sample_row(sample, prompt) for sample in samples[:room]]
        self._recorded[ticket.batch] += len(rows)
        await self.bus.emit({"kind": "samples", "step": ticket.batch, "rows": rows})

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            try:
                await self._report()
            except BusGone:
                return

    async def _report(self) -> None:
        self._reported = asyncio.get_running_loop().time()
        counts: dict[str, float] = dict(self.counts)
        if self._preparer is not None and (media := self._preparer.totals):
            counts |= {**media, "wait/media_s": self._engine_room.starved_s}
        await self.bus.emit({"kind": "rollout", "counts": counts, "waited_s": self.waited_s})

    def status(self) -> dict[str, Any]:
        return super().status() | {"counts": dict(self.counts)}


def sample_seeds(run_seed: int, prompt: int, group_size: int) -> list[int]:
    """A 63-bit seed for each sample of a group, fixed by the run's seed, the prompt's number and the index in the group."""
    digests = (hashlib.blake2b(f"{run_seed}/{prompt}/{index}".encode(), digest_size=8).digest() for index in range(group_size))
    return [int.from_bytes(digest, "little") >> 1 for digest in digests]


def to_columns(samples: Sequence[Sample]) -> dict[str, Column]:
    """The columns that the rollout writes: per-token ones ragged; `versions` and `newest_versions`: of each row's trained
    tokens; `num_sampled`: tokens that the policy wrote, trained or not; `segments`: for each row the runs of equal versions as
    `[start, version]`."""
    return {
        "tokens": Ragged.pack([np.asarray(s.tokens, np.int32) for s in samples]),
        "loss_mask": Ragged.pack([np.asarray(s.loss_mask, np.uint8) for s in samples]),
        "rollout_logprobs": Ragged.pack([np.asarray(s.rollout_logprobs, np.float32) for s in samples]),
        "versions": np.asarray([s.oldest_version for s in samples], np.int64),
        "newest_versions": np.asarray([s.newest_version for s in samples], np.int64),
        "num_sampled": np.asarray([_num_sampled(s) for s in samples], np.int64),
        "segments": [[[segment.start, segment.version] for segment in s.versions] for s in samples],
        "reward": np.asarray([s.reward for s in samples], np.float64),
        "outcome": [str(s.outcome) for s in samples],
    }


def _num_sampled(sample: Sample) -> int:
    return sum(turn.end - turn.start for turn in sample.turns if turn.role == "assistant") or int(sample.loss_mask.sum())
