"""From settings to what a worker works with: its options, the model's file, prompts, sizes and the engine."""
