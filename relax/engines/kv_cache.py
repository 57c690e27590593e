"""Keys and values of the rows that are being decoded: row `i` of the batch is slot `i`, so what a step reads lies together."""

import torch
import torch.nn.functional as F
from torch import Tensor

from relax.models.causal_lm import Attend

_STEP = 16  # slots grow in length by at least this, and lengths are counted in it where shapes must not vary
_SHORT = 128  # a slot of so many tokens is small enough to be made in full length at once


class KVCache:
    """`[L, 2, slots, KV, T, D]`, dense. It grows to what the rows need: memory is `2 L KV D bytes x slots x T`.

    Slots are not longer than need be, since a step over rows that fill their slots reads memory in one go.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.zeros(num_layers, 2, 0, num_kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self._data.shape[2]

    @property
    def num_tokens(self) -> int:
        return self._data.shape[4]

    def reserve(self, num_rows: int, num_used: int, num_tokens: int, at_most: int) -> None:
        """Makes room for `num_rows` rows of `num_tokens` tokens; the first `num_used` rows keep what they hold.

        No row will be longer than `at_most`: where that is not much more, it is taken at once.
        """
        slots, length = self.num_slots, self.num_tokens
        if num_rows > slots:
            slots = max(num_rows, slots + slots // 2)
        if num_tokens > length:
            grown = _round_up(max(num_tokens, length + length // 4), _STEP)
            length = at_most if at_most <= max(_SHORT, 2 * num_tokens) else min(grown, at_most)
        if (slots, length) != (self.num_slots, self.num_tokens):
            self._resize(slots, length, num_used)

    def release(self) -> None:
        """Gives the memory back; no row holds anything any more."""
        self._resize(0, 0, 0)

    def _resize(self, slots: int, length: int, num_used: int) -> None:
        layers, two, _, heads, _, dim = self._data.shape
        # Zeros: a masked place is multiplied by 0, which only a finite number turns into 0.
        data = self._data.new_zeros(layers, two, slots, heads, length, dim)
        kept = min(self.num_tokens, length)
        data[:, :, :num_used, :, :kept] = self._data[:, :, :num_used, :, :kept]
        self._data = data

    def fill(self, start: int, count: int, prompt: Tensor) -> None:
        """Writes a prompt's keys and values `[L, 2, P, KV, D]` into the `count` rows from `start`."""
        rows = self._data[:, :, start : start + count, :, : prompt.shape[2]]
        rows.copy_(prompt.transpose(2, 3)[:, :, None])

    def move(self, sources: Tensor, targets: Tensor, num_tokens: int) -> None:
        """Copies the first `num_tokens` tokens of rows `sources [m]` over rows `targets [m]`, which are others."""
        self._data[:, :, targets, :, :num_tokens] = self._data[:, :, sources, :, :num_tokens]

    def clear(self, row: int) -> None:
        """Zeros in `row`, where something not finite may lie."""
        self._data[:, :, row] = 0

    def attend_step(self, positions: Tensor, longest: int, shortest: int) -> Attend:
        """One new token of each of the first `n` rows, at `positions [n]`, which lie between `shortest` and `longest`."""
        n, device, dtype = len(positions), self._data.device, self._data.dtype
        rows, length = torch.arange(n, device=device), longest + 1
        mask = None
        if shortest != longest:
            hidden = torch.arange(length, device=device) > positions[:, None]
            mask = torch.zeros(n, length, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[:, None]
        heads, dim = self._data.shape[3], self._data.shape[5]
        is_cpu_float = device.type == "cpu" and dtype == torch.float32

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._data[layer, 0, :n], self._data[layer, 1, :n]
            if shortest == longest:
                keys[:, :, longest], values[:, :, longest] = k, v
            else:
                keys[rows, :, positions], values[rows, :, positions] = k, v
            keys, values = keys[:, :, :length], values[:, :, :length]
            grouped = q.reshape(n, heads, -1, dim)  # the query heads of one key head are rows of one product
            if is_cpu_float:
                return _products(grouped, keys, values, mask).reshape(n, -1, dim)
            shown = None if mask is None else mask[:, None]
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=shown).reshape(n, -1, dim)

        return attend

    def attend_step_alike(self, start: int, positions: Tensor, buckets: list[int], chunk: int) -> Attend:
        """As `attend_step`, for rows `start, start + 1, ...`, in calls of `chunk` rows whose shape only a row's length decides.

        `buckets [n]` are the rows' lengths as `bucket` gives them; there must be that much room. The queries, keys and values
        may be of more than n rows: for those that follow the result is 0.
        """
        n = len(positions)
        rows = torch.arange(start, start + n, device=positions.device)
        calls = []
        for length in sorted(set(buckets)):
            members = [i for i, bucket in enumerate(buckets) if bucket == length]
            for first in range(0, len(members), chunk):
                part = members[first : first + chunk]
                padded = torch.tensor(part + [part[0]] * (chunk - len(part)), device=positions.device)
                hidden = torch.arange(length, device=positions.device) > positions[padded][:, None]
                mask = torch.zeros(chunk, length, dtype=self._data.dtype, device=positions.device)
                calls.append((length, len(part), padded, mask.masked_fill_(hidden, -torch.inf)[:, None]))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._data[layer, 0], self._data[layer, 1]
            keys[rows, :, positions], values[rows, :, positions] = k[:n], v[:n]
            out = torch.zeros_like(q)
            grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[-1])
            for length, count, padded, mask in calls:
                slots = rows[padded]
                mixed = _products(grouped[padded], keys[slots, :, :length], values[slots, :, :length], mask)
                out[padded[:count]] = mixed[:count].reshape(count, *q.shape[1:])
            return out

        return attend


def bucket(num_tokens: int) -> int:
    """The length of the attention call that a row of `num_tokens` tokens takes part in, where shapes must not vary."""
    return _round_up(num_tokens, _STEP)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`q [n, KV, R, D]`, `k, v [n, KV, T, D]`, `mask [n, 1, T]` -> `[n, KV, R, D]`.

    For one query a row two products are quicker on a CPU than a fused attention, which is made for many.
    """
    queries, keys, values = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # of slots in full length: no copy
    scale = q.shape[-1] ** -0.5
    if mask is None:
        scores = torch.bmm(queries * scale, keys.transpose(1, 2))
    else:
        shown = mask[:, None].expand(-1, q.shape[1], -1, -1).reshape(-1, 1, mask.shape[-1])
        scores = torch.baddbmm(shown, queries, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(torch.softmax(scores, -1), values).view(q.shape)
