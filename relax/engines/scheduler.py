"""Continuous batching: rows that end leave the batch at once, and waiting prompts take their place.

waiting groups --prefill: each prompt once--> first token of each seed --> rows --decode steps--> completions
                                                                            ^----- compacted -----'
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from relax.config.rollout import LocalEngineConfig
from relax.engines.attention import attend_within
from relax.engines.groups import Group, Prefix
from relax.engines.kv_cache import KVCache, bucket
from relax.engines.policy import Policy
from relax.engines.rows import Rows
from relax.engines.sampling import sample
from relax.engines.stopping import StopStrings
from relax.errors import EngineError
from relax.models.decoder import Decoder
from relax.types import FinishReason

_CHUNK = 32  # rows of one decoding pass in deterministic mode


class Scheduler:
    """The batch and those who wait for a place in it. Not thread-safe: the engine's thread owns it.

    In deterministic mode all shapes that a row is computed in depend on the row alone, and so do its bits: prompts pass one by
    one, rows in padded passes of fixed size. A mixture of experts groups tokens by expert, so there a row passes alone.
    """

    def __init__(self, policy: Policy, config: LocalEngineConfig, stop_strings: StopStrings, *, deterministic: bool) -> None:
        self._policy, self._max_slots, self._max_prefill = policy, config.max_slots, config.max_prefill_tokens
        self._deterministic = deterministic
        self._rows = Rows(config.max_slots, policy.device, stop_strings)
        self._waiting: deque[Group] = deque()
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
        return sum(group.num_waiting for group in tuple(self._waiting))

    def submit(self, group: Group) -> None:
        self._waiting.append(group)

    def weights_changed(self) -> None:
        """To be called after the policy took weights: rows get a new segment, computed prompts are forgotten."""
        self._num_loads += 1
        self._rows.change_version(self._policy.version)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests with what there is. Unknown ids are of requests that have ended by themselves."""
        wanted = set(request_ids)
        for group in [group for group in self._waiting if group.request.request_id in wanted]:
            self._waiting.remove(group)
            group.abort_waiting()
        rows = [row for row, group in enumerate(self._rows.groups) if group.request.request_id in wanted]
        self._leave(dict.fromkeys(rows, FinishReason.ABORT))

    def fail(self, error: EngineError) -> None:
        """Ends every request with `error`."""
        for group in (*self._waiting, *self._rows.groups):
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
        entering: list[tuple[Group, int]] = []
        free, tokens = self._max_slots - self._rows.num, 0
        while self._waiting and free:
            group = self._waiting[0]
            if group.prefix is None or group.prefix.load != self._num_loads:
                if tokens and tokens + group.prompt_length > self._max_prefill:
                    break  # the rest of the prompts after the next step
                group.prefix = None
                tokens += group.prompt_length
            count = min(free, group.num_waiting)
            entering.append((group, count))
            free -= count
            if count < group.num_waiting:
                break
            self._waiting.popleft()
        if not entering:
            return
        self._prefill([group for group, _ in entering if group.prefix is None])
        self._place(entering)

    def _prefill(self, groups: list[Group]) -> None:
        """Computes prompts, those of one length side by side."""
        groups = sorted(groups, key=lambda group: group.prompt_length)
        for batch in [[group] for group in groups] if self._deterministic else [groups] if groups else []:
            lengths = [group.prompt_length for group in batch]
            ids = self._send(np.concatenate([np.asarray(group.request.prompt_ids, np.int64) for group in batch]))
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
            hidden = forward.hidden(ids, positions, attend_within(lengths, keep))
            ends = np.cumsum(lengths)
            logits = self._policy.logits(hidden[self._send(ends - 1)])
            for group, end, row in zip(batch, ends.tolist(), logits, strict=True):
                group.prefix = Prefix(keep[:, :, end - group.prompt_length : end], row, self._num_loads)
            self.prefilled_tokens += len(ids)

    def _place(self, entering: list[tuple[Group, int]]) -> None:
        """Gives the groups' next seeds a row each, and samples their first tokens."""
        first = self._rows.num
        for group, count in entering:
            limit = min(group.request.sampling.max_new_tokens, self._policy.max_context - group.prompt_length)
            self._rows.add(group, count, limit, self._policy.eos_ids, self._policy.version)
        cache = self._reserve(first, int(self._rows.prompt_length[first : self._rows.num].max()))
        row, logits = first, []
        for group, count in entering:
            assert group.prefix is not None
            cache.fill(row, count, group.prefix.kv)
            logits.append(group.prefix.logits.expand(count, -1))
            row += count
            if not group.num_waiting:
                group.prefix = None
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
        if self._deterministic:
            logits = self._logits_alike(cache, ids, at, [bucket(position + 1) for position in positions.tolist()])
        else:
            attend = cache.attend_step(at, longest, shortest)
            logits = self._policy.logits(self._policy.forward.hidden(ids, at, attend))
        self._sample(0, logits)

    def _logits_alike(self, cache: KVCache, ids: Tensor, positions: Tensor, buckets: list[int]) -> Tensor:
        """A decoding pass in which no row's bits depend on the others."""
        forward = self._policy.forward
        chunk = _CHUNK if isinstance(forward, Decoder) else 1
        parts = []
        for start in range(0, len(ids), chunk):
            rows = slice(start, min(start + chunk, len(ids)))
            count = rows.stop - start
            padding = (0, chunk - count)
            attend = cache.attend_step_alike(start, positions[rows], buckets[rows], chunk)
            padded_ids, padded_positions = F.pad(ids[rows], padding), F.pad(positions[rows], padding)
            parts.append(self._policy.logits(forward.hidden(padded_ids, padded_positions, attend))[:count])
        return torch.cat(parts)

    def _sample(self, start: int, logits: Tensor) -> None:
        """Samples the rows from `start` on; those that end leave."""
        how, uniform = self._rows.sampling(start, start + len(logits))
        tokens, logprobs = (x.cpu().numpy() for x in sample(logits, how, uniform))
        self.generated_tokens += len(tokens)
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
            if group in self._waiting:
                self._waiting.remove(group)
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

    def _send(self, column: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(column).to(self._policy.device)
