"""verl's actor, and one method more: the gradient instead of a step."""

from typing import Any

import torch
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker


class GradWorker(ActorRolloutRefWorker):
    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def gradient(self, data: Any) -> Any:
        """Of all parameters, float64, the same in every row."""
        worker, engine = self.actor, self.actor.engine
        given = {
            "use_remove_padding": worker.model_config.get("use_remove_padding", False),
            "use_dynamic_bsz": worker.engine_config.use_dynamic_bsz,
            "max_token_len_per_gpu": worker.engine_config.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": worker.engine_config.micro_batch_size_per_gpu,
            "use_fused_kernels": False,
        }
        for name, value in given.items():
            if name not in data.keys():  # noqa: SIM118 - a TensorDict
                tu.assign_non_tensor(data, **{name: value})
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data, worker.loss_fn, forward_only=False)
            gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
            whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
            flat = torch.cat([g.flatten().double().cpu() for g in whole])
            engine.optimizer_zero_grad()
        return tu.get_tensordict({"gradient": flat.expand(data.shape[0], -1).clone()})
