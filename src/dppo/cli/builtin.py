"""The configuration of the built-in run; the same as `configs/builtin.yaml`."""

BUILTIN_CONFIG = {
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 4,
    "num_generations": 8,
    "max_steps": 60,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "linear",
    "beta": 0.0,
    "temperature": 1.0,
    "max_completion_length": 20,
    "completion_keep": 0.5,
    "gradient_checkpointing": False,
    "report_to": "none",
    "seed": 0,
    "disable_tqdm": True,
    "logging_steps": 1,
    "output_dir": "runs/builtin",
}
