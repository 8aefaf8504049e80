"""The description of a job: `JobSpec`, its fields and parameters, prompts, tools, structured output."""
