"""Which prompt the next issue is for: those that must be issued again first, smallest first, then fresh ones."""

import heapq
from collections.abc import Iterable


class PromptNumbers:
    """`next_prompt`: the first that was never issued; `waiting`: a heap of those that were dropped to be issued again."""

    def __init__(self) -> None:
        self.next_prompt = 0
        self.waiting: list[int] = []
        self.num_reissued = 0

    def take(self) -> int:
        if self.waiting:
            self.num_reissued += 1
            return heapq.heappop(self.waiting)
        self.next_prompt += 1
        return self.next_prompt - 1

    def put_back(self, prompt: int) -> None:
        """The prompt's issue was dropped; another one is to be made."""
        heapq.heappush(self.waiting, prompt)

    def restore(self, next_prompt: int, waiting: Iterable[int], num_reissued: int) -> None:
        self.next_prompt, self.waiting, self.num_reissued = next_prompt, sorted(waiting), num_reissued
