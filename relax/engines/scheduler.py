"""Continuous batching: rows that end leave the batch at once, and waiting prompts take their place.

requests --> branches --prefill: each prompt once--> next token of each seed --> rows --decode steps--> completions
             a prompt, or one and a partial                                      ^----- compacted -----'
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from relax.config.rollout import LocalEngineConfig
from relax.engines.attention import attend_within
from relax.engines.engine import RequestError
from relax.engines.groups import Branch, Group, Prefix, branches
from relax.engines.kv_cache import KVCache, bucket
from relax.engines.media import with_media
from relax.engines.policy import Policy
from relax.engines.rows import Rows
from relax.engines.sampling import sample
from relax.engines.stopping import StopStrings, reason_to_end
from relax.errors import EngineError, ModelError
from relax.models.causal_lm import Attend
from relax.models.decoder import Decoder
from relax.types import Completion, FinishReason

_CHUNK = 32  # rows of one decoding pass in deterministic mode


class Scheduler:
    """The batch and those who wait for a place in it. Not thread-safe: the engine's thread owns it.

    In deterministic mode all shapes that a row is computed in depend on the row alone, and so do its bits: prompts pass one by
    one, rows in padded passes of fixed size. A mixture of experts groups tokens by expert, so there a row passes alone. Tokens
    of a completion that is continued pass again as they did at first, one a step; otherwise with their prompt, in one pass.
    """

    def __init__(self, policy: Policy, config: LocalEngineConfig, stop_strings: StopStrings, *, deterministic: bool) -> None:
        self._policy, self._max_slots, self._max_prefill = policy, config.max_slots, config.max_prefill_tokens
        self._deterministic, self._stop_strings = deterministic, stop_strings
        self._rows = Rows(config.max_slots, policy.device, stop_strings, replays=deterministic)
        self._waiting: deque[Branch] = deque()
        self._cache: KVCache | None = None
        self._num_loads = 0
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.busy_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._rows.num and not self._waiting

    @property
    def num_running(self) -> int:
        """Completions in the batch."""
        return self._rows.num

    @property
    def num_waiting(self) -> int:
        """Completions that have not entered the batch."""
        return sum(len(branch.waiting) for branch in tuple(self._waiting))

    def submit(self, group: Group) -> None:
        """Takes a request in hand. What is complete of it already ends at once."""
        request = group.request
        for index, partial in enumerate(request.partials):
            reason = reason_to_end(partial, request.sampling, self._limit(group), self._policy.eos_ids, self._stop_strings)
            if reason is not None:
                group.finish(index, replace(partial, finish=reason))
        self._waiting.extend(branches(group, replays=self._deterministic))

    def _limit(self, group: Group) -> int:
        """The most tokens of its completions."""
        return min(group.request.sampling.max_new_tokens, self._policy.max_context - len(group.request.prompt_ids))

    def progress(self, request_ids: Sequence[str]) -> dict[str, list[Completion]]:
        """What there is of these requests, where they are in hand; `FinishReason.ABORT` on completions under way."""
        wanted, found = set(request_ids), dict[Group, dict[int, Completion]]()
        for row, group in enumerate(self._rows.groups):
            if group.request.request_id in wanted:
                _, index, completion = self._rows.completion(row, FinishReason.ABORT)
                found.setdefault(group, {})[index] = completion
        for branch in self._waiting:
            if branch.group.request.request_id in wanted:
                found.setdefault(branch.group, {}).update((i, branch.group.known(i)) for i in branch.waiting)
        return {
            group.request.request_id: [(group.completions | there)[i] for i in range(len(group.request.seeds))]
            for group, there in found.items()
        }

    def forget(self) -> None:
        """Gives the cache's memory back. Only while idle."""
        assert self.is_idle, "rows and computed prompts need the cache"
        self._cache = None

    def weights_changed(self) -> None:
        """To be called after the policy took weights: rows get a new segment, computed prompts are forgotten."""
        self._num_loads += 1
        self.version_changed()

    def version_changed(self) -> None:
        """To be called after the policy took a number for the weights that it has."""
        self._rows.change_version(self._policy.version)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests with what there is. Unknown ids are of requests that have ended by themselves."""
        wanted = set(request_ids)
        for branch in [branch for branch in self._waiting if branch.group.request.request_id in wanted]:
            self._waiting.remove(branch)
            for index in branch.waiting:
                branch.group.finish(index, branch.group.known(index))
        rows = [row for row, group in enumerate(self._rows.groups) if group.request.request_id in wanted]
        self._leave(dict.fromkeys(rows, FinishReason.ABORT))

    def fail(self, error: EngineError) -> None:
        """Ends every request with `error`."""
        for group in (*(branch.group for branch in self._waiting), *self._rows.groups):
            group.fail(error)
        self._waiting.clear()
        self._rows.remove(set(range(self._rows.num)))

    def step(self) -> None:
        """Fills free slots with waiting prompts, then samples one token for each row."""
        start = time.perf_counter()
        self._admit()
        if self._rows.num:
            self._decode()
        self.busy_s += time.perf_counter() - start

    def _admit(self) -> None:
        entering: list[tuple[Branch, int]] = []
        free, tokens = self._max_slots - self._rows.num, 0
        while self._waiting and free:
            branch = self._waiting[0]
            if branch.prefix is None or branch.prefix.load != self._num_loads:
                if not self._see(branch.group):
                    continue
                if tokens and tokens + branch.length > self._max_prefill:
                    break  # the rest of the prompts after the next step
                branch.prefix = None
                tokens += branch.length
            num_waiting = len(branch.waiting)
            count = min(free, num_waiting)
            entering.append((branch, count))
            free -= count
            if count < num_waiting:
                break
            self._waiting.popleft()
        if not entering:
            return
        self._prefill([branch for branch, _ in entering if branch.prefix is None])
        self._place(entering)

    def _see(self, group: Group) -> bool:
        """Has the encoders look at a prompt's media, unless they have under these weights; False: the request is at fault."""
        if group.media is None:
            return True
        assert self._policy.omni is not None
        try:
            group.media.see(self._policy.omni, group.request, self._num_loads)
        except ModelError as error:
            group.fail(RequestError(f"request {group.request.request_id!r}: {error}"))
            self._waiting = deque(branch for branch in self._waiting if branch.group is not group)
            return False
        return True

    def _prefill(self, found: list[Branch]) -> None:
        """Computes what branches go on from, those of one length side by side."""
        found = sorted(found, key=lambda branch: branch.length)
        for batch in [[branch] for branch in found] if self._deterministic else [found] if found else []:
            lengths = [branch.length for branch in batch]
            ids = self._send(np.concatenate([branch.tokens for branch in batch]))
            positions = self._send(np.concatenate([np.arange(length) for length in lengths]))
            self._policy.reserve(max(lengths))
            forward = self._policy.forward
            keep = torch.empty(
                forward.num_layers,
                2,
                len(ids),
                forward.num_kv_heads,
                forward.head_dim,
                dtype=self._policy.dtype,
                device=ids.device,
            )
            attend = attend_within(lengths, keep)
            if self._policy.omni is None:
                hidden = forward.hidden(ids, positions, attend)
            else:
                seen, encoded = with_media(self._policy.omni, [(branch.group.media, branch.length) for branch in batch])
                hidden = self._policy.omni.hidden(ids, seen.to(ids.device), attend, encoded)
            ends = np.cumsum(lengths)
            logits = self._policy.logits(hidden[self._send(ends - 1)])
            for branch, end, row in zip(batch, ends.tolist(), logits, strict=True):
                branch.prefix = Prefix(keep[:, :, end - branch.length : end], row, self._num_loads)
            self.prefilled_tokens += len(ids)

    def _place(self, entering: list[tuple[Branch, int]]) -> None:
        """Gives the branches' next seeds a row each, and samples their next tokens."""
        first = self._rows.num
        for branch, count in entering:
            self._rows.add(branch, count, self._limit(branch.group), self._policy.eos_ids, self._policy.version)
        cache = self._reserve(first, max(branch.length for branch, _ in entering))
        row, logits = first, []
        for branch, count in entering:
            assert branch.prefix is not None
            cache.fill(row, count, branch.prefix.kv)
            logits.append(branch.prefix.logits.expand(count, -1))
            row += count
            if not branch.waiting:
                branch.prefix = None
                if branch.group.media is not None and not any(other.group is branch.group for other in self._waiting):
                    branch.group.media.forget()
        self._sample(first, torch.cat(logits))

    def _reserve(self, num_used: int, num_tokens: int) -> KVCache:
        forward = self._policy.forward
        if self._cache is None:
            sizes = (forward.num_layers, forward.num_kv_heads, forward.head_dim)
            self._cache = KVCache(*sizes, self._policy.dtype, self._policy.device)
        if not num_used:
            self._cache.release()  # slots as long as a past request needed would slow down shorter ones
        longest = self._rows.longest
        if self._deterministic:
            num_tokens, longest = bucket(num_tokens), bucket(longest)
        self._cache.reserve(self._rows.num, num_used, num_tokens, max(longest, num_tokens))
        self._policy.reserve(num_tokens)
        return self._cache

    def _decode(self) -> None:
        num = self._rows.num
        positions = self._rows.positions
        longest, shortest = int(positions.max()), int(positions.min())
        cache = self._reserve(num, longest + 1)
        ids, at = self._send(self._rows.last_token[:num]), self._send(positions)
        seen_at = at if self._policy.omni is None else self._send(self._rows.seen_positions)
        if self._deterministic:
            logits = self._logits_alike(cache, ids, at, seen_at, [bucket(position + 1) for position in positions.tolist()])
        else:
            attend = cache.attend_step(at, longest, shortest)
            logits = self._policy.logits(self._hidden(slice(0, num), ids, seen_at, attend))
        self._sample(0, logits)

    def _hidden(self, rows: slice, ids: Tensor, seen_at: Tensor, attend: Attend) -> Tensor:
        """Of the last token of each of `rows`, which hear what their prompts' tokens heard."""
        heard = self._rows.heard[rows]
        if self._policy.omni is None or not any(sound is not None for sound in heard):
            return self._policy.forward.hidden(ids, seen_at, attend)
        return self._policy.omni.hidden(ids, seen_at, attend, self._policy.omni.join([(sound, 1) for sound in heard]))

    def _logits_alike(self, cache: KVCache, ids: Tensor, positions: Tensor, seen_at: Tensor, buckets: list[int]) -> Tensor:
        """A decoding pass in which no row's bits depend on the others."""
        chunk = _CHUNK if isinstance(self._policy.forward, Decoder) else 1
        parts = []
        for start in range(0, len(ids), chunk):
            rows = slice(start, min(start + chunk, len(ids)))
            count = rows.stop - start
            padding = (0, chunk - count)
            attend = cache.attend_step_alike(start, positions[rows], buckets[rows], chunk)
            padded_ids, padded_positions = F.pad(ids[rows], padding), F.pad(seen_at[rows], padding)
            parts.append(self._policy.logits(self._hidden(rows, padded_ids, padded_positions, attend))[:count])
        return torch.cat(parts)

    def _sample(self, start: int, logits: Tensor) -> None:
        """Samples the rows from `start` on; those that end leave."""
        how, uniform = self._rows.sampling(start, start + len(logits))
        tokens, logprobs = (x.cpu().numpy() for x in sample(logits, how, uniform))
        self.generated_tokens += self._rows.num_new(start, start + len(tokens))
        ended = self._rows.record(start, tokens, logprobs)
        if not np.isfinite(logprobs).all():
            self._fail_rows([start + int(row) for row in (~np.isfinite(logprobs)).nonzero()[0]], ended)
        self._leave(ended)

    def _fail_rows(self, broken: list[int], ended: dict[int, FinishReason]) -> None:
        """Ends the requests of rows whose logits are not finite; all their rows leave."""
        version = self._policy.version
        groups = {self._rows.groups[row] for row in broken}
        for group in groups:
            request = group.request.request_id
            group.fail(EngineError(f"request {request!r}: the model's logits are not finite under version {version}"))
        self._waiting = deque(branch for branch in self._waiting if branch.group not in groups)
        for row, group in enumerate(self._rows.groups):
            if group in groups:
                ended[row] = FinishReason.ABORT
                assert self._cache is not None
                self._cache.clear(row)

    def _leave(self, ended: dict[int, FinishReason]) -> None:
        if not ended:
            return
        finished = [self._rows.completion(row, reason) for row, reason in ended.items()]
        longest = int(self._rows.positions.max()) + 1
        sources, targets = self._rows.remove(set(ended))
        if sources and self._cache is not None:
            self._cache.move(self._send(np.array(sources)), self._send(np.array(targets)), min(longest, self._cache.num_tokens))
        for group, index, completion in finished:  # last, so that who is told finds the slots free
            group.finish(index, completion)

    def _send(self, column: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(column).to(self._policy.device)
