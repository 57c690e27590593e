"""A teacher's server: log-probs of a transformers model in float64, told in the form of each protocol, and what goes wrong."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

# What becomes of request number n (from 0): none for the true answer, an HTTP status, another body, what makes another answer
# of the true one, "hang", or "gone" for a connection that breaks.
Fault = Callable[[int], Any]


class TeacherServer:
    """Listens on 127.0.0.1 in a thread of its own while it is open; `fault` may change at any time.

    `num_tokens`: ids from there on are refused, as a server does that has not got them.
    """

    def __init__(self, model: Path, fault: Fault = lambda number: None) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
        self.num_tokens = int(self._model.config.vocab_size)
        self.fault, self.num_asked = fault, 0
        self.asked: dict[str, Any] = {}
        self.headers: dict[str, str] = {}
        self.most_at_once = self._at_once = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "TeacherServer":
        self._thread.start()
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/generate", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    async def _listen(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked, self.headers = asked, dict(request.headers)
        number, self.num_asked = self.num_asked, self.num_asked + 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(0)
            fault = self.fault(number)
            if fault == "hang":
                await asyncio.sleep(30)
            if fault == "gone" and request.transport is not None:
                request.transport.abort()
            if isinstance(fault, int):
                return web.Response(status=fault, text="so sorry")
            if isinstance(fault, bytes):
                return web.Response(body=fault)
            tokens = asked.get("prompt") or asked["input_ids"]
            if max(tokens) >= self.num_tokens:
                return web.Response(status=400, text=f"token id {max(tokens)} is out of vocabulary")
            told = self.tell(request.path, asked, tokens)
            return web.json_response(fault(told) if callable(fault) else told)
        finally:
            self._at_once -= 1

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """`[T - 1, V]` float64: of all tokens in place of each but the first."""
        with torch.no_grad():
            return torch.log_softmax(self._model(torch.tensor([tokens])).logits[0, :-1].double(), -1)

    def tell(self, path: str, asked: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        """The answer of the protocol that `asked` speaks."""
        table = self.logprobs(tokens)
        own = [table[place, token].item() for place, token in enumerate(tokens[1:])]

        def likeliest(count: int) -> list[list[tuple[float, int]]]:
            found = table.topk(count, -1)
            return [list(zip(*pair, strict=True)) for pair in zip(found.values.tolist(), found.indices.tolist(), strict=True)]

        if path == "/generate":
            count = asked["top_logprobs_num"]
            reported = [token if token < self.num_tokens - 1 else 0 for token in tokens]  # as it does
            entries = [[logprob, token, None] for logprob, token in zip([None, *own], reported, strict=True)]
            info: dict[str, Any] = {"input_token_logprobs": entries, "output_token_logprobs": []}
            if count:
                info["input_top_logprobs"] = [None, *[[[*pair, None] for pair in place] for place in likeliest(count)]]
            return {"text": "", "output_ids": [], "meta_info": {"prompt_tokens": len(tokens), **info}}
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
        if asked.get("echo"):
            choice["logprobs"] = {"token_logprobs": [None, *own, -0.5], "tokens": ["x"] * (len(tokens) + 1)}
        else:
            tops = likeliest(asked["prompt_logprobs"]) if asked["prompt_logprobs"] else [[] for _ in own]
            places = [_place(pair, top) for pair, top in zip(zip(own, tokens[1:], strict=True), tops, strict=True)]
            choice["prompt_logprobs"] = [None, *places]
        return {"object": "text_completion", "choices": [choice]}


def _place(own: tuple[float, int], top: list[tuple[float, int]]) -> dict[str, Any]:
    """The prompt's own token comes first, wherever it ranks."""
    ranked = {own[1]: (own[0], 99)} | {token: (logprob, rank) for rank, (logprob, token) in enumerate(top, 1)}
    return {str(token): {"logprob": lp, "rank": rank, "decoded_token": "?"} for token, (lp, rank) in ranked.items()}


def dumped(answer: Any) -> bytes:
    """As it goes over the wire."""
    return json.dumps(answer).encode()
