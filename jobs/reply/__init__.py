"""The results of a job: snapshots of rows, logprobs, reasoning, tool calls, the status of a batch."""
