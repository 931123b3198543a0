"""A rollout server on transformers: batches requests, samples with a cache, takes new weights.

For tests and the demo, where verl's servers (vLLM, SGLang) do not run; one Ray actor for every
trainer rank. Weights come through Ray's object store.

Suffixes: `_B` requests of a batch, `_L` prompt tokens.
"""

import asyncio
import os
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

NAME = "dppo_cpu_server_{rank}"
PATIENCE = 0.02
"""Seconds in which requests are collected for a batch."""


class Server:
    """The actor.

    Args:
        model: Path of the policy.
        max_new: New tokens, where a request does not say.
        seed: Of the samples.
    """

    def __init__(self, model: str, *, max_new: int, seed: int, max_batch: int = 64) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        config = self._model.config
        self._eos, self._pad = config.eos_token_id, config.pad_token_id or 0
        self._max_new, self._max_batch = max_new, max_batch
        self._rng = torch.Generator().manual_seed(seed)
        self._version = 0
        self._queue: list[tuple[list[int], dict[str, Any], asyncio.Future[Any]]] = []
        self._task: asyncio.Task[None] | None = None

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **kwargs: Any
    ) -> TokenOutput:
        """One completion."""
        future = asyncio.get_running_loop().create_future()
        self._queue.append((list(prompt_ids), dict(sampling_params), future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        await asyncio.sleep(PATIENCE)
        while self._queue:
            batch, self._queue = self._queue[: self._max_batch], self._queue[self._max_batch :]
            try:
                outputs = self._sample([prompt for prompt, _, _ in batch], batch[0][1])
            except Exception as error:  # whoever waits is told, instead of waiting on
                for _, _, future in batch:
                    future.set_exception(error)
                continue
            for (_, _, future), output in zip(batch, outputs, strict=True):
                future.set_result(output)
            await asyncio.sleep(0)

    @torch.no_grad()
    def _sample(self, prompts: list[list[int]], params: dict[str, Any]) -> list[TokenOutput]:
        ids_BL, mask_BL = self._left_padded(prompts)
        temperature = float(params.get("temperature", 1.0))
        tokens: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        done_B = torch.zeros(len(prompts), dtype=torch.bool)
        position = (mask_BL.cumsum(-1) - 1).clamp(min=0)
        current, cache = ids_BL, None
        for _ in range(int(params.get("max_tokens", self._max_new))):
            output = self._model(
                input_ids=current,
                attention_mask=mask_BL,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
            cache = output.past_key_values
            next_B1, log_prob_B = self._next(output.logits[:, -1].float(), temperature)
            for row in (~done_B).nonzero()[:, 0].tolist():
                tokens[row].append(int(next_B1[row]))
                log_probs[row].append(float(log_prob_B[row]))
            done_B |= next_B1[:, 0] == self._eos
            if done_B.all():
                break
            current, position = next_B1, position[:, -1:] + 1
            mask_BL = torch.cat([mask_BL, torch.ones_like(next_B1)], dim=1)
        fields = {"global_steps": self._version}
        return [
            TokenOutput(token_ids=t, log_probs=p, stop_reason="completed", extra_fields=fields)
            for t, p in zip(tokens, log_probs, strict=True)
        ]

    def _next(self, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        scaled = logits / temperature if temperature > 0 else logits
        log_prob = scaled.log_softmax(-1)
        if temperature > 0:
            chosen = torch.multinomial(log_prob.exp(), 1, generator=self._rng)
        else:
            chosen = log_prob.argmax(-1, keepdim=True)
        return chosen, log_prob.gather(1, chosen)[:, 0]

    def _left_padded(self, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self._pad)
        mask = torch.zeros((len(prompts), longest), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        return ids, mask

    async def update_weights(self, named: dict[str, Any], version: int | None) -> None:
        """Take over the policy's parameters, all of them."""
        own = dict(self._model.named_parameters())
        missing = sorted(set(own) - set(named))
        if missing:
            raise ValueError(f"the update lacks {len(missing)} parameters, {missing[0]} first")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(torch.as_tensor(named[name]))
        self._version = self._version if version is None else version

    async def ready(self) -> bool:
        """Once the policy is loaded."""
        return True

    async def wake_up(self, tags: Any = None) -> None:
        """It never sleeps."""

    async def sleep(self) -> None:
        """It never does."""

    async def clear_kv_cache(self) -> None:
        """It lives for a batch."""

    async def release_kv_cache(self) -> None:
        """The same."""

    async def resume_kv_cache(self) -> None:
        """The same."""

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """They are over when a step is."""

    async def resume_generation(self) -> None:
        """It never stops."""

    async def start_profile(self, **kwargs: Any) -> None:
        """Not profiled."""

    async def stop_profile(self) -> None:
        """Not profiled."""


class ServerAdapter(BaseRollout):
    """In the trainer's worker: sends the policy's weights to the server of its rank."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._name = NAME.format(rank=os.environ["RANK"])  # no model parallelism: a server a rank

    async def resume(self, tags: Any) -> None:
        """The server never sleeps."""

    async def release(self) -> None:
        """The server never sleeps."""

    @torch.no_grad()
    async def update_weights(
        self, weights: Any, global_steps: int | None = None, **kwargs: Any
    ) -> None:
        """All ranks go through the weights, which gathers them."""
        named = {name: value.detach().float().cpu().numpy().copy() for name, value in weights}
        await ray.get_actor(self._name).update_weights.remote(named, global_steps)


class Replica(RolloutReplica):
    """Starts the server of a rank."""

    async def launch_servers(self) -> None:
        """Returns once it has loaded the policy."""
        path = getattr(self.model_config, "path", None) or self.model_config["path"]
        options = {"name": NAME.format(rank=self.replica_rank), "max_concurrency": 1000}
        handle = (
            ray.remote(num_cpus=0)(Server)
            .options(**options)
            .remote(path, max_new=self.config.response_length, seed=1000 + self.replica_rank)
        )
        await handle.ready.remote()
        self.servers = [handle]
        self._server_handle = handle
        self._server_address = f"hf-cpu-{self.replica_rank}"
